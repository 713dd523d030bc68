"""Why is a gradient hundreds of times larger under pipeline parallelism, and what puts it right?

torchtitan 0.2.2 sums the loss over tokens. Without a pipeline its trainer divides the sum by the number of tokens
before `backward`; a pipeline schedule calls `backward` itself, on the sum, and only the reported loss is divided.
Every gradient is then larger by the number of tokens of a step: the debug model with 2 x 64 tokens reports a grad norm
of 325 instead of 2.5. AdamW hides it, clipping does not (it always clips then), and neither does an epsilon or an
auxiliary loss.

Here the loss keeps its value and its gradient is divided where the schedule starts it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.factor, None


def tokens_per_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """Labels that one optimizer step counts, over all ranks and micro-batches: every one, in packed data."""
    training = job_config.training
    ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * ranks
    return batch * training.seq_len


def build_loss(
    job_config: JobConfig, parallel_dims: ParallelDims, **kwargs: object
) -> Callable[[Tensor, Tensor], Tensor]:
    """`build_loss_fn` of a train spec: torchtitan's cross entropy, its gradient per token under a pipeline too."""
    loss = build_cross_entropy_loss(job_config)
    if not parallel_dims.pp_enabled:
        return loss
    factor = 1 / tokens_per_step(job_config, parallel_dims)
    return lambda pred, labels: _ScaledGradient.apply(loss(pred, labels), factor)
