"""The routed experts from tokens to tokens, as one differentiable op: no row of a token exists in high precision twice.

    t a token, r one of its rows, s[r] its score          scores before the experts     scores after
    forward    rows of the experts, quantized             x8 = rows(s[r] * x[t])        x8 = rows(x[t])
               o = MLP(x8)  (expert_mlp.py)
               out[t] = base[t] +                         sum_r o[r]                    sum_r s[r] * o[r]
    backward   gradient of the rows, quantized            g8 = rows(g[t])               g8 = rows(s[r] * g[t])
               d = MLP backward(g8)
               dx[t] =                                    sum_r s[r] * d[r]             sum_r d[r]
               ds[r] =                                    <d[r], x[t]>                  <g[t], o[r]>

Each line that has x, g, out or dx is one kernel (kernels/tokens.py). Weighting, sums and base (the shared expert's
output) stay in float32 until they are quantized or stored, so a value is rounded once where torchtitan's layer rounds
it to BF16 first. Saved beyond what expert_mlp.py saves: x, which the router's gate has saved too, or o, which
torchtitan's layer saves in float32.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8
from converters.config import Numerics
from converters.differentiable import differentiable, unwrapped
from converters.expert_mlp import forward_rows, gathered_scales
from converters.kernels.ops import operator
from converters.mlp_gradients import mlp_gradients, taken
from converters.operands import check_operands, check_rows_in_fp8
from converters.scaling import compute_dtype, op_key
from converters.telemetry_gradients import see_gradient
from converters.telemetry_rows import RoutedRows

SAVED = ("w1", "w2", "w3", "s13", "s2", "offs", "x", "scores", "slots", "o", "x8", "sx", "y13", "h8", "sh")


@cache
def token_kernels(backend: str) -> ModuleType:
    """The module with `to_rows`, `to_packed_rows` and `to_tokens` of a backend."""
    return import_module("converters.kernels.tokens" if backend == "hopper" else "converters.backends.reference_tokens")


def rows_of(x: Tensor, slots: Tensor, scores: Tensor, before: bool, backend: str) -> tuple[Tensor, Tensor]:
    """x [T, D] -> x8 [M, D], sx [M]."""
    return token_kernels(backend).to_rows(x, slots, scores.shape[0], scores if before else None)[:2]


def combined(
    o: Tensor, slots: Tensor, scores: Tensor, base: Tensor | None, before: bool, dtype: torch.dtype, backend: str
) -> Tensor:
    """o [M, D] -> out [T, D]."""
    return token_kernels(backend).to_tokens(o, slots, dtype, None if before else scores, base)[0]


def _empty_gradient_rows(
    g: Tensor, slots: Tensor, scores: Tensor, o: Tensor, w1: Tensor, offs: Tensor, before: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    M = scores.shape[0]
    rows = g.new_empty((M, g.shape[1]), dtype=FP8), g.new_empty(M, dtype=torch.float32)
    return *rows, g.new_empty(0 if before else M, dtype=torch.float32)


@operator(_empty_gradient_rows)
def routed_gradient_rows(
    g: Tensor, slots: Tensor, scores: Tensor, o: Tensor, w1: Tensor, offs: Tensor, before: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """g [T, D] -> g8 [M, D], sg [M], and ds [M] if the scores come after the experts, whose output is o [M, D]."""
    M, weighted = scores.shape[0], (None, None) if before else (scores, o)
    g8, sg, ds = token_kernels(backend).to_rows(g, slots, M, *weighted)
    see_gradient(w1, RoutedRows(g, slots, M, weighted[0]), (g8, sg), offs)
    return g8, sg, ds


def _empty_gradient_tokens(
    d: Tensor, slots: Tensor, scores: Tensor, x: Tensor | None, before: bool, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    ds = d.new_empty(0 if x is None else d.shape[0], dtype=torch.float32)
    return d.new_empty((slots.shape[0], d.shape[1]), dtype=dtype), ds


@operator(_empty_gradient_tokens)
def gradient_tokens(
    d: Tensor, slots: Tensor, scores: Tensor, x: Tensor | None, before: bool, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """d [M, D] -> dx [T, D], and ds [M] if the scores come before the experts; they multiply x [T, D]."""
    return token_kernels(backend).to_tokens(d, slots, dtype, scores if before else None, None, x)


def _empty_routed(
    x: Tensor,
    scores: Tensor,
    slots: Tensor,
    base: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    before: bool,
    numerics: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    M, D, H = scores.shape[0], x.shape[1], w1.shape[1]
    sx, sh = (x.new_empty(M, dtype=torch.float32) for _ in range(2))
    x8, h8 = x.new_empty((M, D), dtype=FP8), x.new_empty((M, H), dtype=FP8)
    o = x.new_empty(0 if before else (M, D), dtype=dtype)
    return x.new_empty(x.shape, dtype=out_dtype), o, x8, sx, x.new_empty((M, 2 * H), dtype=dtype), h8, sh


@operator(_empty_routed, name="routed_mlp")
def _forward(
    x: Tensor,
    scores: Tensor,
    slots: Tensor,
    base: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    s2: Tensor | None,
    offs: Tensor,
    before: bool,
    numerics: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> out [T, D], and for backward o [M, D] (empty if the scores come before), x8, sx, y13, h8, sh."""
    n = Numerics.parse(numerics)
    x8, sx = rows_of(x, slots, scores, before, n.backend)
    groups = get_backend(n.backend).groups(offs, x8.shape[0])
    rows = RoutedRows(x, slots, scores.shape[0], scores if before else None)
    o, *products = forward_rows(x8, sx, (w1, w2, w3), (s13, s2), groups, rows, n, dtype)
    out = combined(o, slots, scores, base, before, out_dtype, n.backend)
    return out, o.new_empty(0) if before else o, x8, sx, *products


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, scores, slots, base, *weights, offs, before, numerics, _, _ = inputs  # w1, w2, w3, s13, s2
    ctx.save_for_backward(*weights, offs, x if before else None, scores, slots, *output[1:])
    ctx.before, ctx.numerics, ctx.dtypes = before, numerics, (output[4].dtype, weights[0].dtype)
    ctx.x_dtype, ctx.base_dtype = x.dtype, None if base is None else base.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 14
    saved, before, backend = taken(ctx, SAVED), ctx.before, Numerics.parse(ctx.numerics).backend
    scores, slots, offs, tokens = (saved.pop(name) for name in ("scores", "slots", "offs", "x"))
    dbase = None if ctx.base_dtype is None else g.to(ctx.base_dtype)
    o, w1 = saved.pop("o"), unwrapped(saved["w1"])
    rows = routed_gradient_rows(g.contiguous(), slots, scores, o, w1, offs, before, backend)
    saved["g8"], saved["sg"], ds = rows
    saved["g"] = saved["x"] = None
    del rows, o

    def send(d: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_tokens(d, slots, scores, tokens, before, ctx.x_dtype, backend)

    tables = get_backend(backend).groups(offs, scores.shape[0]).tables
    (dx, ds_before), dw1, dw2, dw3 = mlp_gradients(saved, tables, ctx.numerics, ctx.dtypes, send)
    return dx, ds_before if before else ds, None, dbase, dw1, dw2, dw3, *(None,) * 7


_routed = differentiable(_forward, _save, _gradients)


def out_dtype(x: Tensor, base: Tensor | None) -> torch.dtype:
    """What torchtitan's layer returns: x's dtype, and promoted where the shared expert's is wider."""
    return x.dtype if base is None else torch.promote_types(x.dtype, base.dtype)


def routed_mlp(
    x: Tensor,
    scores: Tensor,
    slots: Tensor,
    base: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    before: bool,
    numerics: Numerics,
) -> Tensor:
    """Tokens through their experts, in FP8, and summed up with `base`.

    Args:
        x: [T, D].
        scores: float32 [M], of the rows in the order of the experts.
        slots: int32 [T, k], the rows of a token; -1 for one that another rank has.
        base: [T, D], what the result is added to.
        w1, w3: [E, H, D]; w2: [E, D, H]; plain or wrapped.
        offs: int32 [E], ends of the groups, the last one M.
        before: the scores multiply x, not what the experts return.
        numerics: its weight gradient must come from FP8 (rows exist in nothing else).

    Returns:
        [T, D] in the dtype of `out_dtype`.

    Raises:
        ValueError: other numerics, or operands that the backend cannot read (operands.py).
    """
    check_rows_in_fp8(numerics)
    check_operands(x, (w1, w2, w3), numerics)
    scales, key = gathered_scales(w1, w2, w3), op_key(numerics, w1, w2, w3)
    dtypes = compute_dtype(x), out_dtype(x, base)
    return _routed(x.contiguous(), scores, slots, base, w1, w2, w3, *scales, offs, before, key, *dtypes)
