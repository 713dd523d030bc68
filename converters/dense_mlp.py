"""A dense SwiGLU MLP in FP8, as one differentiable op: a shared expert, or the feed-forward of a dense layer.

The same computation as expert_mlp.py with one group of all rows: x is quantized once for w1 and w3, which are one GEMM;
x and h are saved in FP8. The weights are parameters [H, D] and [D, H] of linear layers.
"""

from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8
from converters.dense_linear import dense_weight, gathered_scale, one_group
from converters.expert_mlp import Weights, backward_rows, forward_rows
from converters.numerics import Numerics
from converters.scaling import compute_dtype, op_key
from converters.telemetry_mlp import Parts, mlp_backward, mlp_forward
from converters.telemetry_rows import PlainRows


def _weights(
    w1: Tensor, w2: Tensor, w3: Tensor, s13: Tensor | None, s2: Tensor | None, n: Numerics, *, backward: bool
) -> Weights:
    return (
        lambda: dense_weight([w1, w3], s13, n, backward=backward),
        lambda: dense_weight([w2], s2, n, backward=backward),
    )


def _parts(w1: Tensor, w2: Tensor, w3: Tensor, s13: Tensor | None, s2: Tensor | None) -> tuple[Parts, Parts]:
    return [(w1.unsqueeze(0), s13), (w3.unsqueeze(0), s13)], [(w2.unsqueeze(0), s2)]


@torch.library.custom_op("titan_moe_fp8::dense_mlp", mutates_args=())
def _forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> out [T, D], and for backward x8 [T, D], sx [T], y13 [T, 2H], h8 [T, H], sh [T]."""
    n = Numerics.parse(numerics)
    x8, sx = get_backend(n.backend).quantize_rows(x)
    groups = one_group(n.backend, x.shape[0], x.device)
    weights = _weights(w1, w2, w3, s13, s2, n, backward=False)
    out, y13, h8, sh = forward_rows(x8, sx, weights, groups, dtype, n)
    mlp_forward(*_parts(w1, w2, w3, s13, s2), weights, groups.offs, PlainRows(x), (x8, sx), y13, (h8, sh), out)
    return out, x8, sx, y13, h8, sh


@_forward.register_fake
def _(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    numerics: str,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    T, D, H = x.shape[0], x.shape[1], w1.shape[0]
    rows = [x.new_empty(T, dtype=torch.float32) for _ in range(2)]
    x8, h8 = x.new_empty((T, D), dtype=FP8), x.new_empty((T, H), dtype=FP8)
    return x.new_empty((T, D), dtype=dtype), x8, rows[0], x.new_empty((T, 2 * H), dtype=dtype), h8, rows[1]


@torch.library.custom_op("titan_moe_fp8::dense_mlp_backward", mutates_args=())
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
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dx [T, D], dw13 [2, H, D], dw2 [D, H]. x is given where the weight gradient needs it."""
    n = Numerics.parse(numerics)
    groups = one_group(n.backend, g.shape[0], g.device)
    weights = _weights(w1, w2, w3, s13, s2, n, backward=True)
    rows = (*get_backend(n.backend).quantize_rows(g), g)
    watch = mlp_backward(*_parts(w1, w2, w3, s13, s2), groups.offs, PlainRows(g), y13)
    dx, dw13, dw2 = backward_rows(rows, (x8, sx, x), (h8, sh), y13, weights, groups, (x_dtype, w_dtype), n, watch)
    return dx, dw13.squeeze(1), dw2.squeeze(0)


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
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    H, D = w1.shape
    dw13, dw2 = g.new_empty((2, H, D), dtype=w_dtype), g.new_empty((D, H), dtype=w_dtype)
    return g.new_empty(x8.shape, dtype=x_dtype), dw13, dw2


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, *weights, numerics, _ = inputs  # w1, w2, w3, s13, s2
    keep_x = x if Numerics.parse(numerics).wgrad_from_hp else None
    ctx.save_for_backward(keep_x, *output[1:], *weights)
    ctx.numerics, ctx.dtypes = numerics, (x.dtype, weights[0].dtype)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 8
    dx, dw13, dw2 = _backward(g.contiguous(), *ctx.saved_tensors, ctx.numerics, *ctx.dtypes)
    dw1, dw3 = dw13.unbind(0)
    return dx, dw1, dw2, dw3, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def dense_mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, numerics: Numerics) -> Tensor:
    """(silu(x @ w1^T) * (x @ w3^T)) @ w2^T, in FP8.

    Args:
        x: [..., D], any float dtype; T = 0 rows work.
        w1, w3: [H, D]; w2: [D, H]; plain or wrapped, float32 or bfloat16.
        numerics: scale rule, backend, precision of the weight gradient.

    Returns:
        [..., D] in x's dtype, or autocast's. Weight gradients have the weights' dtype.

    Raises:
        ValueError: shapes that do not belong together.
    """
    D = x.shape[-1]
    if w1.dim() != 2 or w1.shape[1] != D or w3.shape != w1.shape or w2.shape != w1.shape[::-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, w1, w3, w2))
        raise ValueError(f"dense_mlp takes x [..., D], w1 and w3 [H, D] and w2 [D, H]; got {shapes}.")
    scales, key = (gathered_scale([w1, w3]), gathered_scale([w2])), op_key(numerics, w1, w2, w3)
    rows = x.reshape(x.shape[:-1].numel(), D).contiguous()
    return _forward(rows, w1, w2, w3, *scales, key, compute_dtype(x))[0].view(x.shape)
