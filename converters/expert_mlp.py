"""The whole SwiGLU MLP of the routed experts in FP8, as one autograd function.

    forward   x8,sx = rows(x)     y13 = x8 @ W13^T    h8,sh = rows(silu(y1) * y3)            out = h8 @ W2^T
    backward  g8,sg = rows(g)     dh  = g8 @ W2       dy8,sdy = rows(dswiglu(dh, y13))       dx  = dy8 @ W13
              dW2 = g^T @ h       dW13 = dy^T @ x     (per expert, contraction over its rows; operands: scaling.py)

W13 is w1 over w3, [E, 2H, D]: x is quantized once and multiplied once; the parameters stay two. Saved for backward: x and
h in FP8 with their scales, and y13; the SwiGLU is computed again. Only a recipe whose weight gradient starts from high
precision keeps x too, and computes h again from y13.
"""

from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import swiglu, dswiglu
from converters.config import Numerics
from converters.scaling import compute_dtype, quantize_weight, wgrad
from parallel.wrapped_weight import WrappedWeight


def _data(w: Tensor) -> Tensor:
    return w._data if isinstance(w, WrappedWeight) else w


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor, numerics: Numerics, dtype: torch.dtype
    ) -> Tensor:
        backend = get_backend(numerics.backend)
        groups = backend.groups(offs, x.shape[0])
        q13 = quantize_weight([_data(w1), _data(w3)], numerics)
        q2 = quantize_weight([_data(w2)], numerics)
        x8, sx = backend.quantize_rows(x)
        y13 = backend.gemm_rows(x8, sx, q13.q, q13.scale, groups, dtype, numerics.accumulate)
        h8, sh = backend.swiglu_rows(y13)
        out = backend.gemm_rows(h8, sh, q2.q, q2.scale, groups, dtype, numerics.accumulate)
        ctx.save_for_backward(
            x8, sx, y13, h8, sh, q13.q_t, q13.scale_t, q2.q_t, q2.scale_t, offs, x if numerics.wgrad_from_hp else None
        )
        ctx.numerics, ctx.x_dtype, ctx.w_dtype = numerics, x.dtype, w1.dtype
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        numerics: Numerics = ctx.numerics
        backend = get_backend(numerics.backend)
        x8, sx, y13, h8, sh, w13_t, sw13, w2_t, sw2, offs, x = ctx.saved_tensors
        groups = backend.groups(offs, g.shape[0])
        g, hp = g.contiguous(), numerics.wgrad_from_hp
        g8, sg = backend.quantize_rows(g)
        dh = backend.gemm_rows(g8, sg, w2_t, sw2, groups, y13.dtype, numerics.accumulate)
        h = swiglu(y13).to(y13.dtype) if hp else None
        dw2 = wgrad((g8, sg, g), (h8, sh, h), groups, ctx.w_dtype, numerics)
        dy8, sdy = backend.dswiglu_rows(dh, y13)
        dy = dswiglu(dh, y13).to(y13.dtype) if hp else None
        dx = backend.gemm_rows(dy8, sdy, w13_t, sw13, groups, ctx.x_dtype, numerics.accumulate)
        dw1, dw3 = wgrad((dy8, sdy, dy), (x8, sx, x), groups, ctx.w_dtype, numerics).chunk(2, dim=1)
        return dx, dw1, dw2, dw3, None, None, None


def expert_mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    """(silu(x @ w1[e]^T) * (x @ w3[e]^T)) @ w2[e]^T for the rows of each expert e, in FP8.

    Args:
        x: [M, D] rows grouped by expert. Rows past offs[-1] are ignored: their outputs and gradients are zero.
        w1, w3: [E, H, D]; w2: [E, D, H]; plain or wrapped, float32 or bfloat16.
        offs: int32 [E], ends of the groups. Any sizes, empty ones too; no alignment.
        numerics: scale rule, backend, precision of the weight gradient.

    Returns:
        [M, D] in x's dtype, or autocast's. Weight gradients have the weights' dtype.
    """
    E, H, D = w1.shape
    if x.dim() != 2 or x.shape[1] != D or w3.shape != w1.shape or w2.shape != (E, D, H) or offs.shape != (E,):
        raise ValueError(
            "expert_mlp takes x [M, D], w1 and w3 [E, H, D], w2 [E, D, H] and offs [E]; got "
            + ", ".join(str(tuple(t.shape)) for t in (x, w1, w3, w2, offs))
            + "."
        )
    return _ExpertMLP.apply(x, w1, w2, w3, offs.to(torch.int32), numerics, compute_dtype(x))
