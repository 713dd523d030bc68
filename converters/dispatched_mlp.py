"""The expert MLP between its two all-to-alls, with FP8 on the wire (expert parallelism).

    forward   x8,sx = rows(x)   ==FP8==>   x8,sx at the experts, MLP, out   --dtype-->   out
    backward  g8,sg = rows(g)   ==FP8==>   g8,sg at the experts, MLP backward, dx   --dtype-->   dx

One autograd function holds it all, so no FP8 tensor poses as another dtype in the graph. A row is quantized once, by
the rank that has it, and what arrives is the operand of the GEMMs. Sums over experts come later and in high precision.
dx travels while the weight gradient of w1 and w3 is computed.

What the experts compute in the forward, from rows that have arrived, is an operator of its own: selective recomputation
keeps its products, as it keeps those of expert_mlp.py, and both all-to-alls.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from converters.backends import get_backend
from converters.config import Numerics
from converters.expert_mlp import forward_rows, gathered_scales
from converters.kernels.ops import operator
from converters.mlp_gradients import Saved, mlp_gradients, taken
from converters.operands import check_operands, check_rows_in_fp8
from converters.scaling import compute_dtype
from converters.telemetry_mlp import sent_rows
from converters.telemetry_rows import PlainRows
from parallel.expert_parallel import Dispatch, arrived, from_experts, start_from_experts, to_experts
from parallel.wrapped_weight import plain

SAVED = ("w1", "w2", "w3", "x8", "sx", "y13", "h8", "sh")


def _empty_arrived(
    x8: Tensor,
    sx: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (R, D), H = x8.shape, w1.shape[1]
    y13 = x8.new_empty((R, 2 * H), dtype=dtype)
    return x8.new_empty((R, D), dtype=dtype), y13, x8.new_empty((R, H)), sx.new_empty(R)


@operator(_empty_arrived)
def arrived_mlp(
    x8: Tensor,
    sx: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x8 [R, D], sx [R], plain local weights -> out [R, D], and for backward y13 [R, 2H], h8 [R, H], sh [R]."""
    n = Numerics.parse(numerics)
    groups = get_backend(n.backend).groups(offs, x8.shape[0])
    return forward_rows(x8, sx, (w1, w2, w3), (s13, s2), groups, None, n, dtype)


def mlp_at_experts(
    x8: Tensor, sx: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, dispatch: Dispatch, n: Numerics, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`arrived_mlp` of weights that may be wrapped."""
    scales = gathered_scales(w1, w2, w3)
    return arrived_mlp(x8, sx, plain(w1), plain(w2), plain(w3), *scales, dispatch.offs, n.key, dtype)


def gradients_at_experts(saved: Saved, dispatch: Dispatch, n: Numerics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mlp_gradients` of wrapped weights and of rows that have arrived in FP8 -> dx on its way back, dw1, dw2, dw3."""
    weights = {name: saved[name] for name in ("w1", "w2", "w3")}
    dtypes = saved["y13"].dtype, weights["w1"].dtype
    saved["s13"], saved["s2"] = gathered_scales(*weights.values())
    saved |= {"g": None, "x": None} | {name: plain(w) for name, w in weights.items()}
    tables = get_backend(n.backend).groups(dispatch.offs, saved["g8"].shape[0]).tables
    return mlp_gradients(saved, tables, n.key, dtypes, partial(start_from_experts, dispatch=dispatch))


class _DispatchedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, dispatch: Dispatch, n: Numerics, dtype: torch.dtype
    ) -> Tensor:
        x8, sx = get_backend(n.backend).quantize_rows(x)
        sent_rows(plain(w1), "x", PlainRows(x), (x8, sx))
        x8, sx = to_experts([x8, sx], dispatch)
        out, y13, h8, sh = mlp_at_experts(x8, sx, w1, w2, w3, dispatch, n, dtype)
        ctx.save_for_backward(w1, w2, w3, x8, sx, y13, h8, sh)
        ctx.dispatch, ctx.numerics, ctx.x_dtype = dispatch, n, x.dtype
        return from_experts(out, dispatch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dispatch, n = ctx.dispatch, ctx.numerics
        saved, g = taken(ctx, SAVED), g.contiguous()
        rows = get_backend(n.backend).quantize_rows(g)
        sent_rows(plain(saved["w1"]), "g", PlainRows(g), rows)
        saved["g8"], saved["sg"] = to_experts(list(rows), dispatch)
        del g, rows
        dx, dw1, dw2, dw3 = gradients_at_experts(saved, dispatch, n)
        return arrived(dx).to(ctx.x_dtype), dw1, dw2, dw3, None, None, None


def dispatched_mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, dispatch: Dispatch, numerics: Numerics) -> Tensor:
    """`expert_mlp` on rows whose experts live on other ranks.

    Args:
        x: [M, D], this rank's rows, grouped by expert (all experts, not only the local ones).
        w1, w3: [E_local, H, D]; w2: [E_local, D, H].
        dispatch: the plan that all ranks of the group have agreed on.
        numerics: its weight gradient must come from FP8 (the rows arrive in nothing else).

    Returns:
        [M, D] in x's dtype, or autocast's.

    Raises:
        ValueError: other numerics, or operands that the backend cannot read (operands.py).
    """
    check_rows_in_fp8(numerics)
    check_operands(x, (w1, w2, w3), numerics)
    return _DispatchedMLP.apply(x, w1, w2, w3, dispatch, numerics, compute_dtype(x))
