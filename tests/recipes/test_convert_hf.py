"""convert_hf: files there and back, in shards, host memory near one shard; tokenizer folders as the hub has them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.protocols.train_spec import TrainSpec
from transformers import MixtralForCausalLM, PreTrainedModel

import recipes.convert_hf
from recipes.models import mixtral
from recipes.models.hf import convert
from recipes.models.hf.reader import INDEX
from recipes.models.llama4.adapter import Llama4Adapter
from recipes.models.llama4.attention import Llama4
from tests.recipes.hf_models import equal_bytes, pair
from tests.recipes.tiny_models import PUBLISHED, llama4_args, mixtral_args

FLAVORS = {"tiny": mixtral_args(), "tiny4": llama4_args(**PUBLISHED)}


@pytest.fixture(autouse=True)
def tiny_flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(**changes: object) -> TrainSpec:
        return replace(mixtral.train_spec(), model_args=FLAVORS, **changes)

    llama4 = lambda: spec(model_cls=Llama4, state_dict_adapter=Llama4Adapter)  # noqa: E731
    monkeypatch.setattr(recipes.convert_hf, "SPECS", {"mixtral": spec, "llama4": llama4})


def run(command: str, *args: object) -> None:
    assert recipes.convert_hf.main([command, *map(str, args)]) == 0


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def original(folder: Path, flavor: str = "tiny", **options: object) -> PreTrainedModel:
    theirs, _, _ = pair(FLAVORS[flavor])
    theirs.save_pretrained(folder, **options)
    return theirs


@pytest.mark.parametrize(("model", "flavor"), [("mixtral", "tiny"), ("llama4", "tiny4")])
@pytest.mark.parametrize("source", ["one_file", "shards"])
def test_there_and_back_is_byte_equal(model: str, flavor: str, source: str, tmp_path: Path) -> None:
    hf, checkpoint, back = (tmp_path / name for name in ("hf", "checkpoint", "back"))
    original(hf, flavor, **({"max_shard_size": "40KB"} if source == "shards" else {}))
    names = ("--model", model, "--flavor", flavor)
    run("from-hf", hf, checkpoint, *names)
    run("to-hf", checkpoint, back, *names, "--assets", hf, "--max-shard-gb", 60e-6)
    assert equal_bytes(tensors_of(hf), tensors_of(back))
    weight_map = json.loads((back / INDEX).read_text())["weight_map"]
    files = sorted(back.glob("*.safetensors"))
    assert len(files) == len(set(weight_map.values())) > 3
    assert all(name in load_file(back / file) for name, file in weight_map.items())
    large = [f for f in files if f.stat().st_size > 60e3 + 5e3 and len(load_file(f)) > 1]  # 5 kB of header
    assert not large


def test_fused_layout_and_dtype(tmp_path: Path) -> None:
    hf, checkpoint, back = (tmp_path / name for name in ("hf", "checkpoint", "back"))
    theirs = original(hf, save_original_format=False)
    names = ("--model", "mixtral", "--flavor", "tiny")
    run("from-hf", hf, checkpoint, *names, "--dtype", "bfloat16")
    run("to-hf", checkpoint, back, *names, "--layout", "fused")
    expected = {name: w.bfloat16() for name, w in tensors_of(hf).items()}
    assert equal_bytes(expected, tensors_of(back))
    # Its own config.json, since no --assets was given.
    again = MixtralForCausalLM.from_pretrained(back, dtype=torch.bfloat16)
    assert equal_bytes(again.state_dict(), theirs.bfloat16().state_dict())


def test_memory_stays_near_a_shard_and_a_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytes held: tensors loaded for a rule and not yet written. Each weight is loaded once."""
    hf, checkpoint, back = (tmp_path / name for name in ("hf", "checkpoint", "back"))
    original(hf)
    names = ("--model", "mixtral", "--flavor", "tiny")
    run("from-hf", hf, checkpoint, *names)
    held: dict[int, int] = {}
    peak, loads = 0, []
    load, save = convert._load, convert.save_file

    def counted_load(path: Path, like: dict) -> dict:
        nonlocal peak
        weights = load(path, like)
        loads.extend(weights)
        held.update({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights.values()})
        peak = max(peak, sum(held.values()))
        return weights

    def counted_save(tensors: dict, path: Path, **kwargs: object) -> None:
        save(tensors, path, **kwargs)
        for tensor in tensors.values():
            held.pop(tensor.untyped_storage().data_ptr(), None)

    monkeypatch.setattr(convert, "_load", counted_load)
    monkeypatch.setattr(convert, "save_file", counted_save)
    run("to-hf", checkpoint, back, *names, "--max-shard-gb", 100e-6)
    weight = max(w.numel() * 4 for w in pair(FLAVORS["tiny"])[1].parameters())
    assert peak <= 100e3 + 2 * weight
    assert len(loads) == len(set(loads))


