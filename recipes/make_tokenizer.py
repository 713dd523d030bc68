"""Makes a byte-level BPE tokenizer from the training split of `python_docs`; assets/tokenizer was made by this script.

    python -m recipes.make_tokenizer --out assets/tokenizer

Every byte is a token, so any text can be encoded and comes back exactly. The same documents give the same files; the
documents are those of the running CPython (assets/tokenizer: 3.11.7), so another version gives other merges.
"""

import argparse
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.arguments import count, out_folder
from recipes.datasets import load_split
from recipes.job_config import DataConfig

# 256 bytes, 2 special tokens, 1,790 merges. A multiple of 16: the vocabulary is a GEMM dimension of the output head.
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE with at most `vocab_size` tokens, `BOS` (id 0) and `EOS` (id 1) among them.

    Raises ValueError where `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    if vocab_size < 258:
        raise ValueError(f"vocab_size = {vocab_size} is too small: 256 bytes and 2 special tokens need 258.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in (BOS, EOS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json and the tokenizer_config.json from which torchtitan learns bos and eos."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line `argv` (sys.argv when None): trains on the running interpreter's documentation and writes
    the two files.
    """
    parser = argparse.ArgumentParser(prog="python -m recipes.make_tokenizer", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=out_folder, required=True, help="folder to write, made if missing")
    size = count("cannot hold 256 bytes and 2 special tokens", least=258)
    parser.add_argument("--vocab-size", type=size, default=VOCAB_SIZE, help="tokens in all (default %(default)s)")
    args = parser.parse_args(argv)
    docs = load_split(sysconfig.get_path("stdlib"), name="python_docs", split="train", config=DataConfig(), ranks=1)
    tokenizer = train_tokenizer(docs["text"], args.vocab_size)
    save_tokenizer(tokenizer, args.out)
    print(f"{args.out}: {tokenizer.get_vocab_size():,} tokens from {len(docs):,} documents")


if __name__ == "__main__":
    main()
