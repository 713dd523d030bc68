"""The whole SwiGLU MLP of the routed experts in FP8, as one differentiable op.

    forward   x8,sx = rows(x)     y13 = x8 @ W13^T    h8,sh = rows(silu(y1) * y3)            out = h8 @ W2^T
    backward  g8,sg = rows(g)     dh  = g8 @ W2       dy8,sdy = rows(dswiglu(dh, y13))       dx  = dy8 @ W13
              dW2 = g^T @ h       dW13 = dy^T @ x     (per expert, contraction over its rows; operands: scaling.py)

W13 is w1 over w3, [E, 2H, D]: x is quantized once and multiplied once; the parameters stay two. Saved for backward: x
and h in FP8 with their scales, and y13; the SwiGLU is computed again. Only a recipe whose weight gradient starts from
high precision keeps x too, and computes h again from y13.

Forward and backward are custom ops: torch.compile and activation checkpointing see one node each, whose inputs are the
parameters themselves, while what is quantized from them stays in weight_cache.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8, QuantizedWeight, dswiglu, swiglu
from converters.config import Numerics
from converters.gathered_weight import FP8GatheredWeight
from converters.rules.mlp import ruled_mlp
from converters.rules.state import DelayedState
from converters.scaling import Rows, compute_dtype, op_key, wgrad, wgrad_gemm, wgrad_operands
from converters.telemetry_mlp import MLPBackward, mlp_backward, mlp_forward
from converters.telemetry_rows import PlainRows
from converters.weight_cache import quantized

Dtypes = tuple[torch.dtype, torch.dtype]
Scales = tuple[Tensor | None, Tensor | None]
Weights = tuple[Callable[[], QuantizedWeight], Callable[[], QuantizedWeight]]  # W13 and W2, each made when it is needed


def forward_rows(
    x8: Tensor, sx: Tensor, weights: Weights, groups: object, dtype: torch.dtype, n: Numerics
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward from quantized rows on: -> out [M, D], y13 [M, 2H], h8 [M, H], sh [M]."""
    backend, w13 = get_backend(n.backend), weights[0]()
    y13 = backend.gemm_rows(x8, sx, w13.q, w13.scale, groups, dtype, n.accumulate)
    h8, sh = backend.swiglu_rows(y13)
    w2 = weights[1]()
    return backend.gemm_rows(h8, sh, w2.q, w2.scale, groups, dtype, n.accumulate), y13, h8, sh


