"""What scale rules compute, in plain torch, on any device: the definition. Each function has a twin in fused.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from converters.backends.reference import dswiglu, swiglu
from converters.rules.formats import E4M3, Format, cast, exact_scale, pow2_scale
from converters.rules.operand import QuantizedOperand, Settle
from converters.rules.ragged import Ragged

__all__ = ["dswiglu", "swiglu"]


def _pow2(x: Tensor, amax: Tensor, fmt: Format) -> QuantizedOperand:
    scale = pow2_scale(amax, fmt)
    return QuantizedOperand(cast(x, scale.reciprocal(), fmt), scale)


def _blocks(x: Tensor, size: tuple[int, int]) -> Tensor:
    """x [..., N, K] -> for each element the largest |value| of its block of `size`; blocks at the ends are shorter."""
    (n, k), (N, K) = size, x.shape[-2:]
    padded = torch.nn.functional.pad(x.abs(), (0, -K % k, 0, -N % n))
    tiles = padded.unflatten(-1, (-1, k)).unflatten(-3, (-1, n))  # [..., N / n, n, K / k, k]
    amax = tiles.amax((-3, -1), keepdim=True).expand_as(tiles)
    return amax.flatten(-4, -3).flatten(-2, -1)[..., :N, :K]


def _joined(ws: Sequence[Tensor]) -> Tensor:
    return ws[0] if len(ws) == 1 else torch.cat(list(ws), dim=1)


def rows_pow2(x: Tensor, fmt: Format, width: int | None = None) -> QuantizedOperand:
    """x [M, K] with one power of two a row, or `width` columns of a row."""
    return _pow2(x, _blocks(x, (1, width)) if width else x.abs().amax(1, keepdim=True), fmt)


def columns_pow2(x: Tensor, fmt: Format, rows: Ragged) -> QuantizedOperand:
    """x [M, K] with one power of two an expert and column."""
    scale = rows.by_row(pow2_scale(rows.amax_columns(x), fmt))
    return QuantizedOperand(cast(x, scale.reciprocal(), fmt), scale)


def column_blocks_pow2(x: Tensor, fmt: Format, rows: Ragged) -> QuantizedOperand:
    """x [M, K] with one power of two a column of 128 rows of an expert; the last block of an expert is shorter."""
    return _pow2(x, rows.amax_blocks(x), fmt)


def rescaled_columns(rows_x: QuantizedOperand, fmt: Format, rows: Ragged) -> QuantizedOperand:
    """What `rows_pow2` made, as `columns_pow2` would make it of that."""
    return columns_pow2(rows_x.dequantized(rows), fmt, rows)


def experts_exact(x: Tensor, fmt: Format, rows: Ragged) -> QuantizedOperand:
    """x [M, K] with one float32 scale an expert."""
    outer = exact_scale(rows.amax(x), fmt)
    return QuantizedOperand(cast(x, rows.by_row(outer.reciprocal())[:, None], fmt), outer=outer)


def experts_given(x: Tensor, fmt: Format, rows: Ragged, given: Tensor, settle: Settle) -> QuantizedOperand:
    """x [M, K] with multipliers that `settle` has, given float32 [E], or finds where that is 0."""
    multiplier, outer = settle(rows.amax(x))
    return QuantizedOperand(cast(x, rows.by_row(multiplier)[:, None], fmt), outer=outer)


def weights_pow2(ws: Sequence[Tensor], size: tuple[int | None, int | None]) -> QuantizedOperand:
    """ws [E, N_i, K], joined along N, with one power of two a tile of `size`; None: all of that dim. E4M3."""
    w = _joined(ws)
    if size in ((None, None), (1, None), (None, 1)):
        return _pow2(w, w.abs().amax([dim for dim, n in enumerate(size, 1) if n is None], keepdim=True), E4M3)
    return _pow2(w, _blocks(w, size), E4M3)


def weights_exact(ws: Sequence[Tensor]) -> QuantizedOperand:
    """The same with one float32 scale an expert."""
    w = _joined(ws)
    outer = exact_scale(w.abs().amax((1, 2)), E4M3)
    return QuantizedOperand(cast(w, outer.reciprocal().view(-1, 1, 1), E4M3), outer=outer)


def weights_given(ws: Sequence[Tensor], given: Tensor, settle: Settle) -> QuantizedOperand:
    """The same as `experts_given`."""
    w = _joined(ws)
    multiplier, outer = settle(w.abs().amax((1, 2)).float())
    return QuantizedOperand(cast(w, multiplier.view(-1, 1, 1), E4M3), outer=outer)


def finish_rows(y: Tensor, rows: Ragged, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [M, N] times the factor [E] of each row's expert, as dtype; rows of nobody become zeros."""
    if factor is not None:
        y = y.float() * rows.by_row(factor)[:, None]
    return torch.where(rows.owned[:, None], y, 0).to(dtype)


def finish_weights(dw: Tensor, rows: Ragged, factor: Tensor | None, dtype: torch.dtype, parts: int) -> Tensor:
    """dw [E, N, K] times factor [E], as dtype; zeros for an expert without rows. parts 1: [E, N, K]; else
    [parts, E, N / parts, K], each contiguous: autograd would copy anything else.
    """
    dw = torch.where((rows.sizes > 0).view(-1, 1, 1), dw, 0)
    if factor is not None:
        dw = dw.float() * factor.view(-1, 1, 1)
    dw = dw.to(dtype)
    return dw if parts == 1 else torch.stack(dw.chunk(parts, dim=1))
