"""By what are gradients divided?  By the tokens of an optimizer step, in every layout.

torchtitan 0.2.2 sums the loss over tokens, divides it by the tokens of all ranks before `backward`, and lets FSDP2 sum
the gradients. Two layouts do otherwise:

    pipeline   its schedule calls `backward` itself, on the sum, and only the reported loss is divided. Every gradient
               is larger by the number of tokens: with 2 x 64 tokens a small model has a grad norm of 325, not 2.5.
    DDP        averages the gradients over the ranks where FSDP2 sums them. Every gradient is smaller by their number.

AdamW hides both, clipping does not, and neither does an epsilon or an auxiliary loss. Here the loss keeps its value
and its gradient is scaled where `backward` starts. (A sum in DDP itself would be wrong with gradient accumulation:
each micro-batch reduces what has been accumulated so far once more, of which only an average is the same again.)
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


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by `factor`."""
    return _ScaledGradient.apply(x, factor)


def replicas_averaged(parallel_dims: ParallelDims) -> int:
    """Over how many ranks gradients are averaged, not summed: those of DDP, used where there is no FSDP and no EP."""
    ddp = not (parallel_dims.fsdp_enabled or parallel_dims.ep_enabled)
    return parallel_dims.dp_replicate if ddp else 1


def tokens_per_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """By what a gradient that joins the backward on its own, as an auxiliary loss's does, is divided.

    The labels that one optimizer step counts, over all micro-batches and over the ranks whose gradients are summed:
    every one, in packed data.
    """
    training = job_config.training
    ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * ranks
    return batch * training.seq_len // replicas_averaged(parallel_dims)


def build_loss(
    job_config: JobConfig, parallel_dims: ParallelDims, **kwargs: object
) -> Callable[[Tensor, Tensor], Tensor]:
    """`build_loss_fn` of a train spec: torchtitan's cross entropy, its gradient per token in every layout."""
    loss = build_cross_entropy_loss(job_config)
    factor = replicas_averaged(parallel_dims)
    if parallel_dims.pp_enabled:
        factor /= tokens_per_step(job_config, parallel_dims)
    # A clone: a zero-bubble schedule detaches the loss in place, which no view allows.
    return loss if factor == 1 else lambda pred, labels: scaled_gradient(loss(pred, labels), factor).clone()
