"""The loader with a worker process: the same batches, the same positions, and an end of its own."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from collections import Counter
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from recipes.datasets import _text
from recipes.loader import Loader, PackedText, build_dataloader
from tests.recipes.test_loader import DOCUMENTS, Recorder, job, registered, tokenizer, validator

__all__ = ["registered", "tokenizer"]  # fixtures


def with_workers(config: JobConfig, workers: int) -> JobConfig:
    config.training.dataloader.num_workers = workers
    return config


def streamed(config: JobConfig, shards: int = 4) -> JobConfig:
    """The same job on DOCUMENTS as a streaming dataset of so many files."""

    def load(path: str) -> object:
        return Dataset.from_dict({"text": DOCUMENTS}).to_iterable_dataset(num_shards=shards)

    DATASETS["stream"] = DatasetConfig(path="", loader=load, sample_processor=_text)
    config.training.dataset = "stream"
    return config


def batches(loader: Loader, count: int) -> torch.Tensor:
    """[count, 2, B, S]: tokens and labels of its next batches."""
    return torch.stack([torch.stack([inputs["input"], labels]) for inputs, labels in islice(loader, count)])


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streaming"])
def test_a_worker_gives_the_same_batches(
    ranks: int, rank: int, streaming: bool, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    config = streamed(job(tmp_path)) if streaming else job(tmp_path)
    plain, worker = (build_dataloader(ranks, rank, tokenizer, with_workers(config, n)) for n in (0, 1))
    assert torch.equal(batches(plain, 70), batches(worker, 70))  # into the second epoch
    worker.close()


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streaming"])
@pytest.mark.parametrize(("saved_by", "taken_by"), [(0, 1), (1, 0), (1, 1)])
def test_a_position_is_the_same_with_and_without_a_worker(
    saved_by: int, taken_by: int, streaming: bool, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    """After 7 batches; those that the worker has read ahead do not count. And before the first one."""
    config = streamed(job(tmp_path)) if streaming else job(tmp_path)
    first = build_dataloader(2, 1, tokenizer, with_workers(config, saved_by))
    for read in (0, 7):
        stream = iter(first)
        for _ in range(read):
            next(stream)
        state = first.state_dict()
        second = build_dataloader(2, 1, tokenizer, with_workers(config, taken_by))
        second.load_state_dict(state)
        wanted = torch.stack([torch.stack([i["input"], labels]) for i, labels in islice(stream, 5)])
        assert torch.equal(batches(second, 5), wanted)
        second.close()
    first.close()


def test_a_position_stays_what_it_was(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """A worker pickles it in another thread, while it reads on. When torchtitan's own passes, PackedText can go."""
    config = job(tmp_path)
    build_dataloader(1, 0, tokenizer, config)
    moved = {}
    for kind in (HuggingFaceTextDataset, PackedText):
        dataset = kind("jsonl", config.training.dataset_path, tokenizer, seq_len=32, infinite=True)
        stream = iter(dataset)
        moved[kind] = 0
        for _ in range(50):
            next(stream)
            state = dataset.state_dict()
            before = list(state["token_buffer"])
            next(stream)
            moved[kind] += state["token_buffer"] != before
    assert moved[PackedText] == 0
    assert moved[HuggingFaceTextDataset] > 0


