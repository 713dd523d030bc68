"""The wgrad layout: one scale an expert and column, transposed, each group padded to whole tiles.

The weight gradient contracts over tokens, and wgmma takes E4M3 operands only with the contraction contiguous: [M, D]
becomes [D, P], P = 128 * (M // 128 + E). Group e fills the columns of its tiles, 128 * spans[e, 2] and on; the rest of its
last tile is zeros; columns past the last tile are not written and not read.

A program owns a strip of columns of one group and reads it twice, the second time mostly from L2: no atomics, so no
buffer to clear. Bytes an element: 2 read, 1 written, against 2 that must move.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.groups import TILE, max_tiles
from converters.kernels.e4m3 import pow2_scale, to_e4m3


@triton.jit
def _load_tile(x, row_scale, r, end, c, D, SCALED: tl.constexpr):
    rows = r < end
    inside = rows[:, None] & (c < D)[None, :]
    v = tl.load(x + r[:, None].to(tl.int64) * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        v = v * tl.load(row_scale + r, mask=rows, other=0.0)[:, None]
    return v


@triton.jit
def _columns_kernel(
    x, row_scale, q, scale, spans, D, P, TILE: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr, SCALED: tl.constexpr
):
    e = tl.program_id(1)
    c = tl.program_id(0) * CB + tl.arange(0, CB)
    begin = tl.load(spans + e * 4)
    end = tl.load(spans + e * 4 + 1)
    column = tl.load(spans + e * 4 + 2) * TILE
    i = tl.arange(0, RB)
    steps = tl.cdiv(end - begin, RB)
    top = tl.zeros((RB, CB), tl.float32)
    for k in range(steps):
        v = _load_tile(x, row_scale, begin + k * RB + i, end, c, D, SCALED)
        top = tl.maximum(top, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
    s, inverse = pow2_scale(tl.max(top.to(tl.int32, bitcast=True), 0))
    tl.store(scale + e.to(tl.int64) * D + c, s, mask=c < D)
    to = q + c[:, None].to(tl.int64) * P + (column + i)[None, :]
    # k * RB, not a row counter from `begin`: the compiler must see that stores are aligned, or it makes them byte by byte
    for k in range(tl.cdiv(end - begin, TILE) * (TILE // RB)):
        v = _load_tile(x, row_scale, begin + k * RB + i, end, c, D, SCALED) * inverse[None, :]
        tl.store(to + k * RB, tl.trans(to_e4m3(v)), mask=(c < D)[:, None])


def _strip(D: int, E: int) -> tuple[int, int]:
    """Columns a program owns, and its warps: wide strips use whole sectors, but few groups need more programs."""
    return (64, 4) if E * D >= 64 * 512 else (32, 4)


@torch.library.custom_op("titan_moe_fp8::quantize_columns", mutates_args=())
def quantize_columns(x: Tensor, row_scale: Tensor | None, spans: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, D], E4M3 with row_scale [M], or any float dtype with None -> q [D, P] E4M3, scale [E, D] float32."""
    q, scale = _empty_columns(x, row_scale, spans)
    x, (E, D) = x.contiguous(), scale.shape
    width, warps = _strip(D, E)
    _columns_kernel[(triton.cdiv(D, width), E)](
        x, row_scale, q, scale, spans, D, q.shape[1], TILE=TILE, RB=TILE, CB=width, SCALED=row_scale is not None,
        num_warps=warps,
    )  # fmt: skip
    return q, scale


@quantize_columns.register_fake
def _empty_columns(x: Tensor, row_scale: Tensor | None, spans: Tensor) -> tuple[Tensor, Tensor]:
    (M, D), E = x.shape, spans.shape[0] - 1
    q = x.new_empty((D, TILE * max_tiles(M, E)), dtype=torch.float8_e4m3fn)
    return q, x.new_empty((E, D), dtype=torch.float32)
