"""The whole SwiGLU MLP of the routed experts in FP8, as one differentiable op.

    forward   x8,sx = rows(x)     y13 = x8 @ W13^T    h8,sh = rows(silu(y1) * y3)            out = h8 @ W2^T
    backward  g8,sg = rows(g)     dh  = g8 @ W2       dy8,sdy = rows(dswiglu(dh, y13))       dx  = dy8 @ W13
              dW2 = g^T @ h       dW13 = dy^T @ x     (per expert, contraction over its rows; operands: scaling.py)

W13 is w1 over w3, [E, 2H, D]: x is quantized once and multiplied once; the parameters stay two. Saved for backward: x
and h in FP8 with their scales, and y13; the SwiGLU is computed again. Only a recipe whose weight gradient starts from
high precision keeps x too, and computes h again from y13.

The forward is one custom op, the backward a few operators (mlp_gradients.py): torch.compile and activation
checkpointing see nodes whose inputs are the parameters themselves, while what is quantized from them stays in
weight_cache.py. A dense MLP (dense_mlp.py) is the same op without offs: one group of all rows, weights [N, K].
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8
from converters.config import Numerics
from converters.dense_linear import one_group
from converters.differentiable import differentiable, unwrapped
from converters.gathered_weight import FP8GatheredWeight
from converters.group_ends import group_ends
from converters.kernels.ops import operator
from converters.mlp_gradients import gradient_rows, makes_both, mlp_gradients, taken
from converters.operands import check_operands
from converters.rules.mlp import ruled_mlp
from converters.rules.state import DelayedState
from converters.scaling import compute_dtype, op_key
from converters.telemetry import is_measured
from converters.telemetry_mlp import mlp_forward, parts_of
from converters.telemetry_rows import PlainRows, Rows
from converters.weight_cache import fp8_weight

Scales = tuple[Tensor | None, Tensor | None]
SAVED = ("w1", "w2", "w3", "s13", "s2", "offs", "x", "x8", "sx", "y13", "h8", "sh")


def forward_rows(
    x8: Tensor,
    sx: Tensor,
    ws: tuple[Tensor, Tensor, Tensor],
    scales: Scales,
    groups: Any,
    rows: Rows | None,
    n: Numerics,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward from quantized rows on, measured where that is due: -> out [M, D], y13 [M, 2H], h8 [M, H], sh [M].

    ws: plain w1, w2, w3: [E, H, D] and [E, D, H], or without E. rows: what x8 was quantized from, None: not here.
    """
    (w1, w2, w3), (s13, s2), backend = ws, scales, get_backend(n.backend)
    weights = (  # W13 and W2, each made when it is needed
        partial(fp8_weight, [w1, w3], s13, n, backward=False, both=makes_both(x8.shape[0], w1)),
        partial(fp8_weight, [w2], s2, n, backward=False),
    )
    w = weights[0]()
    y13 = backend.gemm_rows(x8, sx, w.q, w.scale, groups, dtype, n.accumulate)
    del w
    h8, sh = backend.swiglu_rows(y13)
    w = weights[1]()
    out = backend.gemm_rows(h8, sh, w.q, w.scale, groups, dtype, n.accumulate)
    del w
    if is_measured(w1):
        parts = parts_of([w1, w3], s13), parts_of([w2], s2)
        mlp_forward(*parts, weights, groups.offs, rows, (x8, sx), y13, (h8, sh), out)
    return out, y13, h8, sh


def gathered_scales(w1: Tensor, w2: Tensor, w3: Tensor) -> Scales:
    """The scales of W13 and W2 where FSDP2 has gathered them in FP8."""
    if isinstance(w1, FP8GatheredWeight) and isinstance(w2, FP8GatheredWeight) and isinstance(w3, FP8GatheredWeight):
        return w1._scale, w2._scale
    return None, None


