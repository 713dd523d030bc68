"""FP8 experts on Hopper: Triton kernels under the functions of reference.py, same scales, same bytes.

Nothing here waits for the host: group sizes stay on the device, every buffer has a size that M and E alone decide.
Differences a caller sees: a WgradOperand is transposed and padded, SwiGLU's sigmoid rounds its own way (the last bit of
a quantized value may differ), and the tensor core sums to about 14 bits unless `accumulate` says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from converters.backends.reference import FP8, QuantizedWeight
from converters.kernels import cols, grouped, joined, rows, shards, swiglu, weights, wgrad_hp
from converters.kernels import groups as tables


@dataclass(frozen=True, kw_only=True)
class Groups:
    """offs int32 [E], M rows of the buffer, and the device tables of kernels/groups.py."""

    offs: Tensor
    M: int
    spans: Tensor
    tiles: Tensor
    chunks: Tensor

    @property
    def tables(self) -> list[Tensor]:
        """For `groups_of`: an op takes no dataclass."""
        return [self.offs, self.spans, self.tiles, self.chunks]


@dataclass(frozen=True, kw_only=True)
class WgradOperand:
    """One side of the weight gradient: q [D, P] E4M3, transposed and padded by group; scale [E, D] bfloat16, exact."""

    q: Tensor
    scale: Tensor


def groups(offs: Tensor, M: int) -> Groups:
    """offs: int32 [E], ends of the groups. M: rows of the buffer, at least offs[-1]. One launch."""
    spans, tiles, chunks = tables.group_tables(offs, M)
    return Groups(offs=offs, M=M, spans=spans, tiles=tiles, chunks=chunks)


def groups_of(tables: list[Tensor], M: int) -> Groups:
    """The groups of M rows with these `Groups.tables`."""
    offs, spans, tiles, chunks = tables
    return Groups(offs=offs, M=M, spans=spans, tiles=tiles, chunks=chunks)


def quantize_rows(x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, D] -> q [M, D], scale [M]; with index, rows x[index], negative ones zero."""
    return rows.quantize_rows(x, index)


def swiglu_rows(y13: Tensor) -> tuple[Tensor, Tensor]:
    """y13 [M, 2H] -> q [M, H], scale [M]."""
    return swiglu.swiglu_rows(y13)


def dswiglu_rows(dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
    """dh [M, H], y13 [M, 2H] -> q [M, 2H], scale [M]. dh is used up: in BF16 its memory is q's."""
    if dh.element_size() != 2 or not dh.is_contiguous():
        return swiglu.dswiglu_rows(dh, y13)
    scale = swiglu.dswiglu_rows_over(dh, y13)
    return dh.view(FP8), scale


def wgrad_operand(q: Tensor, scale: Tensor, groups: Groups) -> WgradOperand:
    """Row-scaled FP8, some columns of it too, re-scaled to one scale an expert and column."""
    out, column_scale = cols.quantize_columns(q, scale, groups.spans, groups.chunks)
    return WgradOperand(q=out, scale=column_scale)


def wgrad_operand_hp(x: Tensor, groups: Groups) -> WgradOperand:
    """x [M, D] in high precision, quantized with one scale an expert and column."""
    out, column_scale = cols.quantize_columns(x, None, groups.spans, groups.chunks)
    return WgradOperand(q=out, scale=column_scale)


def quantize_weight(
    ws: Sequence[Tensor],
    per_row: bool = False,
    previous: QuantizedWeight | None = None,
    forward: bool = True,
    backward: bool = True,
) -> QuantizedWeight:
    """ws [E, N_i, K], joined along N, with one scale an expert.

    A transposed view [E, N, K] of a contiguous [E, K, N] is read as it lies: q and q_t change places.
    previous: what these weights were quantized to before; the result is the same, a pass over them is saved.
    forward, backward: whether q and q_t are wanted. For one pass only, the other is left empty.

    Raises:
        ValueError: per_row, which has no kernel.
    """
    if per_row:
        raise ValueError("per_row = True (recipe 'rowwise') has no hopper kernel: use backend = 'reference'.")
    carried = None if previous is None else previous.scale
    lies_transposed = len(ws) == 1 and not ws[0].is_contiguous() and ws[0].transpose(1, 2).is_contiguous()
    if lies_transposed:
        q_t, q, scale = weights.quantize_weight([ws[0].transpose(1, 2)], carried, backward, forward)
    else:
        q, q_t, scale = weights.quantize_weight(list(ws), carried, forward, backward)
    return QuantizedWeight(q=q, scale=scale, q_t=q_t, scale_t=scale)


def amax_slices(w: Tensor) -> Tensor:
    """w [e, ...] -> float32 [e]."""
    return shards.amax_slices(w)


def cast_slices(w: Tensor, scale: Tensor) -> Tensor:
    """w [e, ...], scale [e] -> E4M3 of w's shape."""
    return shards.cast_slices(w, scale)


def join_weight(parts: list[Tensor], scale: Tensor, transposed: bool) -> QuantizedWeight:
    """Parts E4M3 [E, N_i, K], one scale an expert, joined along N: q_t if transposed, else q; the other is empty."""
    none = parts[0].new_empty(0)
    if transposed:
        return QuantizedWeight(q=none, scale=scale, q_t=joined.join_transposed(parts), scale_t=scale)
    q = parts[0] if len(parts) == 1 else torch.cat([p.view(torch.uint8) for p in parts], dim=1).view(parts[0].dtype)
    return QuantizedWeight(q=q, scale=scale, q_t=none, scale_t=scale)


def gemm_rows(
    q: Tensor,
    scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    groups: Groups,
    out_dtype: torch.dtype,
    accumulate: str = "fast",
) -> Tensor:
    """q [M, K], scale [M], w_q [E, N, K], w_scale [E] -> y [M, N]; rows of nobody are zeros."""
    precise = accumulate == "precise"
    return grouped.gemm_rows(q, scale, w_q, w_scale, groups.spans, groups.tiles, out_dtype, precise)


def gemm_wgrad(
    a: WgradOperand, b: WgradOperand, groups: Groups, out_dtype: torch.dtype, accumulate: str = "fast"
) -> Tensor:
    """a of [M, N], b of [M, K] -> dw [E, N, K]; an empty expert gets zeros."""
    precise = accumulate in ("precise", "precise_wgrad")
    return grouped.gemm_wgrad(a.q, a.scale, b.q, b.scale, groups.spans, groups.M, out_dtype, precise)


def gemm_wgrad_hp(a: Tensor, b: Tensor, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """a [M, N], b [M, K] in high precision -> dw [E, N, K]."""
    return wgrad_hp.gemm_wgrad_hp(a, b, groups.spans, out_dtype)