def test_several_workers_of_a_dataset_in_memory_are_refused(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = with_workers(job(tmp_path), 2)
    message = r"{0}.dataloader.num_workers = 2: each worker would read all documents of {1}, .*set it to 1"
    with pytest.raises(ValueError, match=message.format("training", "jsonl")):
        build_dataloader(1, 0, tokenizer, config)
    config.validation.dataloader.num_workers = 2
    with pytest.raises(ValueError, match=message.format("validation", "jsonl_validation")):
        validator(config, tokenizer)


def test_several_workers_share_a_stream_and_its_position(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = with_workers(streamed(job(tmp_path)), 2)
    whole = build_dataloader(1, 0, tokenizer, config, infinite=False)
    starts = Counter(torch.cat([inputs["input"].flatten() for inputs, _ in whole]).tolist())[tokenizer.bos_id]
    assert 0.9 * len(DOCUMENTS) <= starts <= len(DOCUMENTS)  # each worker leaves out a last part of a sequence
    first, second = (build_dataloader(1, 0, tokenizer, config) for _ in range(2))
    stream = iter(first)
    for _ in range(5):
        next(stream)
    state = first.state_dict()
    second.load_state_dict(state)
    wanted = torch.stack([torch.stack([i["input"], labels]) for i, labels in islice(stream, 5)])
    assert torch.equal(batches(second, 5), wanted)
    with pytest.raises(ValueError, match=r"num_workers = 1, and the checkpoint has the data's position for 2: keep"):
        build_dataloader(1, 0, tokenizer, with_workers(config, 1)).load_state_dict(state)
    for loader in (whole, first, second):
        loader.close()


def test_pinned_memory_needs_a_gpu(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """The same recipe runs on a CPU without a word."""
    config = with_workers(job(tmp_path), 1)
    config.training.dataloader.pin_memory = True
    loader = build_dataloader(1, 0, tokenizer, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, labels = next(iter(loader))
    assert labels.is_pinned() == torch.cuda.is_available()
    loader.close()


# Its process


def gone(pid: int, seconds: float = 60) -> bool:
    """Whether a process ends within so many seconds; a dead one that nobody has waited for counts."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def worker_of(loader: Loader) -> multiprocessing.Process:
    return loader._iterator._workers[0]


def test_a_worker_outlives_sigterm_of_others_and_obeys_its_parent(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    """torchrun and clusters send it to the whole group, and the trainer still has its last step to do."""
    plain, loader = (build_dataloader(1, 0, tokenizer, with_workers(job(tmp_path), n)) for n in (0, 1))
    stream, wanted = iter(loader), batches(plain, 9)
    next(stream)
    worker = worker_of(loader)
    subprocess.run(["sh", "-c", f"kill -TERM {worker.pid}"], check=True)
    for i in range(1, 9):  # more than it has read ahead
        assert torch.equal(next(stream)[1], wanted[i, 1])
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0


def test_close_ends_the_worker(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    loader = build_dataloader(1, 0, tokenizer, with_workers(job(tmp_path), 1))
    loader.close()  # nothing to end
    next(iter(loader))
    worker = worker_of(loader)
    loader.close()
    loader.close()
    assert worker.exitcode == 0


@pytest.mark.parametrize("fails", [False, True])
def test_validation_leaves_no_worker(fails: bool, tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config, before = job(tmp_path), set(multiprocessing.active_children())
    build_dataloader(1, 0, tokenizer, config)
    config.validation.steps, config.validation.dataloader.num_workers = 2, 1
    validate, model, during = validator(config, tokenizer), Recorder(), []

    def look(tokens: torch.Tensor) -> None:
        during.extend(set(multiprocessing.active_children()) - before)
        if fails:
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(lambda module, args: look(*args))
    with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
        validate.validate([model], 1)
    assert during
    assert not set(multiprocessing.active_children()) - before


def _load_and_die(config: JobConfig, tokenizer: HuggingFaceTokenizer, out: Connection) -> None:
    loader = build_dataloader(1, 0, tokenizer, with_workers(config, 1))
    next(iter(loader))
    out.send(worker_of(loader).pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_trainer_leaves_no_worker(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """Not even one that holds more than a pipe takes: a position with a buffer of 100,000 tokens."""
    config = job(tmp_path)
    Path(config.training.dataset_path).write_text('{"text": "%s"}\n' % ("All work and no play. " * 20_000))
    config.data = type(config.data)(validation_fraction=0.0, test_fraction=0.0)
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_load_and_die, args=(config, tokenizer, send))
    process.start()
    assert receive.poll(60)
    process.join()
    worker = receive.recv()
    ended = gone(worker)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended
