"""Reads safetensors for torch.distributed.checkpoint, also where a folder's tensors are not cut as the model asks for.

The model asks for the names and shapes of the layout that it exports. A folder may hold another one: all experts of a
layer in one tensor, or other prefixes. `regions` says which of the asked names each stored tensor holds, and each rank
reads just the bytes of its shards, straight into its weights: nothing is loaded whole, nothing is converted.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Region:
    """A part of a stored tensor under the name that the model asks for.

    start, shape: in the dims of the stored tensor. drop_first: the first dim, of size 1, is not asked for.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    drop_first: bool = False

    @property
    def asked_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.drop_first else self.shape


@dataclass(frozen=True)
class _Stored:
    file: Path
    key: str
    region: Region


Regions = Callable[[str, tuple[int, ...]], list[Region]]


def whole(name: str, shape: tuple[int, ...]) -> Region:
    """A stored tensor as it is."""
    return Region(name, (0,) * len(shape), shape)


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold a model: those of its index, else all.

    Raises:
        ValueError: there is none, or the index names one that is missing.
    """
    if (folder / INDEX).exists():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        if missing := [n for n in names if not (folder / n).exists()]:
            raise ValueError(f"{folder / INDEX} names {', '.join(missing)}, which the folder lacks: download it again.")
        return [folder / n for n in names]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise ValueError(
        f"{str(folder)!r} holds no *.safetensors: give the folder of a Hugging Face model (pytorch_model.bin is not "
        "read; save_pretrained of transformers writes safetensors)."
    )


class RegionReader(HuggingFaceStorageReader):
    """torch's reader of Hugging Face checkpoints, with `regions` between the stored names and the asked ones.

    Raises, when it is made: ValueError for a folder that cannot be read. torch would bury the sentence later on.
    """

    def __init__(self, path: str, regions: Regions) -> None:
        super().__init__(path)
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._where: dict[MetadataIndex, _Stored] = {}
        for file in safetensors_files(Path(path)):
            with safe_open(file, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118  (a safe_open is no dict)
                    stored = f.get_slice(key)
                    for region in regions(key, tuple(stored.get_shape())):
                        self._add(_Stored(file, key, region), _dtype(stored.get_dtype(), key))

    def _add(self, stored: _Stored, dtype: torch.dtype) -> None:
        name, shape = stored.region.name, torch.Size(stored.region.asked_shape)
        origin = torch.Size([0] * len(shape))
        self.tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=shape,
            chunks=[ChunkStorageMetadata(offsets=origin, sizes=shape)],
        )
        self._where[MetadataIndex(name, origin)] = stored

    def read_metadata(self) -> Metadata:
        """What the folder offers, under the names that the model asks for."""
        storage_meta = StorageMeta(load_id=self.load_id)
        return Metadata(state_dict_metadata=self.tensors, storage_data=self._where, storage_meta=storage_meta)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills this rank's tensors."""
        by_file: dict[Path, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with safe_open(file, framework="pt") as f:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(f, self.storage_data[item.storage_index], item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _dtype(name: str, key: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{key} is stored as {name}: quantized checkpoints are not read, take the model's BF16 one.")
    return DTYPES[name]


def _read(f: Any, stored: _Stored, item: ReadItem) -> torch.Tensor:
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if stored.region.drop_first:
        offsets, lengths = (0, *offsets), (1, *lengths)
    starts = [a + b for a, b in zip(stored.region.start, offsets, strict=True)]
    part = f.get_slice(stored.key)[tuple(slice(s, s + n) for s, n in zip(starts, lengths, strict=True))]
    return part.squeeze(0) if stored.region.drop_first else part


class SafetensorsFolder:
    """Whole tensors of a folder by the asked names, read when they are asked for; close it, or use `with`."""

    def __init__(self, folder: Path, regions: Regions) -> None:
        self._stack, self._stored = ExitStack(), {}
        for file in safetensors_files(folder):
            f = self._stack.enter_context(safe_open(file, framework="pt"))
            for key in f.keys():  # noqa: SIM118
                shape = tuple(f.get_slice(key).get_shape())
                for region in regions(key, shape):
                    self._stored[region.name] = (f, key, region)

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, from the file's header."""
        f, key, _ = self._stored[name]
        return _dtype(f.get_slice(key).get_dtype(), key)

    def __getitem__(self, name: str) -> torch.Tensor:
        f, key, region = self._stored[name]
        ends = (slice(s, s + n) for s, n in zip(region.start, region.shape, strict=True))
        part = f.get_slice(key)[tuple(ends)]
        return part.squeeze(0) if region.drop_first else part
