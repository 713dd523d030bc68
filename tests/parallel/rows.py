"""A `Row`: a small Llama4, a layout, and what else of the job config differs from the defaults."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.moe import MoEArgs

from converters.config import FP8Config, FP8GroupedExpertsConfig
from recipes import job_config as sections
from recipes.models.llama4.args import Llama4Args

VOCAB, SEQ_LEN, BATCH = 96, 32, 8  # sequences in a global batch; BATCH * SEQ_LEN is a power of two
STEPS = 5


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
