"""What does a pipeline leave behind that one process does not?

Before its first step a stage learns the shapes of its tensors by running its module, on made-up values (torch 2.11:
forward; 2.13: forward and backward). The module's buffers count that as data: torchtitan's MoE adds the routing of the
made-up tokens to `tokens_per_expert`, and the first update of the routing bias goes elsewhere than without a pipeline.
The rest of the run follows: after five steps of a small model the losses differ in the fourth digit.

Here the buffers are put back.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torchtitan.distributed.pipeline_parallel import pipeline_llm

# Both infer shapes where they have none; the second exists since torch 2.13.
PREPARATIONS = ("_prepare_forward_infra", "_prepare_backward_infra")


def _keeping_buffers(prepare: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        before = [(buffer, buffer._version, buffer.clone()) for buffer in module.buffers()]
        module.rehearses = True  # telemetry looks away
        try:
            result = prepare(*args, **kwargs)
        finally:
            module.rehearses = False
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:  # the others may be saved for the backward of the inference
                    buffer.copy_(value)
        return result

    return prepared


def _stages(schedule: Any) -> list[PipelineStage]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def pipeline(*args: Any, **kwargs: Any) -> tuple[Any, list[nn.Module], bool, bool]:
    """`pipelining_fn` of a train spec: torchtitan's `pipeline_llm`; its shape inference leaves no trace in buffers."""
    schedule, parts, has_first, has_last = pipeline_llm(*args, **kwargs)
    for stage in _stages(schedule):
        for name in PREPARATIONS:
            if prepare := getattr(stage, name, None):
                setattr(stage, name, _keeping_buffers(prepare, stage.submod))
    return schedule, parts, has_first, has_last
