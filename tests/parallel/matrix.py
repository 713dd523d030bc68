"""Trains a `Row` with torchtitan's own Trainer, on one stream of batches whatever the layout.

`train(row)` returns what a user would compare: the loss and the gradient norm of each step. Ranks get their part of the
same global batch, where torchtitan's own loader would give each rank other documents.
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec as train_specs
from torchtitan.train import Trainer

import recipes.register  # noqa: F401  (importing registers)
from recipes.loader import build_dataloader
from recipes.models import llama4, mixtral
from tests.helpers import DEVICE
from tests.parallel.rows import BATCH, FLAVORS, SEQ_LEN, VOCAB, Row

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizer"
Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def tokens(step: int) -> Tensor:
    """[BATCH, SEQ_LEN + 1], the global batch of a step: counting up from anywhere by 1 to 4, easy to learn."""
    generator = torch.Generator().manual_seed(100 + step)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQ_LEN + 1)) % VOCAB


class Batches(BaseDataLoader):
    """This rank's sequences of each global batch, in micro-batches of `size`. Its state: how many it has given."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self.rank, self.ranks, self.size, self.given = rank, ranks, size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        per_step = BATCH // self.ranks // self.size
        while True:
            mine = tokens(self.given // per_step).chunk(self.ranks)[self.rank]
            part = mine.split(self.size)[self.given % per_step]
            self.given += 1
            yield {"input": part[:, :-1].contiguous()}, part[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class Texts(BaseDataLoader):
    """The recipes' own loader, its tokens folded into the small vocabulary."""

    def __init__(self, rank: int, ranks: int, job_config: JobConfig) -> None:
        tokenizer = HuggingFaceTokenizer(str(TOKENIZER))
        self.loader = build_dataloader(dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, job_config=job_config)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for inputs, labels in self.loader:
            yield {"input": inputs["input"] % VOCAB}, labels % VOCAB

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def build_batches(dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig) -> BaseDataLoader:
    if job_config.training.dataset == "jsonl":
        return Texts(dp_rank, dp_world_size, job_config)
    return Batches(dp_rank, dp_world_size, job_config.training.local_batch_size)


class Recorder:
    """A metrics processor that keeps the numbers. `curve` has one entry a step."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self.color = SimpleNamespace(**dict.fromkeys(("blue", "red", "reset", "green", "yellow", "cyan"), ""))
        self.device_memory_monitor = SimpleNamespace(
            device_name=DEVICE, get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
        )
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: dict | None = None) -> None:
        self.curve.append((loss, grad_norm))

    def close(self) -> None:
        pass


def register_small_models() -> None:
    """Our train specs, with the small flavors and without files."""
    for name, spec in {"small_llama4": llama4.train_spec(), "small_mixtral": mixtral.train_spec()}.items():
        if name not in train_specs._extra_train_specs:
            small = dataclasses.replace(
                spec,
                model_args={},
                build_tokenizer_fn=None,
                build_dataloader_fn=build_batches,
                build_metrics_processor_fn=lambda *args: Recorder(),
                build_validator_fn=None,
                state_dict_adapter=None,
            )
            train_specs.register_train_spec(name, small)


@functools.cache
def _dims(world_size: int, **degrees: int) -> ParallelDims:
    """Meshes of one layout: rows that differ in something else share their process groups."""
    dims = ParallelDims(world_size=world_size, **degrees)
    dims.build_mesh()
    return dims


class RowTrainer(Trainer):
    """torchtitan's Trainer, which keeps the meshes of a layout for the next row."""

    def init_distributed(self) -> ParallelDims:
        p = self.job_config.parallelism
        return _dims(
            torch.distributed.get_world_size(),
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=p.data_parallel_shard_degree,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            ep=p.expert_parallel_degree,
            etp=p.expert_tensor_parallel_degree,
        )

    @property
    def curve(self) -> Curve:
        return self.metrics_processor.curve

    def steps(self, count: int) -> None:
        """So many optimizer steps; `train` without its profiler, its logging and its two seconds of sleep."""
        for _ in range(count):
            self.step += 1
            self.train_step(self.data)


def build(row: Row, seed_checkpoint: Path | None, folder: Path) -> RowTrainer:
    """A trainer with the seed checkpoint, or the latest of its own in `folder`, loaded."""
    register_small_models()
    job_config = row.job(seed_checkpoint, folder)
    train_specs.get_train_spec(job_config.model.name).model_args[row.flavor] = copy.deepcopy(FLAVORS[row.flavor])
    trainer = RowTrainer(job_config)
    trainer.checkpointer.load()
    trainer.data = trainer.batch_generator(trainer.dataloader)
    return trainer


def train(row: Row, seed_checkpoint: Path, folder: Path) -> Curve:
    """The curve of a row, the same on every rank: only the ranks of a pipeline's last stage know the loss."""
    torch.compiler.reset()  # each row compiles the same code for another layout
    trainer = build(row, seed_checkpoint, folder)
    trainer.steps(row.steps)
    trainer.close()
    curves: list[Curve] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(curves, trainer.curve)
    for norms in zip(*([norm for _, norm in curve] for curve in curves), strict=True):
        assert max(norms) - min(norms) <= 1e-6 * max(norms), f"ranks clip by different norms: {norms}"
    return [max(step) for step in zip(*curves, strict=True)]


@torch.no_grad()
def make_seed_checkpoint(model: str, folder: Path) -> Path:
    """What `--checkpoint.create_seed_checkpoint` does, in a group of one rank; all layers at a scale where they matter.

    From torchtitan's own initial weights (std 0.02 and less) a model this small gives the same loss to six digits with
    its experts in FP8 or in BF16, and would with most of them missing.
    """
    row = Row(model=model).but(checkpoint__enable=True, checkpoint__create_seed_checkpoint=True)
    trainer = build(row, None, folder)
    for parameter in trainer.model_parts[0].layers.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()
    return folder / "checkpoint" / "step-0"


def train_rows(rows: Mapping[str, Row], world_size: int, where: Path) -> None:
    """Trains the rows of this size and appends their curves to where / "curves.jsonl". One process comes first: it
    makes the seed checkpoints that all sizes start from.
    """
    if world_size == 1:
        for model in {row.model for row in rows.values()}:
            make_seed_checkpoint(model, where / model)
    for name, row in rows.items():
        if row.world_size == world_size:
            curve = train(row, where / row.model / "checkpoint" / "step-0", where / "run")
            if dist.get_rank() == 0:
                with (where / "curves.jsonl").open("a") as f:
                    f.write(json.dumps([name, curve]) + "\n")
