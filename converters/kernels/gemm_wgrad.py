"""The grouped GEMM with the contraction grouped: weight gradients. How it works: gemm.py; its operands: cols.py."""

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
def _wgrad_tile(t, spans, E, N, K, order, BM: gl.constexpr, BN: gl.constexpr):
    """Expert, first row, first column, first padded column of the operands, rows of the group."""
    down = gl.cdiv(N, BM)
    across = gl.cdiv(K, BN)
    t = gl.minimum(t, E * down * across - 1)
    e = t // (down * across)
    i, j = place(t - e * down * across, down, across, order)
    size = gl.load(spans + e * 4 + 1) - gl.load(spans + e * 4)
    return e, i * BM, j * BN, gl.load(spans + e * 4 + 2) * 128, size


@gluon.jit
def _load_wgrad(ad, bd, ring, spans, E, N, K, order, PROGRAMS: gl.constexpr):
    a_bufs, b_bufs, full, empty = ring
    STAGES: gl.constexpr = b_bufs.shape[0]
    BM: gl.constexpr = WGS * ROWS
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), E * gl.cdiv(N, BM) * gl.cdiv(K, BN), PROGRAMS):
        _, n, k, token, size = _wgrad_tile(t, spans, E, N, K, order, BM, BN)
        for i in range(gl.cdiv(size, BK)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK)
            async_load(bd, [k, token + i * BK], bar, b_bufs.index(stage))
            for wg in gl.static_range(WGS):
                async_load(ad, [n + wg * ROWS, token + i * BK], bar, a_bufs.index(stage * WGS + wg))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _compute_wgrad(work, WG: gl.constexpr, PROGRAMS: gl.constexpr, PRECISE: gl.constexpr):
    od, dw, a_scale, b_scale, out, ring, spans, E, N, K, order = work
    BM: gl.constexpr = WGS * ROWS
    BN: gl.constexpr = ring[1].shape[1]
    BK: gl.constexpr = ring[1].shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    stage = 0
    phase = 0
    e, n, k, _, size = _wgrad_tile(gl.program_id(0), spans, E, N, K, order, BM, BN)
    for t in range(gl.program_id(0), E * gl.cdiv(N, BM) * gl.cdiv(K, BN), PROGRAMS):
        n += WG * ROWS
        steps = gl.cdiv(size, BK)
        first, left, column = e * N + n, N - n, k
        if n >= N:
            stage, phase = skip(ring, steps, stage, phase)
            e, n, k, _, size = _wgrad_tile(t + PROGRAMS, spans, E, N, K, order, BM, BN)
        elif steps > 0:
            acc, stage, phase = start(ring, stage, phase, WG, layout, PRECISE)
            r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            c = k + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            rows = gl.load(a_scale + e.to(gl.int64) * N + n + r, mask=r < left, other=0.0)
            columns = gl.load(b_scale + e.to(gl.int64) * K + c, mask=c < K, other=0.0)
            e, n, k, _, size = _wgrad_tile(t + PROGRAMS, spans, E, N, K, order, BM, BN)
            acc, stage, phase = proceed(acc, ring, steps, stage, phase, WG, PRECISE)
            acc = finish(acc, ring, stage, PRECISE)
            emit(acc, (od, dw, out.index(WG)), rows, columns, first, column, left, K)
        else:
            e, n, k, _, size = _wgrad_tile(t + PROGRAMS, spans, E, N, K, order, BM, BN)
            emit_zeros(dw, first, column, left, K, BN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "order"])
def wgrad_kernel(
    ad, bd, od, dw, a_scale, b_scale, spans, E, N, K, order,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    PROGRAMS: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    """dw[e][N, K] = (a[N, tokens of e] * a_scale[e]) @ (b[K, tokens of e] * b_scale[e])^T."""
    ring = make_ring(ad.dtype, BN, BK, STAGES)
    out = gl.allocate_shared_memory(od.dtype, [WGS, ROWS, BN // PIECES], od.layout)
    work = (od, dw, a_scale, b_scale, out, ring, spans, E, N, K, order)
    gl.warp_specialize(
        [
            (_compute_wgrad, (work, 0, PROGRAMS, PRECISE)),
            (_compute_wgrad, (work, 1, PROGRAMS, PRECISE)),
            (_load_wgrad, (ad, bd, ring, spans, E, N, K, order, PROGRAMS)),
        ],
        [4, 1],
        [232, 40],  # registers a thread; the first partition gets what is left of 168 * 384, 232
    )
