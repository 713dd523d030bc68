"""`routed_mlp` on tokens whose experts live on other ranks: two halves, and what else there is to compute between them.

    forward    _Experts   x8,sx = rows of x  ==FP8==>  MLP, o  --dtype-->     the shared expert is computed now
               _Combine   out = base + sums of o
    backward   _Combine   g8,sg = rows of g  ==FP8==>                         the shared expert's backward runs now
               _Experts   MLP backward, d  --dtype-->  (dw13 meanwhile)  dx = sums of d

A row leaves the kernel that made it as the bytes that travel, and what comes back is summed up as it arrives. On a GPU
the two all-to-alls marked above hide behind what is computed meanwhile: autograd runs the backward of what was computed
last first, so the shared expert's before that of `_Experts`.

What goes from one half to the other in FP8 goes past autograd, in a `Flight`: no FP8 tensor poses as another dtype.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from converters.backends.reference import FP8
from converters.config import Numerics
from converters.dispatched_mlp import SAVED, gradients_at_experts, mlp_at_experts
from converters.mlp_gradients import taken
from converters.operands import check_operands, check_rows_in_fp8
from converters.routed_mlp import combined, gradient_tokens, out_dtype, token_kernels
from converters.scaling import compute_dtype
from converters.telemetry_mlp import sent_rows
from converters.telemetry_rows import RoutedRows
from parallel.expert_parallel import Dispatch, arrived, at_experts, start_from_experts, start_to_experts
from parallel.wrapped_weight import plain


class Flight:
    """One call: how its rows travel, and the gradient on its way from `_Combine` to `_Experts`."""

    def __init__(self, dispatch: Dispatch, before: bool, numerics: Numerics, width: int, w1: Tensor) -> None:
        self.dispatch, self.before, self.numerics, self.width, self.w1 = dispatch, before, numerics, width, w1
        self.gradient: Tensor | None = None

    def depart(
        self, key: str, x: Tensor, slots: Tensor, scores: Tensor, weighted: bool, other: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantizes the rows of x [T, D] and starts them on their way. -> what is coming, dots. key: for telemetry."""
        M, factor = scores.shape[0], scores if weighted else None
        packed, dots = token_kernels(self.numerics.backend).to_packed_rows(x, slots, M, factor, other)
        quantized = packed[:, : self.width].view(FP8), packed.view(torch.float32)[:, self.width // 4]
        sent_rows(plain(self.w1), key, RoutedRows(x, slots, M, factor), quantized)
        return start_to_experts(packed, self.dispatch), dots

    def arrive(self, coming: Tensor) -> tuple[Tensor, Tensor]:
        """-> q [R, D], scale [R], sorted by expert."""
        q, scale = at_experts(coming, [(FP8, (self.width,)), (torch.float32, ())], self.dispatch)
        return q, scale


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        slots: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        flight: Flight,
        dtype: torch.dtype,
    ) -> Tensor:
        """-> o [M, D], not yet arrived."""
        x8, sx = flight.arrive(flight.depart("x", x, slots, scores, flight.before)[0])
        o, y13, h8, sh = mlp_at_experts(x8, sx, w1, w2, w3, flight.dispatch, flight.numerics, dtype)
        ctx.save_for_backward(w1, w2, w3, x8, sx, y13, h8, sh, x if flight.before else None, scores, slots)
        ctx.flight, ctx.x_dtype = flight, x.dtype
        return start_from_experts(o, flight.dispatch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """g says nothing: the gradient is in flight."""
        flight, n = ctx.flight, ctx.flight.numerics
        saved = taken(ctx, (*SAVED, "x", "scores", "slots"))
        x, scores, slots = (saved.pop(name) for name in ("x", "scores", "slots"))
        saved["g8"], saved["sg"] = flight.arrive(flight.gradient)
        flight.gradient = None
        d, dw1, dw2, dw3 = gradients_at_experts(saved, flight.dispatch, n)
        dx, ds = gradient_tokens(arrived(d), slots, scores, x, flight.before, ctx.x_dtype, n.backend)
        return dx, ds if flight.before else None, None, dw1, dw2, dw3, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, scores: Tensor, slots: Tensor, base: Tensor | None, flight: Flight, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(scores, slots, None if flight.before else o)
        ctx.flight, ctx.base_dtype = flight, None if base is None else base.dtype
        ctx.rows = {"size": o.shape, "dtype": o.dtype}
        return combined(arrived(o), slots, scores, base, flight.before, dtype, flight.numerics.backend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        scores, slots, o = ctx.saved_tensors
        flight, after = ctx.flight, not ctx.flight.before
        flight.gradient, ds = flight.depart("g", g.contiguous(), slots, scores, after, o)
        nothing = g.new_zeros((), dtype=ctx.rows["dtype"]).expand(ctx.rows["size"])
        dbase = None if ctx.base_dtype is None else g.to(ctx.base_dtype)
        return nothing, ds if after else None, None, dbase, None, None


def dispatched_tokens(
    x: Tensor,
    scores: Tensor,
    slots: Tensor,
    base: Callable[[], Tensor] | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    dispatch: Dispatch,
    before: bool,
    numerics: Numerics,
) -> Tensor:
    """`routed_mlp` with the plan `dispatch` instead of offs, which all ranks of the group have agreed on.

    x [T, D] and its M rows are this rank's, w1, w3 [E_local, H, D] and w2 [E_local, D, H] its experts; base computes
    [T, D] while the rows are away. -> [T, D]. Raises what `routed_mlp` raises.
    """
    check_rows_in_fp8(numerics)
    check_operands(x, (w1, w2, w3), numerics)
    flight = Flight(dispatch, before, numerics, x.shape[1], w1)
    o = _Experts.apply(x.contiguous(), scores, slots, w1, w2, w3, flight, compute_dtype(x))
    added = None if base is None else base()
    return _Combine.apply(o, scores, slots, added, flight, out_dtype(x, added))
