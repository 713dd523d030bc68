"""torchtitan's text loader, made safe with a worker process (`[training.dataloader] num_workers = 1`).

A worker reads and tokenizes the next batches while a step runs. In the trainer's own process that is 2 microseconds a
token (assets/tokenizer, one core), and after a step that is logged the GPU waits for it: the host has waited for the
GPU just before. The batches are the same ones with and without a worker, and so is a position in a checkpoint.
"""

import gc
import os
import signal
import threading
from dataclasses import asdict
from typing import Any

import torch
from datasets import Dataset
from torchdata.stateful_dataloader.incremental_state import _DATASET_STATE
from torchdata.stateful_dataloader.stateful_dataloader import _StatefulMultiProcessingDataLoaderIter as _Workers
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from recipes.datasets import register_datasets

LOOK_SECONDS = 1.0


class PackedText(HuggingFaceTextDataset):
    """torchtitan's, whose position stays what it was when it was taken."""

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's gives its buffer away and then extends it.

        A worker sends a position from another thread, which may come to it after the next document: the saved run would
        then read that document twice.
        """
        state = super().state_dict()
        return state | {"token_buffer": list(state["token_buffer"])}


class Loader(ParallelAwareDataloader):
    """torchtitan's, for which 0 and 1 workers are the same: a position that one saved is taken by the other."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A position of several workers goes to as many.

        Raises:
            ValueError: it was saved by several workers, and there are not as many, or the other way round.
        """
        super().load_state_dict(state_dict)
        if self.next_iter_state is None:  # nothing was saved for this rank
            return
        positions = _positions(self.next_iter_state)
        if max(len(positions), self.num_workers) > 1:
            if len(positions) != self.num_workers:
                raise ValueError(
                    f"training.dataloader.num_workers = {self.num_workers}, and the checkpoint has the data's position "
                    f"for {len(positions)}: keep their number, or begin with the data anew by "
                    "checkpoint.exclude_from_loading = ['dataloader']."
                )
            return
        # torchdata's own way takes only what the same number of workers saved. Here the next iterator begins anew, in
        # a worker or not, on a dataset that stands where the saved one stood.
        self.dataset.load_state_dict(positions[0])
        self.next_iter_state = None

    def close(self) -> None:
        """Ends the workers."""
        end_workers(self)


def end_workers(loader: ParallelAwareDataloader) -> None:
    """Left to the interpreter's exit they are killed, under a thread that may still read them."""
    if isinstance(loader._iterator, _Workers):
        loader._iterator._shutdown_workers()


def _positions(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The datasets' states in a state of torchdata's loader, one for each worker; without workers, one."""
    if _Workers._SNAPSHOT not in saved:
        return [saved[_DATASET_STATE]]
    workers = saved[_Workers._SNAPSHOT][_Workers._WORKER_SNAPSHOTS]
    return [worker[_DATASET_STATE] for worker in workers.values()]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = True
) -> Loader:
    """The training loader, after binding our datasets to this job's `[data]` and its data-parallel ranks.

    Raises:
        ValueError: there are too few documents, or too many workers for this dataset.
    """
    register_datasets(job_config.data, dp_world_size)
    training = job_config.training
    dataset = PackedText(
        dataset_name=training.dataset,
        dataset_path=training.dataset_path,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
    )
    check_workers(dataset, training.dataloader.num_workers, "training")
    options = asdict(training.dataloader) | {"batch_size": training.local_batch_size, "worker_init_fn": start_worker}
    options["pin_memory"] &= torch.cuda.is_available()  # torch would warn on a CPU, where the same recipe runs
    return Loader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)


def check_workers(dataset: HuggingFaceTextDataset, workers: int, section: str) -> None:
    """Several workers share a streaming dataset (by its files); of one in memory each has a copy, and reads all of it.

    Raises:
        ValueError: several workers, and the dataset is in memory.
    """
    if workers > 1 and isinstance(dataset._data, Dataset):
        raise ValueError(
            f"{section}.dataloader.num_workers = {workers}: each worker would read all documents of "
            f"{dataset.dataset_name}, so that batches hold every one {workers} times; set it to 1."
        )


def start_worker(worker: int) -> None:
    """`worker_init_fn` of a loader: the process ends with the trainer and by its word, never by anybody's SIGTERM.

    torchrun and clusters send SIGTERM to a whole group of processes. A worker that dies of it breaks off the step after
    which the trainer would have saved.
    """
    gc.enable()  # torchtitan's trainer, of which this process is a copy, collects by hand
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        got = signal.sigtimedwait({signal.SIGTERM}, LOOK_SECONDS)
        if got is not None and got.si_pid == parent:
            break
    os._exit(0)
