"""Checkpoint folders from torchtitan's format to Hugging Face's and back, one weight at a time.

Host memory stays near one shard plus one weight: towards Hugging Face a shard is written as soon as it is full, the
other way each tensor is read when torch's writer asks for it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from recipes.models.hf.adapter import HFAdapter
from recipes.models.hf.reader import INDEX, SafetensorsFolder
from recipes.models.hf.rules import Rule


@dataclass(frozen=True)
class _Part:
    """One tensor of the result: its rule, name and file number."""

    rule: Rule
    key: str
    shard: int


def to_hf(
    checkpoint: Path, out: Path, rules: list[Rule], dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
) -> dict[str, str]:
    """Writes safetensors (and an index, if there is more than one file) of the model in a torchtitan checkpoint.

    dtype: None keeps what the checkpoint has. Returns the file of each tensor.

    Raises:
        ValueError: the checkpoint lacks a weight, or `out` holds safetensors already.
    """
    if out.exists() and any(out.glob("*.safetensors")):
        raise ValueError(f"{str(out)!r} holds safetensors already: give another folder, or remove them.")
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    empty = {name: torch.empty(m.size, dtype=m.properties.dtype, device="meta") for name, m in _tensors(stored)}
    if missing := [name for rule in rules for name in rule.natives if name not in empty]:
        raise ValueError(f"The checkpoint {str(checkpoint)!r} has no {missing[0]}: is it of another model or flavor?")
    parts, total = _plan(rules, empty, dtype, max_shard_bytes)
    n = parts[-1].shard
    names = [f"model-{i:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors" for i in range(1, n + 1)]
    out.mkdir(parents=True, exist_ok=True)
    load = lambda rule: _load(checkpoint, {name: empty[name] for name in rule.natives})  # noqa: E731
    for shard, tensors in _shards(parts, load, dtype):
        save_file(tensors, out / names[shard - 1], metadata={"format": "pt"})
    files = {part.key: names[part.shard - 1] for part in parts}
    if n > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
        (out / INDEX).write_text(text + "\n")
    return files


def _tensors(stored: dict) -> Iterator[tuple[str, TensorStorageMetadata]]:
    return ((name, m) for name, m in stored.items() if isinstance(m, TensorStorageMetadata))


def _plan(
    rules: list[Rule], empty: dict[str, Tensor], dtype: torch.dtype | None, max_shard_bytes: int
) -> tuple[list[_Part], int]:
    """Every tensor of the result with its file number from 1, and the bytes of all."""
    parts, shard, filled, total = [], 1, 0, 0
    for rule in rules:
        for key, tensor in rule.to_hf(empty).items():
            size = tensor.numel() * (dtype or tensor.dtype).itemsize
            if filled and filled + size > max_shard_bytes:
                shard, filled = shard + 1, 0
            filled, total = filled + size, total + size
            parts.append(_Part(rule, key, shard))
    return parts, total


def _shards(
    parts: list[_Part], load: Callable[[Rule], dict[str, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Each file's number and tensors, one file at a time; a rule's weights are loaded once."""
    tensors: dict[str, Tensor] = {}
    loaded: Rule | None = None
    converted: dict[str, Tensor] = {}
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if part.rule is not loaded:
            loaded, converted = part.rule, part.rule.to_hf(load(part.rule))
        tensor = converted.pop(part.key)
        tensors[part.key] = tensor.to(dtype or tensor.dtype).contiguous()
        if following is None or following.shard != part.shard:
            yield part.shard, tensors
            tensors = {}


def _load(checkpoint: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {name: torch.empty_like(meta, device="cpu") for name, meta in like.items()}
    dcp.load(weights, checkpoint_id=checkpoint, no_dist=True)
    return weights


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans from meta tensors and reads each weight when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn)


def from_hf(
    folder: Path, out: Path, adapter: HFAdapter, weights: dict[str, Tensor], dtype: torch.dtype | None = None
) -> None:
    """Writes a torchtitan checkpoint of a Hugging Face folder, for `--checkpoint.initial_load_path`.

    weights: our weights on the meta device, for their shapes. dtype: None keeps what the folder has.

    Raises:
        ValueError: the folder is of another model, or lacks a tensor.
    """
    adapter.check_config(folder)
    rule_of = {name: rule for rule in adapter.rules for name in rule.natives}
    with SafetensorsFolder(folder, adapter.regions) as files:
        if missing := [key for name in weights for key in rule_of[name].keys if key not in files]:
            raise ValueError(f"{str(folder)!r} has no tensor {missing[0]}: is it of another model or flavor?")

        def read(name: str) -> Tensor:
            rule = rule_of[name]
            tensor = rule.from_hf({key: files[key] for key in rule.keys})[name]
            if tensor.shape != weights[name].shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} there and {tuple(weights[name].shape)} here.")
            return tensor.to(dtype or tensor.dtype)

        planned = {n: torch.empty_like(w, dtype=dtype or files.dtype(rule_of[n].keys[0])) for n, w in weights.items()}
        dcp.save(planned, storage_writer=FileSystemWriter(out), planner=_ReadWhenWritten(read), no_dist=True)
