"""The wgrad layout: one scale an expert and column, transposed, each group padded to whole tiles.

The weight gradient contracts over tokens, and wgmma takes E4M3 operands only with the contraction contiguous: [M, D]
becomes [D, P], P = 128 * (M // 128 + E). Group e fills the columns of its tiles, 128 * spans[e, 2] and on; the rest of
its last tile is zeros; columns past the last tile are not written and not read.

Two launches over chunks of 512 rows: amax by atomics, then the cast. Bytes an element: 2 read, the second time from L2
where it fits, and 1 written, against 2 that must move. At that rate arithmetic counts: four rows are cast at once into
the four bytes of an int32 (`pack_e4m3`), so that what crosses shared memory is words, not bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, pack_e4m3, pow2_scale
from converters.kernels.groups import CHUNK, TILE, max_chunks, max_tiles
from converters.kernels.ops import operator
from converters.kernels.sizes import cdiv

AMAX = {"COLUMNS": 64, "num_warps": 4}  # columns of a program, and its warps: 128 take 10 % longer, 6 % in CAST (H200)
CAST = {"COLUMNS": 64, "num_warps": 4}


@triton.jit
def _load_quarter(x, row_scale, r, end, c, D, stride, SCALED: tl.constexpr):
    """Every fourth row of a tile: r [TILE / 4], c [columns] -> float32."""
    rows = r < end
    inside = rows[:, None] & (c < D)[None, :]
    v = tl.load(x + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        v = v * tl.load(row_scale + r, mask=rows, other=0.0)[:, None]
    return v


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax_kernel(
    x, row_scale, amax, spans, chunks, D, stride, E,
    TILE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1)
    if t < tl.load(spans + E * 4 + 3):
        e, begin, end = tl.load(chunks + t * 4), tl.load(chunks + t * 4 + 1), tl.load(chunks + t * 4 + 2)
        end = tl.minimum(end, begin + CHUNK)
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        top = tl.zeros((TILE // 4, COLUMNS), tl.float32)
        for r0 in range(begin, end, TILE):
            r = r0 + 4 * tl.arange(0, TILE // 4)
            v0 = _load_quarter(x, row_scale, r, end, c, D, stride, SCALED)
            v1 = _load_quarter(x, row_scale, r + 1, end, c, D, stride, SCALED)
            v2 = _load_quarter(x, row_scale, r + 2, end, c, D, stride, SCALED)
            v3 = _load_quarter(x, row_scale, r + 3, end, c, D, stride, SCALED)
            top = _larger(top, _larger(_larger(v0, v1), _larger(v2, v3)))
        tl.atomic_max(amax + e.to(tl.int64) * D + c, tl.max(abs_bits(top), 0), mask=c < D)


@triton.jit
def _cast_kernel(
    x, row_scale, amax, q, scale, spans, chunks, D, stride, P4, E,
    TILE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """q is int32 [D, P4], P4 = P / 4: a word is four rows of a column. Last chunk first: L2 still has it."""
    t = tl.load(spans + E * 4 + 3) - 1 - tl.program_id(1)
    if t >= 0:
        e, begin, end = tl.load(chunks + t * 4), tl.load(chunks + t * 4 + 1), tl.load(chunks + t * 4 + 2)
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        column = e.to(tl.int64) * D + c
        s, inverse = pow2_scale(tl.load(amax + column, mask=c < D, other=0))
        width = tl.where(begin == tl.load(spans + e * 4), D, 0)  # a group's first chunk writes the scales
        tl.store(scale + column, s.to(tl.bfloat16), mask=c < width)
        end = tl.minimum(end, begin + CHUNK)
        word = tl.arange(0, TILE // 4)
        to = q + c[:, None].to(tl.int64) * P4 + (tl.load(chunks + t * 4 + 3) * (TILE // 4) + word)[None, :]
        # k * TILE, not a row counter: the compiler must see that stores are aligned, or it makes them word by word
        for k in range(tl.cdiv(end - begin, TILE)):
            r = begin + k * TILE + 4 * word
            v0 = _load_quarter(x, row_scale, r, end, c, D, stride, SCALED) * inverse[None, :]
            v1 = _load_quarter(x, row_scale, r + 1, end, c, D, stride, SCALED) * inverse[None, :]
            v2 = _load_quarter(x, row_scale, r + 2, end, c, D, stride, SCALED) * inverse[None, :]
            v3 = _load_quarter(x, row_scale, r + 3, end, c, D, stride, SCALED) * inverse[None, :]
            tl.store(to + k * (TILE // 4), tl.trans(pack_e4m3(v0, v1, v2, v3)), mask=(c < D)[:, None])


def _empty_columns(x: Tensor, row_scale: Tensor | None, spans: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
    (M, D), E = x.shape, spans.shape[0] - 1
    q = x.new_empty((D, TILE * max_tiles(M, E)), dtype=torch.float8_e4m3fn)
    return q, x.new_empty((E, D), dtype=torch.bfloat16)


@operator(_empty_columns)
def quantize_columns(x: Tensor, row_scale: Tensor | None, spans: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, D], E4M3 with row_scale [M], or any float dtype with None -> q [D, P] E4M3, scale [E, D] bfloat16.

    x may be some columns of a wider tensor: its rows need not follow each other.
    A power of two is exact in bfloat16. The scales of an expert without rows are not written: nothing may read them.
    """
    q, scale = _empty_columns(x, row_scale, spans, chunks)
    x, (E, D), scaled = x if x.stride(1) == 1 else x.contiguous(), scale.shape, row_scale is not None
    amax = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
    sizes = {"TILE": TILE, "CHUNK": CHUNK, "SCALED": scaled}
    C, P4 = max_chunks(x.shape[0], E), q.shape[1] // 4
    grid = (cdiv(D, AMAX["COLUMNS"]), C)
    _amax_kernel[grid](x, row_scale, amax, spans, chunks, D, x.stride(0), E, **sizes, **AMAX)
    grid = (cdiv(D, CAST["COLUMNS"]), C)
    words = q.view(torch.int32)
    _cast_kernel[grid](x, row_scale, amax, words, scale, spans, chunks, D, x.stride(0), P4, E, **sizes, **CAST)
    return q, scale
