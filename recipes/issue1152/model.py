"""A small Mixtral with what matters for #1152 as published: Megatron's initialization and the size of the gradients.

Megatron initializes every matrix with std 0.01, and the projections that write into the residual stream (wo, w2) with
0.01 / sqrt(2 * 32 layers). Scales of 1 lose nothing of the first but half of the second, so both are kept as they are
and do not follow this model's depth.

FP8 sees a gradient's absolute size, which this model would have wrong for two reasons.

    tokens   There, a token's loss is divided by 32 micro-batches of 4096 tokens before `backward`; the ranks are
             averaged after it. The flavor `full` has the same 131,072 tokens in a step, `reduced` a 16th of them.
    depth    A block's gradient is divided by the rms of the residual stream. Over 32 layers of the published width
             that grows from 0.01 to 0.26, so the gradients of the blocks' outputs have an rms of 6e-6 in the first
             layer, 4e-7 halfway and 3e-7 in the last (published_size.py computes them). Two narrow layers leave the
             stream at 0.01, and their gradients at 7e-6.

So `gradient_scale` makes gradients smaller where the backward starts, and as large again in each parameter's own
gradient: norms, clipping and Adam see what they would without it. It is a power of two, so that high precision loses
nothing by it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec

from parallel.loss import scaled_gradient
from recipes.models import mixtral
from recipes.models.mixtral.args import MixtralModelArgs
from recipes.models.mixtral.balance import balanced_moes
from recipes.models.mixtral.model import Mixtral
from recipes.models.tokenizer import checked_tokenizer

TOKENS = 32 * 4096  # by which the published run divides a token's loss before backward
DEPTH_SCALE = 2.0**-4  # 7e-6 to 4e-7
OUT = ("attention.wo.weight", "experts.w2")  # what writes into the residual stream


@dataclass
class Args(MixtralModelArgs):
    """Mixtral's, and the initialization and gradient size of the published run."""

    init_std: float = 0.01
    out_std: float = 0.01 / 64**0.5
    gradient_scale: float = 1.0


# The published ratios: 8 experts of which a token takes 2, hidden 3.5 times the width, 4 query heads on a key head.
FLAVORS: Mapping[str, Args] = MappingProxyType(
    {
        # 11.6 M parameters. One rank's batch: 32 micro-batches of 4096 tokens, here 8 x 512.
        "full": Args(
            dim=256,
            n_layers=2,
            n_heads=8,
            n_kv_heads=2,
            head_dim=32,
            hidden_dim=896,
            vocab_size=2048,
            router_aux_loss_coef=1e-2,
            gradient_scale=DEPTH_SCALE,
        ),
        # 3.4 M parameters. 32 micro-batches of 8 x 32 tokens.
        "reduced": Args(
            dim=128,
            n_layers=2,
            n_heads=4,
            n_kv_heads=1,
            head_dim=32,
            hidden_dim=448,
            vocab_size=2048,
            router_aux_loss_coef=1e-2,
            gradient_scale=DEPTH_SCALE * 32 * 8 * 32 / TOKENS,
        ),
    }
)


class Mixtral1152(Mixtral):
    """Mixtral with Megatron's initialization and gradients of a given size."""

    def __init__(self, model_args: Args) -> None:
        super().__init__(model_args)
        for moe in balanced_moes(self):  # its gradient does not come through the logits
            moe.balance = replace(moe.balance, coef=moe.balance.coef * model_args.gradient_scale)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As Mixtral's: token ids [B, S] -> logits [B, S, V]."""
        logits, scale = super().forward(*args, **kwargs), self.model_args.gradient_scale
        return logits if scale == 1 else scaled_gradient(logits, scale)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initializes in place; called once, on the weights that will be trained."""
        super().init_weights(buffer_device)
        args = self.model_args
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=args.out_std if name.endswith(OUT) else args.init_std)
            if args.gradient_scale != 1:
                p.register_hook(partial(_undo, args.gradient_scale))


def _undo(scale: float, grad: Tensor) -> Tensor:
    return grad / scale


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Mixtral's.

    Raises:
        ValueError: several processes and a gradient_scale: gradients are scaled back in hooks that FSDP2 does not call.
    """
    scale = model.model_args.gradient_scale
    if scale != 1 and parallel_dims.world_size > 1:
        raise ValueError(
            f"gradient_scale = {scale} needs one process; got {parallel_dims.world_size}. Train on one device."
        )
    return mixtral.parallelize(model, parallel_dims, job_config)


def train_spec() -> TrainSpec:
    """The spec that recipes/register.py names "issue1152"."""
    flavors = copy.deepcopy(dict(FLAVORS))
    return replace(
        mixtral.train_spec(),
        model_cls=Mixtral1152,
        model_args=flavors,
        parallelize_fn=parallelize,
        build_tokenizer_fn=checked_tokenizer(flavors),
    )
