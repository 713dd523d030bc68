"""One small Llama4 and one stream of batches, trained by torchtitan's own Trainer in any layout.

A `Row` is a layout and what differs from the defaults; `train(row)` runs it and returns what a user would compare: the
loss and the gradient norm of each step. Ranks get their part of the same global batch, where torchtitan's own loader
would give each rank other documents.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols import train_spec as train_specs
from torchtitan.train import Trainer

import recipes.register  # noqa: F401  (importing registers)
from converters.config import FP8Config, FP8GroupedExpertsConfig
from parallel.device import prepare_device
from recipes import job_config as sections
from recipes.models import llama4
from recipes.models.llama4.args import Llama4Args

prepare_device()

VOCAB, SEQ_LEN, BATCH = 96, 32, 8  # sequences in a global batch; BATCH * SEQ_LEN is a power of two: see `tokens` below
STEPS = 5
Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def args(experts: int, loop: bool, moe_every: int = 1) -> Llama4Args:
    """D = 64, H = 96, two layers, mixtures of experts and a shared one; two heads of keys and values.

    loop: torchtitan's grouped GEMM computes in BF16 whatever the dtype of its inputs, its loop over experts does not.
    So the loop is what a layout in high precision is compared in.
    """
    return Llama4Args(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        multiple_of=16,
        ffn_dim_multiplier=1.5,
        rope_theta=10_000,
        interleave_moe_layer_step=moe_every,
        moe_args=MoEArgs(num_experts=experts, top_k=min(2, experts - 1), use_grouped_mm=not loop),
    )


MODELS = {
    "four_experts": {"experts": 4},
    "three_experts": {"experts": 3},  # uneven over two ranks, and over four the last one has none
    "two_experts": {"experts": 2},  # with EP 2 over four ranks FSDP2 shards another dim than the experts'
    "dense_first": {"experts": 4, "moe_every": 2},
}
FLAVORS = {name: args(loop=False, **options) for name, options in MODELS.items()}
FLAVORS |= {f"{name}_loop": args(loop=True, **options) for name, options in MODELS.items()}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout: degrees, and any other job-config value by its dotted name."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    model: str = "four_experts"
    fp8: FP8GroupedExpertsConfig | None = None
    steps: int = STEPS
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tp * self.pp * self.cp

    def with_fp8(self, **config: Any) -> "Row":
        return dataclasses.replace(self, fp8=FP8GroupedExpertsConfig(backend="reference", **config))

    @property
    def flavor(self) -> str:
        return self.model if self.fp8 else f"{self.model}_loop"

    def but(self, **config: Any) -> "Row":
        """The same with other job-config values; two underscores stand for the dot."""
        dotted = {name.replace("__", "."): value for name, value in config.items()}
        return dataclasses.replace(self, config={**self.config, **dotted})

    def job(self, seed_checkpoint: Path | None, folder: Path) -> JobConfig:
        """The job config, as a recipe and its command line would give it."""
        job = ConfigManager._merge_configs(JobConfig, sections.JobConfig)()
        local_batch = BATCH // (self.replicate * self.shard)
        values = {
            "job.dump_folder": str(folder),
            "model.name": "matrix",
            "model.flavor": self.flavor,
            "training.steps": self.steps,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": local_batch,
            "training.global_batch_size": BATCH,
            "training.mixed_precision_param": "float32",
            # AdamW's first step is the sign of a gradient, whatever its size. With the usual 1e-8 the rounding noise of
            # gradients near zero becomes full steps, and two runs in FP8 part within five of them.
            "optimizer.eps": 1e-3,
            "optimizer.lr": 3e-3,
            "lr_scheduler.warmup_steps": 1,
            "activation_checkpoint.mode": "none",
            "parallelism.data_parallel_replicate_degree": self.replicate,
            "parallelism.data_parallel_shard_degree": self.shard,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.pipeline_parallel_degree": self.pp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.expert_parallel_degree": self.ep,
            "parallelism.expert_tensor_parallel_degree": self.etp,
            "debug.seed": 7,
        }
        if seed_checkpoint is not None:
            values |= {"checkpoint.enable": True, "checkpoint.initial_load_path": str(seed_checkpoint)}
        for name, value in {**values, **self.config}.items():
            section, key = name.split(".")
            if not hasattr(getattr(job, section), key):
                raise ValueError(f"{name} is no job-config value.")
            setattr(getattr(job, section), key, value)
        if self.fp8 is not None:
            job.model.converters, job.fp8 = ["fp8.grouped_experts"], FP8Config(self.fp8)
        return job


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


class Recorder:
    """A metrics processor that keeps the numbers. `curve` has one entry a step."""

    def __init__(self) -> None:
        self.curve: Curve = []
        self.color = SimpleNamespace(**dict.fromkeys(("blue", "red", "reset", "green", "yellow", "cyan"), ""))
        self.device_memory_monitor = SimpleNamespace(
            device_name="cpu", get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
        )
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: dict | None = None) -> None:
        self.curve.append((loss, grad_norm))

    def close(self) -> None:
        pass


def register_matrix() -> None:
    """Our llama4 spec, with the small flavors and without files."""
    if "matrix" in train_specs._extra_train_specs:
        return
    spec = dataclasses.replace(
        llama4.train_spec(),
        model_args={},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda dp_world_size, dp_rank, tokenizer, job_config: Batches(
            dp_rank, dp_world_size, job_config.training.local_batch_size
        ),
        build_metrics_processor_fn=lambda *args: Recorder(),
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    train_specs.register_train_spec("matrix", spec)


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
    register_matrix()
    train_specs.get_train_spec("matrix").model_args[row.flavor] = copy.deepcopy(FLAVORS[row.flavor])
    trainer = RowTrainer(row.job(seed_checkpoint, folder))
    trainer.checkpointer.load()
    trainer.data = trainer.batch_generator(trainer.dataloader)
    return trainer


def train(row: Row, seed_checkpoint: Path, folder: Path) -> Curve:
    """The curve of a row, the same on every rank: only the ranks of a pipeline's last stage know the loss."""
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