def backward_rows(
    g: Rows,
    x: Rows,
    h: tuple[Tensor, Tensor],
    y13: Tensor,
    weights: Weights,
    groups: object,
    dtypes: Dtypes,
    n: Numerics,
    watch: MLPBackward | None = None,
    send: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward from the quantized gradient on: -> dx [M, D], dw13 [2, E, H, D], dw2 [E, D, H].

    g and x may carry their high-precision tensors, h is (h8, sh); dtypes: of dx and of the weight gradients. watch:
    telemetry of this backward. send: starts dx on its way while dw13 is computed; what it returns comes back for dx.
    """
    backend, w2, hp = get_backend(n.backend), weights[1](), n.wgrad_from_hp
    dh = backend.gemm_rows(g[0], g[1], w2.q_t, w2.scale_t, groups, y13.dtype, n.accumulate)
    del w2
    dw2 = wgrad(g, (*h, swiglu(y13).to(y13.dtype) if hp else None), groups, dtypes[1], n)
    dy8, sdy = backend.dswiglu_rows(dh, y13)
    if watch is not None:
        watch.see_dy13(dh, (dy8, sdy))
    dy = dswiglu(dh, y13).to(y13.dtype) if hp else None
    del dh
    w13 = weights[0]()
    dx = backend.gemm_rows(dy8, sdy, w13.q_t, w13.scale_t, groups, dtypes[0], n.accumulate)
    del w13
    sent = dx if send is None else send(dx)
    dx = None if watch is None else dx
    operands = wgrad_operands((dy8, sdy, dy), x, groups, n)
    del dy8, dy  # here is the peak of memory
    dw13 = wgrad_gemm(operands, groups, dtypes[1], n, parts=2)
    if watch is not None:
        watch.see_results(g[:2], x[1], dx, dw13, dw2)
    return sent, dw13, dw2


def quantized_weights(w1: Tensor, w2: Tensor, w3: Tensor, scales: Scales, n: Numerics, backward: bool) -> Weights:
    """Plain w1, w3 [E, H, D] and w2 [E, D, H] -> W13 and W2: cached where that may be, or as FSDP2 gathered them."""
    s13, s2 = scales
    if s13 is not None and s2 is not None:
        join = get_backend(n.backend).join_weight
        return partial(join, [w1, w3], s13, backward), partial(join, [w2], s2, backward)
    return partial(quantized, [w1, w3], n, backward=backward), partial(quantized, [w2], n, backward=backward)


def gathered_scales(w1: Tensor, w2: Tensor, w3: Tensor) -> Scales:
    """The scales of W13 and W2 where FSDP2 has gathered them in FP8."""
    if isinstance(w1, FP8GatheredWeight) and isinstance(w2, FP8GatheredWeight) and isinstance(w3, FP8GatheredWeight):
        return w1._scale, w2._scale
    return None, None


@torch.library.custom_op("titan_moe_fp8::expert_mlp", mutates_args=())
def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> out [M, D], and for backward x8 [M, D], sx [M], y13 [M, 2H], h8 [M, H], sh [M]."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    x8, sx = backend.quantize_rows(x)
    groups = backend.groups(offs, x.shape[0])
    weights = quantized_weights(w1, w2, w3, (s13, s2), n, backward=False)
    out, y13, h8, sh = forward_rows(x8, sx, weights, groups, dtype, n)
    mlp_forward([(w1, s13), (w3, s13)], [(w2, s2)], weights, offs, PlainRows(x), (x8, sx), y13, (h8, sh), out)
    return out, x8, sx, y13, h8, sh


@_forward.register_fake
def _(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    M, D, H = x.shape[0], x.shape[1], w1.shape[1]
    rows = [x.new_empty(M, dtype=torch.float32) for _ in range(2)]
    x8, h8 = x.new_empty((M, D), dtype=FP8), x.new_empty((M, H), dtype=FP8)
    return x.new_empty((M, D), dtype=dtype), x8, rows[0], x.new_empty((M, 2 * H), dtype=dtype), h8, rows[1]


@torch.library.custom_op("titan_moe_fp8::expert_mlp_backward", mutates_args=())
def _backward(
    g: Tensor,
    x: Tensor | None,
    x8: Tensor,
    sx: Tensor,
    y13: Tensor,
    h8: Tensor,
    sh: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [M, D], dw13 [2, E, H, D], dw2 [E, D, H]. x is given where the weight gradient needs it."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    groups = backend.groups(offs, g.shape[0])
    weights = quantized_weights(w1, w2, w3, (s13, s2), n, backward=True)
    rows = (*backend.quantize_rows(g), g)
    watch = mlp_backward([(w1, s13), (w3, s13)], [(w2, s2)], offs, PlainRows(g), y13)
    return backward_rows(rows, (x8, sx, x), (h8, sh), y13, weights, groups, (x_dtype, w_dtype), n, watch)


@_backward.register_fake
def _(
    g: Tensor,
    x: Tensor | None,
    x8: Tensor,
    sx: Tensor,
    y13: Tensor,
    h8: Tensor,
    sh: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    E, H, D = w1.shape
    dw13, dw2 = g.new_empty((2, E, H, D), dtype=w_dtype), g.new_empty((E, D, H), dtype=w_dtype)
    return g.new_empty(x8.shape, dtype=x_dtype), dw13, dw2


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w1, *weights, offs, numerics, _ = inputs  # w2, w3, s13, s2
    keep_x = x if Numerics.parse(numerics).wgrad_from_hp else None
    ctx.save_for_backward(keep_x, *output[1:], w1, *weights, offs)
    ctx.numerics, ctx.dtypes = numerics, (x.dtype, w1.dtype)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 9
    dx, dw13, dw2 = _backward(g.contiguous(), *ctx.saved_tensors, ctx.numerics, *ctx.dtypes)
    dw1, dw3 = dw13.unbind(0)
    return dx, dw1, dw2, dw3, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def expert_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    numerics: Numerics,
    state: DelayedState | None = None,
    first_expert: int = 0,
) -> Tensor:
    """(silu(x @ w1[e]^T) * (x @ w3[e]^T)) @ w2[e]^T for the rows of each expert e, in FP8.

    Args:
        x: [M, D] rows grouped by expert. Rows past offs[-1] are ignored: their outputs and gradients are zero.
        w1, w3: [E, H, D]; w2: [E, D, H]; plain or wrapped, float32 or bfloat16.
        offs: int32 [E], ends of the groups. Any sizes, empty ones too; no alignment.
        numerics: scale rule, backend, precision of the weight gradient.
        state: of this MLP (`DelayedState(gemms=2, ...)`), for recipe "delayed"; first_expert: where w1[0] is in it.

    Returns:
        [M, D] in x's dtype, or autocast's. Weight gradients have the weights' dtype.

    Raises:
        ValueError: shapes that do not belong together, or "delayed" without a state.
    """
    E, H, D = w1.shape
    if x.dim() != 2 or x.shape[1] != D or w3.shape != w1.shape or w2.shape != (E, D, H) or offs.shape != (E,):
        got = ", ".join(str(tuple(t.shape)) for t in (x, w1, w3, w2, offs))
        raise ValueError(f"expert_mlp takes x [M, D], w1 and w3 [E, H, D], w2 [E, D, H] and offs [E]; got {got}.")
    x, offs, dtype = x.contiguous(), offs.to(torch.int32), compute_dtype(x)
    if numerics.backend == "emulated":
        return ruled_mlp(x, (w1, w2, w3), offs, numerics, dtype, state, first_expert)
    scales, key = gathered_scales(w1, w2, w3), op_key(numerics, w1, w2, w3)
    return _forward(x, w1, w2, w3, *scales, offs, key, dtype)[0]
