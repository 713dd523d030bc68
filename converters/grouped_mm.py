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
from converters.backends.reference import FP8
from converters.config import Numerics
from converters.differentiable import differentiable, unwrapped
from converters.group_ends import group_ends
from converters.kernels.ops import operator
from converters.operands import check_operands
from converters.rules.gemm import ruled_mm
from converters.rules.state import DelayedState
from converters.scaling import compute_dtype, op_key, wgrad
from converters.telemetry_mlp import gemm_backward, gemm_forward
from converters.weight_cache import quantized


def _empty(x: Tensor, w: Tensor, offs: Tensor, numerics: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    M = x.shape[0]
    return (
        x.new_empty((M, w.shape[2]), dtype=dtype),
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(M, dtype=torch.float32),
    )


@operator(_empty, name="grouped_mm")
def _forward(x: Tensor, w: Tensor, offs: Tensor, numerics: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """-> y [M, N], and for backward x8 [M, K], sx [M]."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    qw = quantized([w], n, backward=False, transposed=True)
    x8, sx = backend.quantize_rows(x)
    groups = backend.groups(offs, x.shape[0])
    y = backend.gemm_rows(x8, sx, qw.q, qw.scale, groups, dtype, n.accumulate)
    gemm_forward([(w.transpose(1, 2), None)], qw, offs, x, (x8, sx), y)
    return y, x8, sx


def _empty_gradients(
    g: Tensor, x: Tensor | None, x8: Tensor, sx: Tensor, w: Tensor, offs: Tensor, numerics: str, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return g.new_empty(x8.shape, dtype=x_dtype), w.new_empty((w.shape[0], w.shape[2], w.shape[1]))


@operator(_empty_gradients, name="grouped_mm_backward")
def _backward(
    g: Tensor, x: Tensor | None, x8: Tensor, sx: Tensor, w: Tensor, offs: Tensor, numerics: str, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """-> dx [M, K], dw [E, N, K] (w's storage orientation)."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    groups = backend.groups(offs, g.shape[0])
    qw = quantized([w], n, backward=True, transposed=True)
    g8, sg = backend.quantize_rows(g)
    dx = backend.gemm_rows(g8, sg, qw.q_t, qw.scale_t, groups, x_dtype, n.accumulate)
    dw = wgrad((g8, sg, g), (x8, sx, x), groups, w.dtype, n)
    gemm_backward([(w.transpose(1, 2), None)], offs, g, (g8, sg), sx, dx, [dw])
    return dx, dw


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w, offs, numerics, _ = inputs
    keep_x = x if Numerics.parse(numerics).wgrad_from_hp else None
    ctx.save_for_backward(keep_x, *output[1:], w, offs)
    ctx.numerics, ctx.x_dtype = numerics, x.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 5
    dx, dw = _backward(g.contiguous(), *map(unwrapped, ctx.saved_tensors), ctx.numerics, ctx.x_dtype)
    return dx, dw.transpose(1, 2), None, None, None


_mm = differentiable(_forward, _save, _gradients)


def grouped_mm(
    x: Tensor, w: Tensor, offs: Tensor, numerics: Numerics, state: DelayedState | None = None, first_expert: int = 0
) -> Tensor:
    """`torch._grouped_mm(x, w, offs)` in FP8.

    Args:
        x: [M, K], any float dtype but FP8. Rows past offs[-1] are ignored: their outputs and gradients are zero.
        w: [E, K, N], a transposed view of a weight [E, N, K]; plain or wrapped. For the hopper backend K and N are
            multiples of 16.
        offs: int32 [E], ends of the groups. Any sizes, empty ones too. They ascend from 0, to M at most; on a GPU
            nobody looks whether they do, which would wait for it: past M they are cut, descending ones are undefined.
        numerics: scale rule, backend, precision of the weight gradient.
        state: of this GEMM (`DelayedState(gemms=1, ...)`), for recipe "delayed"; first_expert: where w[0] is in it.

    Returns:
        [M, N] in x's dtype, or autocast's.

    Raises:
        ValueError: shapes that do not belong together, offs that are no ends of groups of x, "delayed" without a
            state, or operands that the backend cannot read (operands.py).
    """
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or offs.shape != w.shape[:1]:
        raise ValueError(
            "grouped_mm takes x [M, K], w [E, K, N] and offs [E]; got "
            f"{tuple(x.shape)}, {tuple(w.shape)} and {tuple(offs.shape)}."
        )
    check_operands(x, (w,), numerics)
    x, offs, dtype = x.contiguous(), group_ends(offs, x), compute_dtype(x)
    if numerics.backend == "emulated":
        return ruled_mm(x, w, offs, numerics, dtype, state, first_expert)
    return _mm(x, w, offs, op_key(numerics, w), dtype)
