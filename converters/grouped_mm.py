"""One grouped GEMM in FP8, with autograd: y = x @ w for modules that are not torchtitan's SwiGLU experts.

    forward   x8 [M, K], sx [M]  @  w8[e] [K, N]           ->  y  [M, N]
    dgrad     g8 [M, N], sg [M]  @  w8[e]^T                ->  dx [M, K]
    wgrad     x_e^T              @  g_e                    ->  dw [E, K, N]

`w` has torch._grouped_mm's orientation, [E, K, N]; what is stored is its transpose, one row an output channel.
"""

from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.config import Numerics
from converters.scaling import compute_dtype, quantize_weight, wgrad
from parallel.wrapped_weight import WrappedWeight


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, numerics: Numerics, dtype: torch.dtype) -> Tensor:
        backend = get_backend(numerics.backend)
        groups = backend.groups(offs, x.shape[0])
        data = w._data if isinstance(w, WrappedWeight) else w
        qw = quantize_weight([data.transpose(1, 2)], numerics)
        x8, sx = backend.quantize_rows(x)
        ctx.save_for_backward(x8, sx, x if numerics.wgrad_from_hp else None, qw.q_t, qw.scale_t, offs)
        ctx.numerics, ctx.dtype, ctx.x_dtype, ctx.w_dtype = numerics, dtype, x.dtype, w.dtype
        return backend.gemm_rows(x8, sx, qw.q, qw.scale, groups, dtype, numerics.accumulate)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        numerics: Numerics = ctx.numerics
        backend = get_backend(numerics.backend)
        x8, sx, x, w_t, sw_t, offs = ctx.saved_tensors
        groups = backend.groups(offs, g.shape[0])
        g = g.contiguous()
        g8, sg = backend.quantize_rows(g)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = backend.gemm_rows(g8, sg, w_t, sw_t, groups, ctx.x_dtype, numerics.accumulate)
        if ctx.needs_input_grad[1]:
            dw = wgrad((g8, sg, g), (x8, sx, x), groups, ctx.w_dtype, numerics).transpose(1, 2)
        return dx, dw, None, None, None


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    """`torch._grouped_mm(x, w, offs)` in FP8.

    Args:
        x: [M, K], any float dtype. Rows past offs[-1] are ignored: their outputs and gradients are zero.
        w: [E, K, N], a transposed view of a weight [E, N, K]; plain or wrapped.
        offs: int32 [E], ends of the groups. Any sizes, empty ones too.
        numerics: scale rule, backend, precision of the weight gradient.

    Returns:
        [M, N] in x's dtype, or autocast's.
    """
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or offs.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_mm takes x [M, K], w [E, K, N] and offs [E]; got {tuple(x.shape)}, {tuple(w.shape)} and {tuple(offs.shape)}."
        )
    return _GroupedMM.apply(x, w, offs.to(torch.int32), numerics, compute_dtype(x))
