"""A `Row`: a small model, a layout, and what else of the job config differs from the defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols import BaseModelArgs

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.delayed_config import DelayedConfig
from converters.dense_config import FP8DenseConfig
from converters.token_config import Fused, TokenPathConfig
from recipes import job_config as sections
from recipes.models.llama4.args import Llama4Args
from recipes.models.mixtral.args import MixtralModelArgs, mixtral_moe

VOCAB, SEQ_LEN, BATCH = 96, 32, 8  # sequences in a global batch; BATCH * SEQ_LEN is a power of two
STEPS = 5
LOOP = {False: "", True: "_loop"}


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


def mixtral_args(loop: bool) -> MixtralModelArgs:
    """The same sizes in Mixtral, with an auxiliary loss large enough for a wrong factor to show."""
    return MixtralModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        hidden_dim=96,
        vocab_size=VOCAB,
        router_aux_loss_coef=0.3,
        moe_args=replace(mixtral_moe(num_experts=4), use_grouped_mm=not loop),
    )


MODELS: Mapping[str, Callable[[bool], BaseModelArgs]] = {
    "four_experts": partial(args, 4),
    "three_experts": partial(args, 3),  # uneven over two ranks, and over four the last one has none
    "two_experts": partial(args, 2),  # with EP 2 over four ranks FSDP2 shards another dim than the experts'
    "dense_first": partial(args, 4, moe_every=2),
    "mixtral": mixtral_args,
}
FLAVORS = {f"{name}{suffix}": make(loop=loop) for name, make in MODELS.items() for loop, suffix in LOOP.items()}


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
    dense: FP8DenseConfig | None = None
    delayed: DelayedConfig = field(default_factory=DelayedConfig)
    fused: Fused = "off"
    steps: int = STEPS
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard * self.tp * self.pp * self.cp

    def with_fp8(self, **config: Any) -> "Row":
        return replace(self, fp8=FP8GroupedExpertsConfig(backend="reference", **config))

    def with_dense(self, **config: Any) -> "Row":
        return replace(self, dense=FP8DenseConfig(backend="reference", **config))

    def with_fused(self, **config: Any) -> "Row":
        return replace(self.with_fp8(**config), fused="on")

    @property
    def flavor(self) -> str:
        return self.model + LOOP[self.fp8 is None]

    def but(self, **config: Any) -> "Row":
        """The same with other job-config values; two underscores stand for the dot."""
        dotted = {name.replace("__", "."): value for name, value in config.items()}
        return replace(self, config={**self.config, **dotted})

    def job(self, seed_checkpoint: Path | None, folder: Path) -> JobConfig:
        """The job config, as a recipe and its command line would give it."""
        job = ConfigManager._merge_configs(JobConfig, sections.JobConfig)()
        local_batch = BATCH // (self.replicate * self.shard)
        values = {
            "job.dump_folder": str(folder),
            "model.name": "small_mixtral" if self.model == "mixtral" else "small_llama4",
            "model.flavor": self.flavor,
            "training.steps": self.steps,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": local_batch,
            "training.global_batch_size": BATCH,
            "training.mixed_precision_param": "float32",
            # AdamW's first step is the sign of a gradient, whatever its size: with the usual epsilon of 1e-8 the
            # rounding noise of gradients near zero becomes full steps. And a token that goes to another expert is
            # worth 4e-4 of the loss. Over 32 pairs of layout and seed the largest distance of two FP8 runs was 1.4e-3
            # with a learning rate of 3e-3 and 4.7e-4 with this one.
            "optimizer.eps": 1e-3,
            "optimizer.lr": 5e-4,
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
        chosen = {"grouped_experts": self.fp8, "dense": self.dense}
        given = {name: section for name, section in chosen.items() if section is not None}
        job.model.converters = [f"fp8.{name}" for name in given]
        job.fp8 = FP8Config(**given, delayed=self.delayed, token_path=TokenPathConfig(self.fused))
        return job