def test_from_hf_reads_a_weight_when_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original(tmp_path / "hf")
    events: list[str] = []
    read, write = convert.SafetensorsFolder.__getitem__, convert._ReadWhenWritten.lookup_object
    track = lambda f, what: lambda self, key: (events.append(what), f(self, key))[1]  # noqa: E731
    monkeypatch.setattr(convert.SafetensorsFolder, "__getitem__", track(read, "read"))
    monkeypatch.setattr(convert._ReadWhenWritten, "lookup_object", track(write, "write"))
    run("from-hf", tmp_path / "hf", tmp_path / "checkpoint", "--model", "mixtral", "--flavor", "tiny")
    assert events[0] == "write"
    assert "read read write read" in " ".join(events), "all was read before the first write"


@pytest.mark.parametrize(("flavor", "match"), [("tiny4", "has no layers."), ("tiny", "safetensors already")])
def test_to_hf_refuses(flavor: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original(tmp_path / "hf")
    run("from-hf", tmp_path / "hf", tmp_path / "checkpoint", "--model", "mixtral", "--flavor", "tiny")
    model = "mixtral" if flavor == "tiny" else "llama4"
    out = tmp_path / ("hf" if flavor == "tiny" else "out")
    args = ["to-hf", str(tmp_path / "checkpoint"), str(out), "--model", model, "--flavor", flavor]
    assert recipes.convert_hf.main(args) == 2
    assert match in capsys.readouterr().err


def test_config_completes_an_export(tmp_path: Path) -> None:
    theirs = original(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "export").mkdir()
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "export" / "model.safetensors")
    run("config", tmp_path / "export", "--model", "mixtral", "--flavor", "tiny", "--assets", tmp_path / "hf")
    assert (tmp_path / "export" / "tokenizer.json").exists()
    assert equal_bytes(MixtralForCausalLM.from_pretrained(tmp_path / "export").state_dict(), theirs.state_dict())


def mixtral_tokenizer(folder: Path) -> None:
    """Pieces with byte fallback, `add_bos_token` and all special tokens in tokenizer_config.json."""
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{i:02X}>": i + 3 for i in range(256)},
        "▁": 259,
        "a": 260,
        "▁a": 261,
    }
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = {"single": "<s> $A", "pair": "<s> $A <s> $B", "special_tokens": [("<s>", 1)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(i): {"content": t, "special": True, "normalized": False} for i, t in enumerate(("<unk>", "<s>", "</s>"))
    }
    config = {"add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": added, "legacy": True}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def llama4_tokenizer(folder: Path) -> None:
    """Byte-level BPE, special tokens after the vocabulary, bos from the post-processor alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot|>", "<|fim_pad|>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    template = {"single": "<|begin_of_text|> $A", "special_tokens": [("<|begin_of_text|>", 256)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {str(256 + i): {"content": t, "special": True, "normalized": False} for i, t in enumerate(special)}
    config = {"added_tokens_decoder": added, "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizer"}))


@pytest.mark.parametrize(
    ("make", "bos", "eos", "middle"),
    [(mixtral_tokenizer, 1, 2, [261, 198, 172]), (llama4_tokenizer, 256, 257, None)],
    ids=["mixtral", "llama4"],
)
def test_tokenizer_folders_of_the_hub(
    make: object, bos: int, eos: int, middle: list[int] | None, tmp_path: Path
) -> None:
    make(tmp_path)
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
    ids = tokenizer.encode("aé", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (bos, eos)
    assert ids.count(bos) == ids.count(eos) == 1
    assert middle is None or ids[1:-1] == middle
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "aé"
