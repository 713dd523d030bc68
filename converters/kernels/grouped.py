"""The grouped GEMMs as torch operators: descriptors, tile choice and launch of gemm.py's kernels."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from converters.kernels.gemm_rows import rows_kernel
from converters.kernels.gemm_wgrad import wgrad_kernel
from converters.kernels.ops import operator
from converters.kernels.tiles import BK, ROWS, programs, rows_tile, wgrad_tile


@cache
def _layout(itemsize: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


def _descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How TMA sees t, flattened to two dims: boxes of rows x columns, 128-byte swizzled in shared memory."""
    width = t.shape[-1]
    return TensorDescriptor(t, [t.numel() // width, width], [width, 1], [rows, columns], _layout(t.itemsize))


def _empty_gemm_rows(
    q: Tensor,
    scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    spans: Tensor,
    tiles: Tensor,
    out_dtype: torch.dtype,
    precise: bool,
) -> Tensor:
    return q.new_empty((q.shape[0], w_q.shape[1]), dtype=out_dtype)


@operator(_empty_gemm_rows)
def gemm_rows(
    q: Tensor,
    scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    spans: Tensor,
    tiles: Tensor,
    out_dtype: torch.dtype,
    precise: bool,
) -> Tensor:
    """q [M, K], scale [M], w_q [E, N, K], w_scale [E] -> y [M, N] = (q * scale) @ (w_q[e] * w_scale[e])^T.

    Rows of nobody are zeros. precise: sums leave the tensor core every 128 products.
    """
    y = _empty_gemm_rows(q, scale, w_q, w_scale, spans, tiles, out_dtype, precise)
    (M, K), (E, N, _) = q.shape, w_q.shape
    if M == 0:
        return y
    tile = rows_tile(M, N, K, E, y.itemsize, precise)
    rows_kernel[(programs(q.device),)](
        _descriptor(q, ROWS, BK), _descriptor(w_q, tile.bn, BK), _descriptor(y, ROWS, tile.bn // tile.pieces),
        y, scale, w_scale, spans, tiles, E, N, K, tile.order,
        BN=tile.bn, BK=BK, STAGES=tile.stages, PIECES=tile.pieces, PROGRAMS=programs(q.device),
        PRECISE=precise, num_warps=4,
    )  # fmt: skip
    return y


def _empty_gemm_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    spans: Tensor,
    M: int,
    out_dtype: torch.dtype,
    precise: bool,
) -> Tensor:
    return a.new_empty((spans.shape[0] - 1, a.shape[0], b.shape[0]), dtype=out_dtype)


@operator(_empty_gemm_wgrad)
def gemm_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    spans: Tensor,
    M: int,
    out_dtype: torch.dtype,
    precise: bool,
) -> Tensor:
    """a [N, P], a_scale [E, N], b [K, P], b_scale [E, K] -> dw [E, N, K].

    M: rows before padding, for the choice of a tile. An expert without rows gets zeros.
    """
    dw = _empty_gemm_wgrad(a, a_scale, b, b_scale, spans, M, out_dtype, precise)
    E, N, K = dw.shape
    if M == 0:
        return dw.zero_()
    tile = wgrad_tile(M, N, K, E, dw.itemsize, precise)
    wgrad_kernel[(programs(a.device),)](
        _descriptor(a, ROWS, BK), _descriptor(b, tile.bn, BK), _descriptor(dw, ROWS, tile.bn // tile.pieces),
        dw, a_scale, b_scale, spans, E, N, K, tile.order,
        BN=tile.bn, BK=BK, STAGES=tile.stages, PIECES=tile.pieces, PROGRAMS=programs(a.device),
        PRECISE=precise, num_warps=4,
    )  # fmt: skip
    return dw
