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
from converters.expert_mlp import backward_rows, forward_rows, gathered_scales, quantized_weights
from converters.scaling import compute_dtype, op_key
from converters.telemetry_mlp import mlp_backward, mlp_forward
from converters.telemetry_rows import RoutedRows


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


def gradient_rows(
    g: Tensor, slots: Tensor, scores: Tensor, o: Tensor, before: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """g [T, D] -> g8 [M, D], sg [M], and ds [M] if the scores come after the experts."""
    weighted = (None, None) if before else (scores, o)
    return token_kernels(backend).to_rows(g.contiguous(), slots, scores.shape[0], *weighted)


def gradient_tokens(
    d: Tensor, slots: Tensor, scores: Tensor, x: Tensor | None, before: bool, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """d [M, D] -> dx [T, D], and ds [M] if the scores come before the experts."""
    return token_kernels(backend).to_tokens(d, slots, dtype, scores if before else None, None, x)


@torch.library.custom_op("titan_moe_fp8::routed_mlp", mutates_args=())
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
    weights = quantized_weights(w1, w2, w3, (s13, s2), n, backward=False)
    o, y13, h8, sh = forward_rows(x8, sx, weights, groups, dtype, n)
    rows = RoutedRows(x, slots, scores.shape[0], scores if before else None)
    mlp_forward([(w1, s13), (w3, s13)], [(w2, s2)], weights, offs, rows, (x8, sx), y13, (h8, sh), o)
    out = combined(o, slots, scores, base, before, out_dtype, n.backend)
    return out, o.new_empty(0) if before else o, x8, sx, y13, h8, sh


@_forward.register_fake
def _(
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


@torch.library.custom_op("titan_moe_fp8::routed_mlp_backward", mutates_args=())
def _backward(
    g: Tensor,
    x: Tensor | None,
    scores: Tensor,
    slots: Tensor,
    o: Tensor,
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
    before: bool,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dx [T, D], ds [M], dw13 [2, E, H, D], dw2 [E, D, H]. x is given if the scores come before the experts."""
    n = Numerics.parse(numerics)
    g8, sg, ds = gradient_rows(g, slots, scores, o, before, n.backend)
    groups = get_backend(n.backend).groups(offs, g8.shape[0])
    weights = quantized_weights(w1, w2, w3, (s13, s2), n, backward=True)
    rows, dtypes = RoutedRows(g, slots, scores.shape[0], None if before else scores), (y13.dtype, w_dtype)
    watch = mlp_backward([(w1, s13), (w3, s13)], [(w2, s2)], offs, rows, y13)
    d, dw13, dw2 = backward_rows((g8, sg, None), (x8, sx, None), (h8, sh), y13, weights, groups, dtypes, n, watch)
    dx, ds_before = gradient_tokens(d, slots, scores, x, before, x_dtype, n.backend)
    return dx, ds_before if before else ds, dw13, dw2


@_backward.register_fake
def _(
    g: Tensor,
    x: Tensor | None,
    scores: Tensor,
    slots: Tensor,
    o: Tensor,
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
    before: bool,
    numerics: str,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    E, H, D = w1.shape
    dw13, dw2 = g.new_empty((2, E, H, D), dtype=w_dtype), g.new_empty((E, D, H), dtype=w_dtype)
    return g.new_empty(g.shape, dtype=x_dtype), torch.empty_like(scores), dw13, dw2


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, scores, slots, base, *weights, offs, before, numerics, _, _ = inputs  # w1, w2, w3, s13, s2
    ctx.save_for_backward(x if before else None, scores, slots, *output[1:], *weights, offs)
    ctx.options = before, numerics, x.dtype, weights[0].dtype
    ctx.base_dtype = None if base is None else base.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 14
    dx, ds, dw13, dw2 = _backward(g.contiguous(), *ctx.saved_tensors, *ctx.options)
    dw1, dw3 = dw13.unbind(0)
    dbase = None if ctx.base_dtype is None else g.to(ctx.base_dtype)
    return dx, ds, None, dbase, dw1, dw2, dw3, *(None,) * 7


_forward.register_autograd(_gradients, setup_context=_save)


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
    """
    scales, key = gathered_scales(w1, w2, w3), op_key(numerics, w1, w2, w3)
    dtypes = compute_dtype(x), out_dtype(x, base)
    return _forward(x.contiguous(), scores, slots, base, w1, w2, w3, *scales, offs, before, key, *dtypes)[0]
