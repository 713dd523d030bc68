"""In which layouts can FP8 experts not run?  Refused before the model is made parallel, on every rank alike."""

from collections.abc import Mapping

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.config import FP8GroupedExpertsConfig
from converters.operands import ALIGNMENT
from converters.selection import stacked_weights
from parallel.pipeline import is_zero_bubble


def check_layout(
    experts: Mapping[str, nn.Module], config: FP8GroupedExpertsConfig, job_config: JobConfig, dims: ParallelDims
) -> None:
    """experts: name -> module, those to be converted, whole.

    Raises:
        ValueError: tensor parallelism cuts an expert into parts that no FP8 GEMM reads, or a wire that was asked for by
            name cannot be FP8.
    """
    axis = "expert_tensor_parallel_degree" if dims.ep > 1 else "tensor_parallel_degree"
    ranks = dims.etp if dims.ep > 1 else dims.tp
    for fqn, module in experts.items():
        for name in stacked_weights(module):
            shape = tuple(getattr(module, name).shape)
            dim = 2 if name == "w2" else 1  # torchtitan cuts the hidden dim of an expert, w1 and w3 by rows
            if ranks > 1 and shape[dim] % (ranks * ALIGNMENT):
                raise ValueError(
                    f"{fqn}.{name} has shape {shape}, and parallelism.{axis} = {ranks} cuts its dim {dim} into parts "
                    f"of {shape[dim] / ranks:g}: FP8 GEMMs need multiples of {ALIGNMENT}. Choose a degree that leaves "
                    "them, or leave this module out with [fp8.grouped_experts] fqns."
                )
    check_offload("fp8.grouped_experts", config.fsdp_fp8_all_gather, job_config)
    comm = job_config.parallelism.expert_parallel_comm_backend
    if config.ep_fp8_dispatch == "on" and dims.ep > 1 and comm != "standard":
        raise ValueError(
            f"[fp8.grouped_experts] ep_fp8_dispatch = 'on' replaces torchtitan's own all-to-all, and "
            f"parallelism.expert_parallel_comm_backend = {comm!r} does not use it. Set ep_fp8_dispatch = 'auto', or "
            "expert_parallel_comm_backend = 'standard'."
        )


def check_offload(section: str, fp8_all_gather: str, job_config: JobConfig) -> None:
    """Refuses an FP8 all-gather that was asked for by name with CPU offload.

    Raises:
        ValueError: both are on.
    """
    if fp8_all_gather == "on" and job_config.training.enable_cpu_offload:
        raise ValueError(
            f"[{section}] fsdp_fp8_all_gather = 'on' does not go with training.enable_cpu_offload = true: FSDP2 "
            "gathers copies of offloaded shards, made anew each time. Set fsdp_fp8_all_gather = 'auto'."
        )


def check_delayed(recipe: str, job_config: JobConfig, dims: ParallelDims) -> None:
    """Refuses delayed scaling in pipelines that repeat a pass after the scales have moved on.

    Raises:
        ValueError: the recipe is "delayed", in a pipeline with recomputation, or with a backward in two parts.
    """
    if recipe != "delayed" or dims.pp == 1:
        return
    schedule = job_config.parallelism.pipeline_parallel_schedule
    if job_config.activation_checkpoint.mode != "none":
        raise ValueError(
            "recipe = 'delayed' with parallelism.pipeline_parallel_degree > 1 does not go with recomputation, which "
            "would find the scales of a later micro-batch: set activation_checkpoint.mode = 'none', or use another "
            "recipe."
        )
    if is_zero_bubble(schedule):
        raise ValueError(
            f"recipe = 'delayed' does not go with parallelism.pipeline_parallel_schedule = {schedule!r}, whose "
            "backward has two parts, each with other scales: choose '1F1B' or 'Interleaved1F1B', or use another recipe."
        )