def _empty_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor | None,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    M, D, H = *x.shape, w1.shape[-2]
    rows = [x.new_empty(M, dtype=torch.float32) for _ in range(2)]
    x8, h8 = x.new_empty((M, D), dtype=FP8), x.new_empty((M, H), dtype=FP8)
    return x.new_empty((M, D), dtype=dtype), x8, rows[0], x.new_empty((M, 2 * H), dtype=dtype), h8, rows[1]


@operator(_empty_mlp, name="expert_mlp")
def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor | None,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> out [M, D], and for backward x8 [M, D], sx [M], y13 [M, 2H], h8 [M, H], sh [M]."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    x8, sx = backend.quantize_rows(x)
    M = x.shape[0]
    groups = one_group(n.backend, M, x.device) if offs is None else backend.groups(offs, M)
    out, *products = forward_rows(x8, sx, (w1, w2, w3), (s13, s2), groups, PlainRows(x), n, dtype)
    return out, x8, sx, *products


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, *weights, offs, numerics, _ = inputs  # w1, w2, w3, s13, s2
    ctx.save_for_backward(*weights, offs, x if Numerics.parse(numerics).wgrad_from_hp else None, *output[1:])
    ctx.numerics, ctx.dtypes = numerics, (x.dtype, weights[0].dtype)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 9
    saved, n, g = taken(ctx, SAVED), Numerics.parse(ctx.numerics), g.contiguous()
    offs = saved.pop("offs")
    tables = [] if offs is None else get_backend(n.backend).groups(offs, g.shape[0]).tables
    saved["g8"], saved["sg"] = gradient_rows(g, unwrapped(saved["w1"]), tables, ctx.numerics)
    saved["g"] = g if n.wgrad_from_hp else None
    del g
    return *mlp_gradients(saved, tables, ctx.numerics, ctx.dtypes), *(None,) * 5


_mlp = differentiable(_forward, _save, _gradients)


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
        x: [M, D] rows grouped by expert, any float dtype but FP8. Rows past offs[-1] are ignored: their outputs and
            gradients are zero.
        w1, w3: [E, H, D]; w2: [E, D, H]; plain or wrapped, float32 or bfloat16. For the hopper backend H and D are
            multiples of 16.
        offs: int32 [E], ends of the groups. Any sizes, empty ones too; no alignment. They ascend from 0, to M at
            most; on a GPU nobody looks whether they do, which would wait for it: past M they are cut, descending ones
            are undefined.
        numerics: scale rule, backend, precision of the weight gradient.
        state: of this MLP (`DelayedState(gemms=2, ...)`), for recipe "delayed"; first_expert: where w1[0] is in it.

    Returns:
        [M, D] in x's dtype, or autocast's. Weight gradients have the weights' dtype.

    Raises:
        ValueError: shapes that do not belong together, offs that are no ends of groups of x, "delayed" without a
            state, or operands that the backend cannot read (operands.py).
    """
    E, H, D = w1.shape
    if x.dim() != 2 or x.shape[1] != D or w3.shape != (E, H, D) or w2.shape != (E, D, H) or offs.shape != (E,):
        got = ", ".join(str(tuple(t.shape)) for t in (x, w1, w3, w2, offs))
        raise ValueError(f"expert_mlp takes x [M, D], w1 and w3 [E, H, D], w2 [E, D, H] and offs [E]; got {got}.")
    check_operands(x, (w1, w2, w3), numerics)
    x, offs, dtype = x.contiguous(), group_ends(offs, x), compute_dtype(x)
    if numerics.backend == "emulated":
        return ruled_mlp(x, (w1, w2, w3), offs, numerics, dtype, state, first_expert)
    return mlp_of_rows(x, w1, w2, w3, offs, numerics)


def mlp_of_rows(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor | None, numerics: Numerics) -> Tensor:
    """`expert_mlp` of contiguous rows x [M, D], not emulated; offs None: w1, w3 [H, D] and w2 [D, H], for all rows."""
    scales, key = gathered_scales(w1, w2, w3), op_key(numerics, w1, w2, w3)
    return _mlp(x, w1, w2, w3, *scales, offs, key, compute_dtype(x))
