"""The grouped GEMM with the rows grouped: forward and input gradient. How it works: gemm.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from converters.kernels.gemm import (
    ROWS,
    WGS,
    advance,
    async_load,
    emit,
    emit_zeros,
    finish,
    make_ring,
    place,
    proceed,
    skip,
    start,
)


@gluon.jit
def _rows_tile(t, tiles, down, across, order):
    """Expert, first row, end of the group, 1 unless the rows are nobody's; and the tile's place across."""
    i, j = place(gl.minimum(t, down * across - 1), down, across, order)
    at = tiles + i * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), j


@gluon.jit
def _load_rows(xd, wd, ring, spans, tiles, E, N, K, order, PROGRAMS: gl.constexpr):
    a_bufs, b_bufs, full, empty = ring
    STAGES: gl.constexpr = b_bufs.shape[0]
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    down = gl.load(spans + E * 4 + 2)
    across = gl.cdiv(N, BN)
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), down * across, PROGRAMS):
        e, row, end, live, j = _rows_tile(t, tiles, down, across, order)
        for k in range(live * gl.cdiv(K, BK)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            for wg in gl.static_range(WGS):  # one of these: the bytes of as many operand boxes as the group fills
                last = (row + wg * ROWS < end) & ((wg + 1 == WGS) | (row + (wg + 1) * ROWS >= end))
                mbarrier.expect(bar, ((wg + 1) * ROWS + BN) * BK, pred=last)
            async_load(wd, [e * N + j * BN, k * BK], bar, b_bufs.index(stage))
            for wg in gl.static_range(WGS):
                first = row + wg * ROWS
                async_load(xd, [first, k * BK], bar, a_bufs.index(stage * WGS + wg), pred=first < end)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _compute_rows(work, WG: gl.constexpr, PROGRAMS: gl.constexpr, PRECISE: gl.constexpr):
    yd, y, row_scale, w_scale, out, ring, spans, tiles, E, N, K, order = work
    BN: gl.constexpr = ring[1].shape[1]
    BK: gl.constexpr = ring[1].shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    down = gl.load(spans + E * 4 + 2)
    across = gl.cdiv(N, BN)
    stage = 0
    phase = 0
    e, row, end, live, j = _rows_tile(gl.program_id(0), tiles, down, across, order)
    for t in range(gl.program_id(0), down * across, PROGRAMS):
        row += WG * ROWS
        steps = live * gl.cdiv(K, BK)
        first, left, column = row, end - row, j * BN
        if row >= end:
            stage, phase = skip(ring, steps, stage, phase)
            e, row, end, live, j = _rows_tile(t + PROGRAMS, tiles, down, across, order)
        elif steps > 0:
            acc, stage, phase = start(ring, stage, phase, WG, layout, PRECISE)
            r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            scales = gl.load(row_scale + first + r, mask=r < left, other=0.0)
            w = gl.load(w_scale + e)
            e, row, end, live, j = _rows_tile(t + PROGRAMS, tiles, down, across, order)
            acc, stage, phase = proceed(acc, ring, steps, stage, phase, WG, PRECISE)
            acc = finish(acc, ring, stage, PRECISE)
            emit(acc, (yd, y, out.index(WG)), scales, w, first, column, left, N)
        else:
            e, row, end, live, j = _rows_tile(t + PROGRAMS, tiles, down, across, order)
            emit_zeros(y, first, column, left, N, BN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "order"])
def rows_kernel(
    xd, wd, yd, y, row_scale, w_scale, spans, tiles, E, N, K, order,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    PROGRAMS: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    """y[M, N] = (x[M, K] * row_scale) @ (w[e][N, K] * w_scale[e])^T for the rows of each expert e."""
    ring = make_ring(xd.dtype, BN, BK, STAGES)
    out = gl.allocate_shared_memory(yd.dtype, [WGS, ROWS, BN // PIECES], yd.layout)
    work = (yd, y, row_scale, w_scale, out, ring, spans, tiles, E, N, K, order)
    gl.warp_specialize(
        [
            (_compute_rows, (work, 0, PROGRAMS, PRECISE)),
            (_compute_rows, (work, 1, PROGRAMS, PRECISE)),
            (_load_rows, (xd, wd, ring, spans, tiles, E, N, K, order, PROGRAMS)),
        ],
        [4, 1],
        [232, 40],  # registers a thread; the first partition gets what is left of 168 * 384, 232
    )
