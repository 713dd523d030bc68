"""Where each expert's rows lie, as tables on the device: every kernel reads them, the host never knows a group's size.

spans   int32 [E + 1, 4]   begin row, end row, first tile, 0.   Row E: begin and end of the rows of nobody, past
                           offs[-1]; number of tiles, theirs included; number of chunks.
tiles   int32 [T, 4]       expert, first row, end row of the group, 1 (0 for rows of nobody): 128 rows of one group.
chunks  int32 [C, 4]       expert, first row, end row of the group, tile of its first row: 512 rows of one group, for
                           what walks down columns. None of the rows of nobody.

Tile t is also columns 128 * t and on of the wgrad layout (cols.py), so one table serves the GEMMs over rows and those
over a group. Entries past the last tile or chunk are not written and not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.ops import operator
from converters.kernels.sizes import power_of_2

TILE = 128  # rows; also the contraction step of the weight gradient, so padding a group to it costs no extra step
CHUNK = 512


def max_tiles(M: int, E: int) -> int:
    """An upper bound of the experts' tiles that needs no group size: each group ends in at most one partial tile."""
    return M // TILE + E


def max_chunks(M: int, E: int) -> int:
    """The same for chunks."""
    return M // CHUNK + E


@triton.jit
def _write(table, first, count, e, begin, end, step, last, last_step):
    """Rows first .. first + count of a table: e, begin and on by `step`, end, last and on by `last_step`."""
    for t0 in range(0, count, 128):
        t = t0 + tl.arange(0, 128)
        to = table + (first + t) * 4
        inside = t < count
        tl.store(to, e + 0 * t, mask=inside)
        tl.store(to + 1, begin + t * step, mask=inside)
        tl.store(to + 2, end + 0 * t, mask=inside)
        tl.store(to + 3, last + t * last_step, mask=inside)


@triton.jit
def _tables_kernel(
    offs, spans, tiles, chunks, M, E,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    i = tl.arange(0, EXPERTS)
    ends = tl.minimum(tl.where(i < E, tl.load(offs + i, mask=i < E, other=0), M), M)
    begins = tl.minimum(tl.load(offs + i - 1, mask=(i > 0) & (i <= E), other=0), M)
    sizes = tl.where(i <= E, ends - begins, 0)
    n_tiles = (sizes + TILE - 1) // TILE
    n_chunks = (sizes + CHUNK - 1) // CHUNK
    begin = tl.sum(tl.where(i == e, begins, 0), 0)
    size = tl.sum(tl.where(i == e, sizes, 0), 0)
    first_tile = tl.sum(tl.where(i < e, n_tiles, 0), 0)
    first_chunk = tl.sum(tl.where(i < e, n_chunks, 0), 0)
    live = (e < E).to(tl.int32)
    tl.store(spans + e * 4, begin)
    tl.store(spans + e * 4 + 1, begin + size)
    tl.store(spans + e * 4 + 2, tl.where(e < E, first_tile, first_tile + tl.cdiv(size, TILE)))
    tl.store(spans + e * 4 + 3, tl.where(e < E, 0, first_chunk))
    _write(tiles, first_tile, tl.cdiv(size, TILE), tl.minimum(e, E - 1), begin, begin + size, TILE, live, 0)
    _write(chunks, first_chunk, tl.cdiv(size, CHUNK) * live, e, begin, begin + size, CHUNK, first_tile, CHUNK // TILE)


def _empty_tables(offs: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor]:
    E = offs.numel()
    return offs.new_empty((E + 1, 4)), offs.new_empty((max_tiles(M, E) + 1, 4)), offs.new_empty((max_chunks(M, E), 4))


@operator(_empty_tables)
def group_tables(offs: Tensor, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """offs int32 [E], ends of the groups in M rows -> spans, tiles, chunks."""
    E = offs.numel()
    spans, tiles, chunks = _empty_tables(offs, M)
    _tables_kernel[(E + 1,)](
        offs, spans, tiles, chunks, M, E,
        EXPERTS=power_of_2(E + 1), TILE=TILE, CHUNK=CHUNK,
    )  # fmt: skip
    return spans, tiles, chunks
