"""Linear layers in FP8, one or several on the same input, as one differentiable op: wq, wk and wv of an attention.

    forward   x8 [T, K], sx [T]  @  W8_i^T [K, N_i]        ->  y_i [T, N_i]
    dgrad     g8 [T, N], sg [T]  @  W8                     ->  dx  [T, K]     W: weights [N_i, K], joined along N
    wgrad     g^T                @  x                      ->  dW  [N, K], of which each weight's gradient is a view

All rows are one group, so the backends' grouped GEMMs compute it. x is quantized once and saved in FP8, once for all
layers; the joined gradient g = (g_1, g_2, ...) is quantized once. The outputs are tensors of their own, not views of
one: attention keeps v for its backward, and a view of it would keep the space of q and k too. The weights stay
parameters [N_i, K] of their own; what is quantized from them is kept in weight_cache.py.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8
from converters.differentiable import differentiable, unwrapped
from converters.gathered_weight import FP8GatheredWeight
from converters.kernels.ops import operator
from converters.numerics import Numerics
from converters.operands import check_operands
from converters.scaling import compute_dtype, op_key, wgrad
from converters.telemetry import is_measured
from converters.telemetry_mlp import gemm_backward, gemm_forward, parts_of
from converters.weight_cache import fp8_weight, quantized


@lru_cache(maxsize=64)
def one_group(backend: str, rows: int, device: torch.device) -> object:
    """The backend's groups for `rows` rows of one group. A constant: two launches a call would be spent on it."""
    offs = torch.full((1,), rows, dtype=torch.int32, device=device)
    return get_backend(backend).groups(offs, rows)


def rows_of_each(joined: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """[..., N, K] -> views [..., N_i, K] of each weight [N_i, K]."""
    return [joined] if len(weights) == 1 else list(joined.split([len(w) for w in weights], dim=-2))


def gathered_scale(weights: list[Tensor]) -> Tensor | None:
    """The scale that these weights share where FSDP2 has gathered them in FP8."""
    first = weights[0]
    return first._scale if isinstance(first, FP8GatheredWeight) else None


def _empty(
    x: Tensor, weights: list[Tensor], scale: Tensor | None, numerics: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    T = x.shape[0]
    outs = [x.new_empty((T, w.shape[0]), dtype=dtype) for w in weights]
    return outs, x.new_empty(x.shape, dtype=FP8), x.new_empty(T, dtype=torch.float32)


@operator(_empty, name="dense_linear")
def _forward(
    x: Tensor, weights: list[Tensor], scale: Tensor | None, numerics: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    """-> y_i [T, N_i] of each weight, and for backward x8 [T, K], sx [T]."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    x8, sx = backend.quantize_rows(x)
    groups = one_group(n.backend, x.shape[0], x.device)
    if scale is not None:  # gathered in FP8: not joined, the parts serve as they are
        joined, w8 = None, parts_of(weights, scale)
    else:
        joined = quantized(weights, n, backward=False)
        w8 = [(q, joined.scale) for q in rows_of_each(joined.q, weights)]
    ys = [backend.gemm_rows(x8, sx, *part, groups, dtype, n.accumulate) for part in w8]
    if is_measured(weights[0]):
        gemm_forward(parts_of(weights, scale), joined, groups.offs, x, (x8, sx), ys)
    return ys, x8, sx


def _empty_gradients(
    g: Tensor,
    x: Tensor | None,
    x8: Tensor,
    sx: Tensor,
    weights: list[Tensor],
    scale: Tensor | None,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return g.new_empty(x8.shape, dtype=x_dtype), g.new_empty((g.shape[1], x8.shape[1]), dtype=w_dtype)


@operator(_empty_gradients, name="dense_linear_backward")
def _backward(
    g: Tensor,
    x: Tensor | None,
    x8: Tensor,
    sx: Tensor,
    weights: list[Tensor],
    scale: Tensor | None,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """-> dx [T, K], dw [N, K]. x is given where the weight gradient needs it."""
    n = Numerics.parse(numerics)
    backend = get_backend(n.backend)
    groups = one_group(n.backend, g.shape[0], g.device)
    g8, sg = backend.quantize_rows(g)
    w = fp8_weight(weights, scale, n, backward=True)
    dx = backend.gemm_rows(g8, sg, w.q_t, w.scale_t, groups, x_dtype, n.accumulate)
    del w
    dw = wgrad((g8, sg, g), (x8, sx, x), groups, w_dtype, n)
    if is_measured(weights[0]):
        gemm_backward(parts_of(weights, scale), groups.offs, g, (g8, sg), sx, dx, rows_of_each(dw, weights))
    return dx, dw.squeeze(0)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weights, scale, numerics, _ = inputs
    keep_x = x if Numerics.parse(numerics).wgrad_from_hp else None
    ctx.save_for_backward(keep_x, *output[1:], scale, *weights)
    ctx.numerics, ctx.dtypes = numerics, (x.dtype, weights[0].dtype)


def _gradients(ctx: Any, gs: list[Tensor], *unused: Tensor) -> tuple[Tensor | list[Tensor] | None, ...]:
    keep_x, x8, sx, scale, *weights = map(unwrapped, ctx.saved_tensors)
    g = gs[0].contiguous() if len(gs) == 1 else torch.cat(gs, dim=1)
    dx, dw = _backward(g, keep_x, x8, sx, weights, scale, ctx.numerics, *ctx.dtypes)
    return dx, rows_of_each(dw, weights), None, None, None


_linear = differentiable(_forward, _save, _gradients)


def dense_linear(x: Tensor, weights: list[Tensor], numerics: Numerics) -> list[Tensor]:
    """[x @ w^T for each weight], in FP8, from one quantization of x and one GEMM.

    Args:
        x: [..., K], any float dtype but FP8; T = 0 rows work.
        weights: [N_i, K] each, plain or wrapped, float32 or bfloat16, one dtype. For the hopper backend N_i and K are
            multiples of 16.
        numerics: scale rule, backend, precision of the weight gradient.

    Returns:
        [..., N_i] each, in x's dtype or autocast's. Weight gradients have the weights' dtype, as views of one tensor.

    Raises:
        ValueError: shapes that do not belong together, or operands that the backend cannot read (operands.py).
    """
    shapes = [x.shape, *(w.shape for w in weights)]
    if x.dim() < 1 or any(len(shape) != 2 or shape[1] != x.shape[-1] for shape in shapes[1:]):
        got = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"dense_linear takes x [..., K] and weights [N, K]; got {got}.")
    check_operands(x, weights, numerics)
    return dense_linear_by_key(x, weights, op_key(numerics, *weights))


def dense_linear_by_key(x: Tensor, weights: list[Tensor], key: str) -> list[Tensor]:
    """`dense_linear`, its numerics as the key that `op_key` makes of them and the weights."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    ys = _linear(rows, weights, gathered_scale(weights), key, compute_dtype(x))
    return [y.view(*x.shape[:-1], y.shape[1]) for y in ys]
