"""What does a pipeline leave behind that one process does not?

Before its first step a stage learns the shapes of its tensors by running its module, on made-up values (torch 2.11:
forward; 2.13: forward and backward). The module's buffers count that as data: torchtitan's MoE adds the routing of the
made-up tokens to `tokens_per_expert`, and the first update of the routing bias goes elsewhere than without a pipeline.
The rest of the run follows: after five steps of a small model the losses differ in the fourth digit.

Here the buffers are put back (buffers.py).

Zero-bubble schedules split a backward in two. torch 2.11 takes the halves apart wrongly where a stage has autograd
functions written in Python, as FP8, expert parallelism and our loss have: gradients of a small Mixtral are missing
(relative error 1.0), or it stops with an error. On 2.13 both are right; there is no such schedule below.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from parallel.buffers import buffers_kept

ZERO_BUBBLE = ("zero", "zbv", "dualpipe")  # in the names of these schedules, whose case torch does not mind
# Both infer shapes where they have none; the second exists since torch 2.13.
PREPARATIONS = ("_prepare_forward_infra", "_prepare_backward_infra")


def _keeping_buffers(prepare: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        module.rehearses = True  # telemetry looks away
        try:
            with buffers_kept([module]):
                return prepare(*args, **kwargs)
        finally:
            module.rehearses = False

    return prepared


def _stages(schedule: Any) -> list[PipelineStage]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def is_zero_bubble(schedule: str) -> bool:
    """Whether a schedule splits a backward in two, for the inputs and for the weights."""
    return any(name in schedule.lower() for name in ZERO_BUBBLE)


def splits_backward() -> bool:
    """Whether this torch runs zero-bubble schedules rightly."""
    return Version(torch.__version__).release >= (2, 13)


def pipeline(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig, *args: Any, **kwargs: Any
) -> tuple[Any, list[nn.Module], bool, bool]:
    """`pipelining_fn` of a train spec: torchtitan's `pipeline_llm`; its shape inference leaves no trace in buffers.

    Raises:
        ValueError: a zero-bubble schedule on a torch that computes wrong gradients with it.
    """
    schedule = job_config.parallelism.pipeline_parallel_schedule
    if is_zero_bubble(schedule) and not splits_backward():
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} splits backward in two, which torch "
            f"{torch.__version__} does wrongly for autograd functions written in Python: gradients would be missing. "
            "Use '1F1B' or 'Interleaved1F1B', or torch>=2.13."
        )
    schedule, parts, has_first, has_last = pipeline_llm(model, parallel_dims, job_config, *args, **kwargs)
    for stage in _stages(schedule):
        for name in PREPARATIONS:
            if prepare := getattr(stage, name, None):
                setattr(stage, name, _keeping_buffers(prepare, stage.submod))
    return schedule, parts, has_first, has_last
