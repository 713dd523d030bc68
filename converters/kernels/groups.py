"""Where each expert's rows lie, as tables on the device: every kernel reads them, the host never knows a group's size.

spans  int32 [E + 1, 4]   begin row, end row, first tile, tiles.   Row E is the rows of nobody, past offs[-1].
tiles  int32 [T, 4]       expert, first row, end row of the group, 1 (0 for rows of nobody).   T = M // 128 + E + 1.

A tile is 128 rows of one group. Tile t is also the padded column 128 * t of the wgrad layout (cols.py), so one table
serves the GEMMs over rows and those over a group. Entries past the last tile are not written and not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128  # rows; also the contraction step of the weight gradient, so padding a group to it costs no extra step


def max_tiles(M: int, E: int) -> int:
    """An upper bound of the experts' tiles that needs no group size: each group ends in at most one partial tile."""
    return M // TILE + E


@triton.jit
def _tables_kernel(offs, spans, tiles, M, E, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    e = tl.program_id(0)
    i = tl.arange(0, EXPERTS)
    ends = tl.where(i < E, tl.load(offs + i, mask=i < E, other=0), M)
    begins = tl.load(offs + i - 1, mask=(i > 0) & (i <= E), other=0)
    ends = tl.minimum(ends, M)
    begins = tl.minimum(begins, M)
    counts = tl.where(i <= E, (ends - begins + TILE - 1) // TILE, 0)
    begin = tl.sum(tl.where(i == e, begins, 0), 0)
    end = tl.sum(tl.where(i == e, ends, 0), 0)
    first = tl.sum(tl.where(i < e, counts, 0), 0)
    count = tl.sum(tl.where(i == e, counts, 0), 0)
    tl.store(spans + e * 4, begin)
    tl.store(spans + e * 4 + 1, end)
    tl.store(spans + e * 4 + 2, first)
    tl.store(spans + e * 4 + 3, count)
    for t0 in range(0, count, 128):
        t = t0 + tl.arange(0, 128)
        to = tiles + (first + t) * 4
        inside = t < count
        tl.store(to, tl.minimum(e, E - 1), mask=inside)
        tl.store(to + 1, begin + t * TILE, mask=inside)
        tl.store(to + 2, end, mask=inside)
        tl.store(to + 3, (e < E).to(tl.int32), mask=inside)


@torch.library.custom_op("titan_moe_fp8::group_tables", mutates_args=())
def group_tables(offs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    """offs int32 [E], ends of the groups in M rows -> spans [E + 1, 4], tiles [M // 128 + E + 1, 4]."""
    E = offs.numel()
    spans, tiles = _empty_tables(offs, M)
    _tables_kernel[(E + 1,)](offs, spans, tiles, M, E, EXPERTS=triton.next_power_of_2(E + 1), TILE=TILE)
    return spans, tiles


@group_tables.register_fake
def _empty_tables(offs: Tensor, M: int) -> tuple[Tensor, Tensor]:
    E = offs.numel()
    return offs.new_empty((E + 1, 4)), offs.new_empty((max_tiles(M, E) + 1, 4))
