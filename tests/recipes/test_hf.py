"""Hugging Face checkpoints: transformers is the oracle, in memory and through files, there and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from transformers import Llama4ForCausalLM, MixtralForCausalLM

from recipes.convert_hf import main as convert
from recipes.models.hf.reader import INDEX
from recipes.models.llama4.adapter import Llama4Adapter, hidden_sizes
from recipes.models.mixtral.adapter import MixtralAdapter
from recipes.register import SPECS
from tests.helpers import DEVICE
from tests.recipes.hf_models import equal_bytes, gradients, load, pair
from tests.recipes.tiny_models import PUBLISHED, llama4_args, mixtral_args

ARGS = {
    "mixtral": mixtral_args(),
    "mixtral_window": mixtral_args(sliding_window=5),
    "llama4_all_moe": llama4_args(interleave_moe_layer_step=1),
    "llama4_dense_between": llama4_args(),
    "scout": llama4_args(interleave_moe_layer_step=1, **PUBLISHED),
    "maverick": llama4_args(**PUBLISHED | {"qk_norm": False, "rope_scaling_args": None}),
}
B, S, V = 2, 24, 64

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="float32 on a GPU is TF32 in places")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def save(theirs: Any, folder: Path, layout: str) -> Path:
    """The layouts in which transformers saves: one file, small shards with an index, fused experts, bfloat16."""
    options = {"shards": {"max_shard_size": "40KB"}, "fused": {"save_original_format": False}}.get(layout, {})
    theirs.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("name", ARGS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    theirs, ours, adapter = pair(ARGS[name])
    ours.load_state_dict(adapter.from_hf(theirs.state_dict()), strict=False)
    tokens, upstream = torch.randint(0, V, (B, S)), torch.randn(B, S, V)
    expected, their_grads = gradients(theirs, tokens, upstream)
    logits, our_grads = gradients(ours, tokens, upstream)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    converted = adapter.from_hf(their_grads)
    assert converted.keys() == our_grads.keys()
    for weight, grad in our_grads.items():
        error = (grad - converted[weight]).norm() / converted[weight].norm()
        assert error < 1e-4, (weight, error)


@pytest.mark.parametrize(
    "left_out", ["qk_norm", "no_rope_layer_interval", "attention_chunk_size", "attn_temperature_tuning"]
)
def test_each_part_of_the_published_attention_matters(left_out: str) -> None:
    full = llama4_args(**PUBLISHED)
    theirs, _, _ = pair(full)
    _, ours, adapter = pair(llama4_args(**{k: v for k, v in PUBLISHED.items() if k != left_out}))
    ours.load_state_dict(adapter.from_hf(theirs.state_dict()), strict=False)
    tokens = torch.randint(0, V, (B, S))
    assert (ours(tokens) - theirs(tokens).logits).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["one_file", "shards", "fused"])
def test_mixtral_is_read_in_every_layout(layout: str, tmp_path: Path) -> None:
    theirs, ours, adapter = pair(ARGS["mixtral"])
    load(ours, adapter, save(theirs, tmp_path, layout))
    expected = dict(ours.named_parameters())
    assert equal_bytes(adapter.from_hf(theirs.state_dict()), expected)
    assert equal_bytes(adapter.from_hf(tensors_of(tmp_path)), expected)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_llama4_is_read_under_either_prefix(prefix: str, tmp_path: Path) -> None:
    theirs, ours, adapter = pair(ARGS["maverick"])
    weights = {prefix + k: v.contiguous() for k, v in theirs.state_dict().items()}
    if prefix:
        weights["vision_model.patch_embedding.linear.weight"] = torch.randn(3, 3)
    save_file(weights, tmp_path / "model.safetensors")
    load(ours, adapter, tmp_path)
    expected = {k: v for k, v in adapter.from_hf(theirs.state_dict()).items() if "expert_bias" not in k}
    assert equal_bytes(expected, dict(ours.named_parameters()))


def test_loading_into_views_needs_no_second_copy(tmp_path: Path) -> None:
    theirs, ours, adapter = pair(ARGS["mixtral"])
    tensors = adapter.to_hf(ours.state_dict())
    reader = adapter.get_hf_storage_reader(str(save(theirs, tmp_path, "one_file")))
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    loaded = adapter.from_hf(tensors)
    assert {v.data_ptr() for v in loaded.values()} == {p.data_ptr() for p in ours.parameters()}
    tensors["model.norm.weight"] = torch.zeros(32)  # replaced, not filled
    assert not adapter.from_hf(tensors)["norm.weight"].any()


@pytest.mark.parametrize("name", ["mixtral", "maverick", "scout"])
@pytest.mark.parametrize("layout", ["one_file", "shards"])
def test_export_by_torchtitan_has_the_bytes_of_the_original(name: str, layout: str, tmp_path: Path) -> None:
    """Load, export as CheckpointManager.dcp_save does, compare file by file; then transformers reads it."""
    theirs, ours, _ = pair(ARGS[name])
    original, out = save(theirs, tmp_path / "original", layout), tmp_path / "export"
    Adapter = MixtralAdapter if name == "mixtral" else Llama4Adapter
    adapter = Adapter(ARGS[name], str(original))
    load(ours, adapter, original)
    mapping = adapter.fqn_to_index_mapping
    writer = HuggingFaceStorageWriter(
        str(out / "sharded" if mapping else out),
        fqn_to_index_mapping=mapping,
        save_distributed=True,
        enable_consolidation=not mapping,
    )
    dcp.save(adapter.to_hf(ours.state_dict()), storage_writer=writer, no_dist=True)
    if mapping:
        consolidate_safetensors_files(str(out / "sharded"), str(out), mapping)
        expected, actual = (json.loads((f / INDEX).read_text())["weight_map"] for f in (original, out))
        assert actual == expected
    assert equal_bytes(tensors_of(original), tensors_of(out))
    shutil.copy(original / "config.json", out)
    Theirs = MixtralForCausalLM if name == "mixtral" else Llama4ForCausalLM
    assert equal_bytes(Theirs.from_pretrained(out).state_dict(), theirs.state_dict())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4, here 2"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, r"here theta 1000000"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, r"yarn"),
        ({"sliding_window": 16}, r"sliding_window is 16, here None"),
        ({"tie_word_embeddings": True}, "output head of its own"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1, here 2"),
    ],
)
def test_config_of_another_mixtral_is_refused(change: dict, match: str, tmp_path: Path) -> None:
    adapter = MixtralAdapter(ARGS["mixtral"], None)
    (tmp_path / "config.json").write_text(json.dumps(adapter.config() | change))
    with pytest.raises(ValueError, match=match):
        adapter.get_hf_storage_reader(str(tmp_path))


def test_config_of_the_same_mixtral_passes(tmp_path: Path) -> None:
    theirs, _, adapter = pair(ARGS["mixtral"])
    window = {"sliding_window": 64, "head_dim": None, "rope_theta": 1e6}  # as old configs say it
    save(theirs, tmp_path, "one_file")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "rope" not in k} | window))
    adapter.get_hf_storage_reader(str(tmp_path))


@pytest.mark.parametrize(
    ("flavor", "billions", "hidden"), [("scout", 107.8, (8192, None)), ("maverick", 400.7, (8192, 16384))]
)
def test_sizes_of_the_published_llama4(flavor: str, billions: float, hidden: tuple) -> None:
    """Text only: 109 and 402 billion are with the vision tower. Every weight has a place in the checkpoint."""
    spec = SPECS["llama4"]()
    args = replace(spec.model_args[flavor], max_seq_len=4096)
    assert hidden_sizes(args) == hidden
    with torch.device("meta"):
        model = spec.model_cls(args)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == billions
    rules = spec.state_dict_adapter(args, None).rules
    assert {name for rule in rules for name in rule.natives} == {name for name, _ in model.named_parameters()}


def test_scout_is_refused_by_a_model_without_its_attention(tmp_path: Path) -> None:
    adapter = Llama4Adapter(ARGS["scout"], None)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": adapter.config(), "model_type": "llama4"}))
    adapter.check_config(tmp_path)
    plain = Llama4Adapter(ARGS["llama4_all_moe"], None)
    with pytest.raises(ValueError, match=r"use_qk_norm is True, here False; no_rope_layers.*its rotation"):
        plain.check_config(tmp_path)


def test_what_has_no_place_is_refused() -> None:
    _, ours, adapter = pair(ARGS["mixtral"])
    hub, key = adapter.to_hf(ours.state_dict()), "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    with pytest.raises(ValueError, match=r"layers\.0\.extra"):
        adapter.to_hf({**ours.state_dict(), "layers.0.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"model\.extra"):
        adapter.from_hf({**hub, "model.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"experts\.7\.w2\.weight missing \(11 of 12"):
        adapter.from_hf({k: v for k, v in hub.items() if k != key})
    with pytest.raises(ValueError, match="quantized"):
        adapter.get_hf_storage_reader("anywhere", from_quantized=True)
    assert adapter.from_hf({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}) == {}


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    theirs, ours, adapter = pair(ARGS["mixtral"])
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        load(ours, adapter, tmp_path)
    save(theirs, tmp_path, "shards")
    (tmp_path / "model-00002-of-00008.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00008\.safetensors, which the folder lacks"):
        load(ours, adapter, tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=r"has no tensor model\.layers\..*\(12 are missing\)"):
        load(ours, adapter, tmp_path)
    save_file({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "fp8.safetensors")
    with pytest.raises(ValueError, match="stored as F8_E4M3"):
        load(ours, adapter, tmp_path)


def test_command_line_names_what_it_knows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert convert(["config", str(tmp_path), "--model", "mixtrall", "--flavor", "debug"]) == 2
    assert "choose llama4, mixtral" in capsys.readouterr().err
    assert convert(["config", str(tmp_path), "--model", "mixtral", "--flavor", "7b"]) == 2
    assert "8x7b" in capsys.readouterr().err
