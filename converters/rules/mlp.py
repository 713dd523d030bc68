"""The whole SwiGLU MLP by any rule, as one differentiable op.

    forward   y13 = x @ W13^T      h = silu(y1) * y3      out = h @ W2^T
    backward  dh = g @ W2          dy = dswiglu(dh, y13)  dx = dy @ W13     dW2 = g^T @ h     dW13 = dy^T @ x

W13 is w1 over w3, one tensor to every rule: that is how a gated first layer is one GEMM elsewhere too. Slots: 0 x,
1 W13, 2 h, 3 W2; gradients 0 dy, 1 g. Saved: x, y13 and the weights; h and everything quantized is made again.
"""

from typing import Any

import torch
from torch import Tensor

from converters.kernels.ops import without_autocast
from converters.numerics import Numerics
from converters.rules.formats import FORMATS
from converters.rules.gemm import gradients, product
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
from converters.rules.ragged import ragged
from converters.rules.state import DelayedState
from converters.telemetry_ruled import ruled_mlp_backward, ruled_mlp_forward

GEMMS = 2


@torch.library.custom_op("titan_moe_fp8::ruled_mlp", mutates_args=())
@without_autocast
def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    state: list[Tensor],
    key: str,
    call: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> out [M, D]; y13 [M, 2H] for backward; used [4, 2, E] and amax [4, E] for the state."""
    rows = ragged(offs, x.shape[0])
    rule = forward_rule(Numerics.parse(key), state, offs, call)
    y13 = product(rule, x, [w1, w3], rows, dtype, 0)
    h = rule.ops.swiglu(y13)
    out = product(rule, h, [w2], rows, dtype, 2)
    ruled_mlp_forward(rule, rows, x, [(w1, None), (w3, None)], [(w2, None)], y13, h, out)
    return out, y13, *outcome(rule, x)


@_forward.register_fake
def _(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    state: list[Tensor],
    key: str,
    call: str,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    y13 = x.new_empty((x.shape[0], 2 * w1.shape[1]), dtype=dtype)
    return x.new_empty(x.shape, dtype=dtype), y13, *fake_outcome(x, 2 * GEMMS, w1.shape[0], state)


@torch.library.custom_op("titan_moe_fp8::ruled_mlp_backward", mutates_args=())
@without_autocast
def _backward(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    y13: Tensor,
    used: Tensor,
    state: list[Tensor],
    key: str,
    call: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dx [M, D], dw13 [2, E, H, D], dw2 [E, D, H], amax [2, E] of dy and g."""
    n, rows = Numerics.parse(key), ragged(offs, x.shape[0])
    fmt, rule = FORMATS[n.gradients], backward_rule(n, state, used, offs, call)
    dh, dw2 = gradients(rule, g, rule.ops.swiglu(y13), [w2], rows, n, y13.dtype, (5, 2, 3))
    dy = rule.ops.dswiglu(dh, y13)
    dx, dw13 = gradients(rule, dy, x, [w1, w3], rows, n, x.dtype, (4, 0, 1))
    w13, results = [(w1, None), (w3, None)], (dx, dw13, dw2)
    ruled_mlp_backward(rule, fmt, rows, g, x, w13, [(w2, None)], y13, dh, dy, results)
    return dx, dw13, dw2, gradient_amax(rule, g, GEMMS)


@_backward.register_fake
def _(
    g: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    y13: Tensor,
    used: Tensor,
    state: list[Tensor],
    key: str,
    call: str,
) -> tuple[Tensor, ...]:
    E, H, D = w1.shape
    amax = fake_outcome(x, GEMMS, E, state)[1]
    return torch.empty_like(x), w1.new_empty((2, E, H, D)), w2.new_empty((E, D, H)), amax


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.state, ctx.key, ctx.call, _ = inputs  # x, w1, w2, w3, offs
    ctx.save_for_backward(*tensors, output[1], output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple:
    if g is None:
        return (None,) * 9
    dx, dw13, dw2, amax = _backward(g.contiguous(), *ctx.saved_tensors, ctx.state, ctx.key, ctx.call)
    remember_gradient(ctx.state, amax, ctx.key, ctx.call)
    dw1, dw3 = dw13.unbind(0)
    return dx, dw1, dw2, dw3, None, [None] * len(ctx.state), None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def ruled_mlp(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    offs: Tensor,
    numerics: Numerics,
    dtype: torch.dtype,
    state: DelayedState | None = None,
    first: int = 0,
) -> Tensor:
    """`expert_mlp` (expert_mlp.py) by the rule of `numerics`. weights: w1, w2, w3; state: `DelayedState(gemms=2, ...)`
    where the rule is delayed; first: the number of the first local expert in it.

    Raises:
        ValueError: the rule is delayed and there is no state.
    """
    tensors, call = state_of(numerics, state, first)
    out, _, used, amax = _forward(x, *weights, offs, tensors, numerics.key, call, dtype)
    remember_forward(tensors, used, amax, call)
    return out
