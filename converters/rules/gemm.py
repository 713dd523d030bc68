"""grouped_mm by any rule: y = x @ w[e]^T forward and backward, as one differentiable op.

Nothing quantized is saved: backward quantizes x and w again, and gets the same bytes, since their scales depend on the
same values, or are saved (delayed). Delayed's state is not this op's business: it takes what to cast with and returns
maxima (state.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from converters.kernels.ops import without_autocast
from converters.numerics import Numerics
from converters.rules.formats import E4M3, FORMATS
from converters.rules.passes import (
    backward_rule,
    fake_outcome,
    forward_rule,
    gradient_amax,
    outcome,
    remember_forward,
    remember_gradient,
    state_of,
)
from converters.rules.products import contracted, contracted_hp, outer, rows_times_weights
from converters.rules.ragged import Ragged, ragged
from converters.rules.rule import Rule
from converters.rules.state import DelayedState
from converters.telemetry_ruled import ruled_mm_backward, ruled_mm_forward


def product(rule: Rule, x: Tensor, ws: Sequence[Tensor], rows: Ragged, dtype: torch.dtype, slot: int) -> Tensor:
    """x [M, K] @ w[e]^T, w [E, N, K] joined of ws -> [M, N]; zeros for rows of nobody. slot: of x; w's is the next."""
    a, b = rule.rows(x, E4M3, rows, slot), rule.weight(ws, 2, slot + 1)
    return rule.ops.finish_rows(rows_times_weights(a, b, rows, False), rows, outer(a, b), dtype)


def gradients(
    rule: Rule,
    g: Tensor,
    x: Tensor,
    ws: Sequence[Tensor],
    rows: Ragged,
    n: Numerics,
    dtype: torch.dtype,
    slots: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """Of `product`, with g [M, N] -> dx [M, K] in dtype, and dw in the weights': [E, N, K], or [parts, E, N / parts, K]
    of several weights. slots: of g, x and w.
    """
    fmt, ops = FORMATS[n.gradients], rule.ops
    fp8 = n.wgrad == "fp8"
    g8, gT = rule.both(g, fmt, rows, slots[0]) if fp8 else (rule.rows(g, fmt, rows, slots[0]), None)
    w8 = rule.weight(ws, 1, slots[2])
    dx = ops.finish_rows(rows_times_weights(g8, w8, rows, True), rows, outer(g8, w8), dtype)
    del w8
    if n.wgrad == "bf16":
        return dx, ops.finish_weights(contracted_hp(g, x, rows), rows, None, ws[0].dtype, len(ws))
    xT = rule.columns(x, E4M3, rows, slots[1]) if fp8 else ops.columns_pow2(x, E4M3, rows)
    gT = gT if fp8 else ops.columns_pow2(g, fmt, rows)
    return dx, ops.finish_weights(contracted(gT, xT, rows), rows, outer(gT, xT), ws[0].dtype, len(ws))


@torch.library.custom_op("titan_moe_fp8::ruled_mm", mutates_args=())
@without_autocast
def _forward(
    x: Tensor, w: Tensor, offs: Tensor, state: list[Tensor], key: str, call: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """-> y [M, N]; used [2, 2, E] and amax [2, E] for the state. w [E, K, N], a transposed view."""
    n, rows = Numerics.parse(key), ragged(offs, x.shape[0])
    rule = forward_rule(n, state, offs, call)
    w = w.transpose(1, 2)
    y = product(rule, x, [w], rows, dtype, 0)
    ruled_mm_forward(rule, rows, x, w, y)
    return y, *outcome(rule, x)


@_forward.register_fake
def _(
    x: Tensor, w: Tensor, offs: Tensor, state: list[Tensor], key: str, call: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((x.shape[0], w.shape[2]), dtype=dtype), *fake_outcome(x, 2, w.shape[0], state)


@torch.library.custom_op("titan_moe_fp8::ruled_mm_backward", mutates_args=())
@without_autocast
def _backward(
    g: Tensor, x: Tensor, w: Tensor, offs: Tensor, used: Tensor, state: list[Tensor], key: str, call: str
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [M, K], dw [E, N, K] (w's storage orientation), amax [1, E] of g."""
    n, rows = Numerics.parse(key), ragged(offs, x.shape[0])
    rule = backward_rule(n, state, used, offs, call)
    w = w.transpose(1, 2)
    dx, dw = gradients(rule, g, x, [w], rows, n, x.dtype, (2, 0, 1))
    ruled_mm_backward(rule, FORMATS[n.gradients], rows, g, x, w, dx, dw)
    return dx, dw, gradient_amax(rule, g, 1)


@_backward.register_fake
def _(
    g: Tensor, x: Tensor, w: Tensor, offs: Tensor, used: Tensor, state: list[Tensor], key: str, call: str
) -> tuple[Tensor, Tensor, Tensor]:
    dw = w.new_empty((w.shape[0], w.shape[2], w.shape[1]))
    return torch.empty_like(x), dw, fake_outcome(x, 1, w.shape[0], state)[1]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, w, offs, state, ctx.key, ctx.call, _ = inputs
    ctx.save_for_backward(x, w, offs, output[1])
    ctx.state = state  # not saved: backward wants it as it is then, after other micro-batches have written to it
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple:
    if g is None:
        return (None,) * 7
    dx, dw, amax = _backward(g.contiguous(), *ctx.saved_tensors, ctx.state, ctx.key, ctx.call)
    remember_gradient(ctx.state, amax, ctx.key, ctx.call)
    return dx, dw.transpose(1, 2), None, [None] * len(ctx.state), None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def ruled_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor,
    numerics: Numerics,
    dtype: torch.dtype,
    state: DelayedState | None = None,
    first: int = 0,
) -> Tensor:
    """`grouped_mm` (grouped_mm.py) by the rule of `numerics`. state: of this weight, where the rule is delayed; first:
    the number of the first local expert in it.

    Raises:
        ValueError: the rule is delayed and there is no state.
    """
    tensors, call = state_of(numerics, state, first)
    y, used, amax = _forward(x, w, offs, tensors, numerics.key, call, dtype)
    remember_forward(tensors, used, amax, call)
    return y
