"""The committed tokenizer, the script that made it, and the refusal of one that does not fit the model."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from transformers import AutoTokenizer

from recipes import make_tokenizer
from recipes.make_tokenizer import BOS, EOS, VOCAB_SIZE, save_tokenizer, train_tokenizer
from recipes.models.llama4 import train_spec

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizer"
TEXTS = ["def f(x):\n    return x", "the cat sat on the mat, the cat", "größer ≥ 😀"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(ASSETS))


def test_committed_tokenizer_has_every_byte_and_both_ends(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 2048
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert set(ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_bos_and_eos_are_added_once_and_on_demand(tokenizer: HuggingFaceTokenizer) -> None:
    plain = tokenizer.encode("some text", add_bos=False, add_eos=False)
    assert plain == tokenizer.encode("some text")
    assert not {0, 1} & set(plain)
    assert tokenizer.encode("some text", add_bos=True, add_eos=True) == [0, *plain, 1]
    assert tokenizer.encode("", add_bos=True, add_eos=True) == [0, 1]


@given(st.text(st.characters(codec="utf-8")))
@settings(deadline=None)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = HuggingFaceTokenizer(str(ASSETS))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_it_was_made_for_this_text(tokenizer: HuggingFaceTokenizer) -> None:
    text = "Return a new string object from the given argument, which must be an iterable."
    assert len(text) / len(tokenizer.encode(text)) > 3.5  # characters a token; 1 without merges


def test_transformers_reads_it_alike(tokenizer: HuggingFaceTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(ASSETS)
    text = "class A:\n\tdef f(self) -> 'é😀':  # two  spaces\n"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)


def test_same_texts_make_the_same_files(tmp_path: Path) -> None:
    for out in (tmp_path / "a", tmp_path / "b"):
        save_tokenizer(train_tokenizer(TEXTS, 300), out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert HuggingFaceTokenizer(str(tmp_path / "a")).get_vocab_size() <= 300


def test_committed_config_is_the_script_s(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(TEXTS, 300), tmp_path)
    made, committed = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, ASSETS))
    assert (tmp_path / "tokenizer_config.json").read_text() == (ASSETS / "tokenizer_config.json").read_text()
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"):
        assert made[part] == committed[part]


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("recipes.make_tokenizer.load_split", lambda *args, **kwargs: {"text": TEXTS})
    monkeypatch.setattr("sys.argv", ["make_tokenizer", "--out", str(tmp_path / "new"), "--vocab-size", "270"])
    make_tokenizer.main()
    assert "270 tokens" in capsys.readouterr().out
    assert HuggingFaceTokenizer(str(tmp_path / "new")).get_vocab_size() == 270


def test_too_few_tokens_for_the_bytes() -> None:
    with pytest.raises(ValueError, match="vocab_size = 257 is too small: 256 bytes and 2 special tokens need 258"):
        train_tokenizer(TEXTS, 257)


# The check of a train spec


def job(folder: Path, flavor: str = "debug") -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor, config.model.hf_assets_path = "llama4", flavor, str(folder)
    return config


def test_fitting_tokenizer_is_built() -> None:
    spec = train_spec()
    assert spec.build_tokenizer_fn(job(ASSETS)).get_vocab_size() <= spec.model_args["debug"].vocab_size


def test_larger_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(2049 - tokenizer.get_vocab_size())])
    save_tokenizer(tokenizer, tmp_path)
    message = r"has 2,049 tokens, and the vocabulary of llama4 'debug' only 2,048: .*make_tokenizer --vocab-size 2048"
    with pytest.raises(ValueError, match=message):
        train_spec().build_tokenizer_fn(job(tmp_path))


def test_unknown_flavor_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"model\.flavor = 'debg' is unknown to llama4: choose .*17bx16e.*debug"):
        train_spec().build_tokenizer_fn(job(ASSETS, "debg"))


def test_missing_folder_says_where_to_start() -> None:
    with pytest.raises(ValueError, match=r"hf_assets_path = 'assets/nothing' is no folder .*: start from the root"):
        train_spec().build_tokenizer_fn(job(Path("assets/nothing")))
