"""torchao's rowwise FP8 experts as an oracle: its rules on its own scale helpers, in plain torch.

torchao/prototype/moe_training/fp8_grouped_mm.py (0.18), which needs Hopper and Triton, per grouped GEMM:

    forward   A per row                x  W per output row (over K)
    dgrad     dY per row               x  W per input column (over N), quantized a second time
    wgrad     dY per group and column  x  A per group and column, both from high precision

Scales there multiply (448 / amax, rounded down to a power of two); w1 and w3 are two GEMMs; nothing is re-scaled.
"""

from typing import Any

import torch
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from tests.helpers import NAMES, Experts


def through_fp8(x: Tensor, dim: int) -> Tensor:
    """x as its FP8 copy stands for it, one scale along `dim`, in float64."""
    scale = tensor_to_scale(
        x,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn).double() / scale.double()


class _GroupedMM(torch.autograd.Function):
    """x [M, K] @ w[e]^T, w [E, N, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.sizes = sizes
        products = [through_fp8(r, 1) @ through_fp8(w[e], 1).t() for e, r in enumerate(x.split(sizes))]
        return torch.cat(products).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        groups = list(zip(g.split(ctx.sizes), x.split(ctx.sizes), strict=True))
        dx = [through_fp8(ge, 1) @ through_fp8(w[e], 0) for e, (ge, _) in enumerate(groups)]
        dw = [through_fp8(ge, 0).t() @ through_fp8(xe, 0) for ge, xe in groups]
        return torch.cat(dx).float(), torch.stack(dw).float(), None


def torchao_mlp(experts: Experts) -> dict[str, Tensor]:
    """Output and all gradients of the expert MLP; non-empty groups, no rows of nobody."""
    leaves = [t.clone().requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
    x, w1, w2, w3 = leaves
    h = torch.nn.functional.silu(_GroupedMM.apply(x, w1, experts.sizes)) * _GroupedMM.apply(x, w3, experts.sizes)
    out = _GroupedMM.apply(h, w2, experts.sizes)
    grads = torch.autograd.grad(out, leaves, experts.upstream)
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))
