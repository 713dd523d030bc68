"""`routed_mlp` on tokens whose experts live on other ranks: dispatched_mlp.py between the kernels of routed_mlp.py.

    forward   x8,sx = rows of x   ==FP8==>   MLP, o   --dtype-->   out = base + sums of o
    backward  g8,sg = rows of g   ==FP8==>   MLP backward, d   --dtype-->   dx = sums of d

A row leaves the kernel that made it as the bytes that travel, and what comes back is summed up as it arrives.
"""

from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.config import Numerics
from converters.dispatched_mlp import measured_parts
from converters.expert_mlp import backward_rows, forward_rows, gathered_scales, quantized_weights
from converters.routed_mlp import combined, gradient_rows, gradient_tokens, out_dtype, rows_of
from converters.scaling import compute_dtype
from converters.telemetry_mlp import mlp_backward, mlp_forward, sent_rows
from converters.telemetry_rows import RoutedRows
from parallel.expert_parallel import Dispatch, from_experts, to_experts
from parallel.wrapped_weight import plain


class _DispatchedTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        slots: Tensor,
        base: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        dispatch: Dispatch,
        before: bool,
        n: Numerics,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> Tensor:
        x8, sx = rows_of(x, slots, scores, before, n.backend)
        sent_rows(plain(w1), "x", RoutedRows(x, slots, scores.shape[0], scores if before else None), (x8, sx))
        x8, sx = to_experts([x8, sx], dispatch)
        groups = get_backend(n.backend).groups(dispatch.offs, x8.shape[0])
        scales = gathered_scales(w1, w2, w3)
        weights = quantized_weights(plain(w1), plain(w2), plain(w3), scales, n, backward=False)
        o, y13, h8, sh = forward_rows(x8, sx, weights, groups, dtypes[0], n)
        mlp_forward(*measured_parts(w1, w2, w3), weights, dispatch.offs, None, (x8, sx), y13, (h8, sh), o)
        o = from_experts(o, dispatch)
        kept = (x, None) if before else (None, o)
        ctx.save_for_backward(*kept, scores, slots, x8, sx, y13, h8, sh, w1, w2, w3)
        ctx.dispatch, ctx.before, ctx.numerics, ctx.x_dtype = dispatch, before, n, x.dtype
        ctx.base_dtype = None if base is None else base.dtype
        return combined(o, slots, scores, base, before, dtypes[1], n.backend)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dispatch, before, n = ctx.dispatch, ctx.before, ctx.numerics
        x, o, scores, slots, x8, sx, y13, h8, sh, w1, w2, w3 = ctx.saved_tensors
        g8, sg, ds = gradient_rows(g, slots, scores, o, before, n.backend)
        sent_rows(plain(w1), "g", RoutedRows(g, slots, scores.shape[0], None if before else scores), (g8, sg))
        g8, sg = to_experts([g8, sg], dispatch)
        groups = get_backend(n.backend).groups(dispatch.offs, g8.shape[0])
        scales = gathered_scales(w1, w2, w3)
        weights = quantized_weights(plain(w1), plain(w2), plain(w3), scales, n, backward=True)
        watch, dtypes = mlp_backward(*measured_parts(w1, w2, w3), dispatch.offs, None, y13), (y13.dtype, w1.dtype)
        d, dw13, dw2 = backward_rows((g8, sg, None), (x8, sx, None), (h8, sh), y13, weights, groups, dtypes, n, watch)
        d = from_experts(d, dispatch)
        dx, ds_before = gradient_tokens(d, slots, scores, x, before, ctx.x_dtype, n.backend)
        dbase = None if ctx.base_dtype is None else g.to(ctx.base_dtype)
        dw1, dw3 = dw13.unbind(0)
        return dx, ds_before if before else ds, None, dbase, dw1, dw2, dw3, *(None,) * 4


def dispatched_tokens(
    x: Tensor,
    scores: Tensor,
    slots: Tensor,
    base: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    dispatch: Dispatch,
    before: bool,
    numerics: Numerics,
) -> Tensor:
    """`routed_mlp` with the plan `dispatch` instead of offs, which all ranks of the group have agreed on.

    x [T, D] and its M rows are this rank's, w1, w3 [E_local, H, D] and w2 [E_local, D, H] its experts. -> [T, D].
    """
    dtypes = compute_dtype(x), out_dtype(x, base)
    return _DispatchedTokens.apply(x.contiguous(), scores, slots, base, w1, w2, w3, dispatch, before, numerics, dtypes)
