"""A linear layer by a rule that is emulated: tensorwise, blockwise, or delayed with a state of its own.

To compare with runs that had attention projections in FP8 too. Every layer is a GEMM alone, one group of all its rows.
"""

import types

import torch
from torch import Tensor, nn

from converters.delayed_config import DelayedConfig
from converters.grouped_mm import grouped_mm
from converters.linear_weight import FP8LinearWeight
from converters.numerics import Numerics
from converters.rules.attach import STATE, give_state
from parallel.checkpoint import wrap_parameters


def ruled_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """Stands in for `nn.Linear.forward`: x [..., K] -> [..., N]."""
    w = self.weight
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    y = grouped_mm(rows, w.t().unsqueeze(0), offs, w._context, getattr(self, STATE, None))
    y = y.view(*x.shape[:-1], y.shape[1])
    return y if self.bias is None else y + self.bias.to(y.dtype)


def convert_ruled(layer: nn.Linear, numerics: Numerics, delayed: DelayedConfig) -> None:
    """Switches one linear layer. delayed: options of that recipe."""
    give_state(layer, numerics, gemms=1, experts=1, config=delayed)
    wrap_parameters(layer, lambda data: FP8LinearWeight(data, numerics), ["weight"])
    layer.forward = types.MethodType(ruled_forward, layer)
    describe = f"{layer.extra_repr()}, fp8: {numerics}"
    layer.extra_repr = types.MethodType(lambda self: describe, layer)
