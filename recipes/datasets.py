"""Datasets for torchtitan's own loader: each source of documents in three splits, `NAME`, `NAME_validation`,
`NAME_test`.

torchtitan knows a dataset as a name and a function of a path, so what `[data]` says, and the number of ranks that share
the documents, are bound into that function before the loader is built. The result is a map-style `Dataset` in memory:
torchtitan shards it over the data-parallel ranks and resumes it by position. Each rank holds the text of its split
once; for a corpus beyond the memory of a host, name one of torchtitan's streaming datasets instead.
"""

import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal

from datasets import Dataset, Features, Value
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

from recipes.documents import (
    pieces,
    read_jsonl,
    read_parquet,
    read_python_docs,
    read_python_packages,
    read_text_files,
)
from recipes.job_config import DataConfig

Split = Literal["train", "validation", "test"]
Reader = Callable[[str, str], Iterator[str]]

# name -> (reader, path where none is given)
SOURCES: Mapping[str, tuple[Reader, str]] = MappingProxyType(
    {
        "python_docs": (read_python_docs, sysconfig.get_path("stdlib")),
        "python_packages": (read_python_packages, sysconfig.get_path("purelib")),
        "jsonl": (read_jsonl, ""),
        "text_files": (read_text_files, ""),
        "parquet": (read_parquet, ""),
    }
)


def split_of(text: str, config: DataConfig) -> Split:
    """The split of a document, from a hash of its text alone: the same on every machine, rank and order of reading."""
    # 64 bits as a number in [0, 1); Python's own hash() differs between processes.
    position = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    if position < config.test_fraction:
        return "test"
    return "validation" if position < config.test_fraction + config.validation_fraction else "train"


def load_split(path: str, *, name: str, split: Split, config: DataConfig, ranks: int) -> Dataset:
    """The documents of one split, shuffled, in the column `text`.

    Only the training documents follow `[data] shuffle_seed`: a run validates on the first batches of its split, and
    runs of several seeds must do so on the same ones.

    Raises ValueError where there are none, or fewer than `ranks`, the data-parallel ranks that share them.
    """
    read, _ = SOURCES[name]
    documents = [text for text in read(path, config.text_column) if text.strip()]
    texts = [text for text in documents if split_of(text, config) == split]
    logger.info(f"{name} from {path}: {len(texts):,} of {len(documents):,} documents are in the {split} split")
    if not texts:
        raise ValueError(
            f"The {split} split of {name} at {path!r} is empty: {len(documents)} documents, "
            f"validation_fraction = {config.validation_fraction}, test_fraction = {config.test_fraction}. "
            "Give more documents or change the fractions in [data]."
        )
    if len(texts) < ranks:
        raise ValueError(
            f"The {split} split of {name} at {path!r} has {len(texts)} documents for {ranks} data-parallel ranks, "
            "and each rank needs one of its own. Give more documents, change the fractions in [data], or use fewer "
            "ranks."
        )
    if config.piece_chars:
        texts = [piece for text in texts for piece in pieces(text, config.piece_chars) if piece.strip()]
    # large_string: 64-bit offsets, a split may hold more than 2 GiB of text.
    dataset = Dataset.from_dict({"text": texts}, features=Features({"text": Value("large_string")}))
    return dataset.shuffle(seed=config.shuffle_seed if split == "train" else 0)


def register_datasets(config: DataConfig, ranks: int = 1) -> None:
    """Put our names into torchtitan's DATASETS, bound to `config` and `ranks`; replaces an earlier binding."""
    for name, (_, path) in SOURCES.items():
        for split, suffix in (("train", ""), ("validation", "_validation"), ("test", "_test")):
            loader = partial(load_split, name=name, split=split, config=config, ranks=ranks)
            DATASETS[name + suffix] = DatasetConfig(path=path, loader=loader, sample_processor=_text)


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]
