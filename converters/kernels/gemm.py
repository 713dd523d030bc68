"""The two persistent grouped GEMMs, for Hopper, in Gluon: rows grouped (forward, dgrad) and contraction grouped (wgrad).

Both keep one program on every SM, and in it three partitions with their own instruction streams:

    load         1 warp    walks the tiles, fills a ring of STAGES shared-memory buffers with TMA
    compute 0    4 warps   wgmma 64 x BN on the upper half of each 128 x BN tile, then its epilogue
    compute 1    4 warps   the lower half; the halves drift apart, so one multiplies while the other stores

Group sizes are read from the tables of groups.py. A tile with 64 rows or fewer costs half: only its upper half is loaded
and multiplied. Stores that would leave a group are masked, the others go through TMA. Operands are E4M3 with the
contraction contiguous (wgmma takes nothing else), K, N and padded columns multiples of 16 (TMA takes nothing else);
anything beyond a tensor's edge is read as zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# renamed between Triton 3.6 (torch 2.11) and 3.9
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _place(t, down, across, order):
    """Tile t of a grid down x across, walked in bands of `order` rows so that the operands of a wave stay in L2."""
    width = order * across
    first = (t // width) * order
    size = gl.minimum(down - first, order)
    return first + (t % width) % size, (t % width) // size


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """The stage before this one. Not carried in a variable: `previous = stage` in a loop keeps its first value (3.6)."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _multiply(a_bufs, b_bufs, full, empty, steps, stage, phase, WG: gl.constexpr, layout: gl.constexpr, PRECISE: gl.constexpr):
    """One half tile over all steps of its contraction. Returns the accumulator and where the ring stands."""
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF: gl.constexpr = a_bufs.shape[1] // 2
    BN: gl.constexpr = b_bufs.shape[1]
    acc = gl.zeros((HALF, BN), gl.float32, layout)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a = a_bufs.index(stage).slice(WG * HALF, HALF)
        b = b_bufs.index(stage).permute((1, 0))
        if PRECISE:  # the tensor core keeps about 14 bits of a sum: add every 128 products in float32
            zero = gl.zeros((HALF, BN), gl.float32, layout)
            acc += warpgroup_mma(a, b, zero, use_acc=False)
            mbarrier.arrive(empty.index(stage))
        else:
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=k > 0)
        stage, phase = _advance(stage, phase, STAGES)
    if not PRECISE:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=steps > 0)
    return acc, stage, phase


@gluon.jit
def _skip(full, empty, steps, stage, phase, STAGES: gl.constexpr):
    """The other half has no rows of the group: hand the buffers back."""
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage))
        stage, phase = _advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _store(desc, base, out, acc, row, column, rows_left, width, WG: gl.constexpr, layout: gl.constexpr):
    """acc to rows row .. row + rows_left of a row-major [.., width], at most the rows of acc."""
    BUFS: gl.constexpr = out.shape[0] // 2
    BN: gl.constexpr = acc.shape[1]
    if acc.shape[0] <= rows_left:
        left, right = acc.reshape((acc.shape[0], 2, BN // 2)).permute((0, 2, 1)).split()
        tma.store_wait(BUFS - 1)
        out.index(WG * BUFS).store(left.to(out.dtype))
        fence_async_shared()
        async_store(desc, [row, column], out.index(WG * BUFS))
        tma.store_wait(BUFS - 1)
        out.index(WG * BUFS + BUFS - 1).store(right.to(out.dtype))
        fence_async_shared()
        async_store(desc, [row, column + BN // 2], out.index(WG * BUFS + BUFS - 1))
    else:
        r = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
        c = column + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        to = base + gl.expand_dims((row + r).to(gl.int64) * width, 1) + gl.expand_dims(c, 0)
        gl.store(to, acc.to(out.dtype), mask=gl.expand_dims(r < rows_left, 1) & gl.expand_dims(c < width, 0))


@gluon.jit
def _load_rows(
    xd, wd, a_bufs, b_bufs, full, empty, spans, tiles, E, N, K, order, PROGRAMS: gl.constexpr
):
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF: gl.constexpr = a_bufs.shape[1] // 2
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    down = gl.load(spans + E * 4 + 2) + gl.load(spans + E * 4 + 3)
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), down * gl.cdiv(N, BN), PROGRAMS):
        i, j = _place(t, down, gl.cdiv(N, BN), order)
        e = gl.load(tiles + i * 4)
        row = gl.load(tiles + i * 4 + 1)
        both = row + HALF < gl.load(tiles + i * 4 + 2)
        for k in range(gl.load(tiles + i * 4 + 3) * gl.cdiv(K, BK)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (2 * HALF + BN) * BK, pred=both)
            mbarrier.expect(bar, (HALF + BN) * BK, pred=both == 0)
            async_load(wd, [e * N + j * BN, k * BK], bar, b_bufs.index(stage))
            async_load(xd, [row, k * BK], bar, a_bufs.index(stage).slice(0, HALF))
            async_load(xd, [row + HALF, k * BK], bar, a_bufs.index(stage).slice(HALF, HALF), pred=both)
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _compute_rows(
    yd, y, row_scale, w_scale, a_bufs, b_bufs, out, full, empty, spans, tiles, E, N, K, order,
    PROGRAMS: gl.constexpr, PRECISE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF: gl.constexpr = a_bufs.shape[1] // 2
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    down = gl.load(spans + E * 4 + 2) + gl.load(spans + E * 4 + 3)
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), down * gl.cdiv(N, BN), PROGRAMS):
        i, j = _place(t, down, gl.cdiv(N, BN), order)
        row = gl.load(tiles + i * 4 + 1) + WG * HALF
        end = gl.load(tiles + i * 4 + 2)
        steps = gl.load(tiles + i * 4 + 3) * gl.cdiv(K, BK)
        if row < end:
            acc, stage, phase = _multiply(a_bufs, b_bufs, full, empty, steps, stage, phase, WG, layout, PRECISE)
            r = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
            scale = gl.load(row_scale + r, mask=r < end, other=0.0) * gl.load(w_scale + gl.load(tiles + i * 4))
            # rows of nobody take no step; their own scale may be anything, so it must not reach the zeros
            acc = gl.where(steps > 0, acc * gl.expand_dims(scale, 1), 0.0)
            _store(yd, y, out, acc, row, j * BN, end - row, N, WG, layout)
        else:
            stage, phase = _skip(full, empty, steps, stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def _rings(a_dtype: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of both operands, and the barriers of a ring: `full` when TMA has written, `empty` when both halves read."""
    operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_bufs = gl.allocate_shared_memory(a_dtype, [STAGES, BM, BK], operand)
    b_bufs = gl.allocate_shared_memory(a_dtype, [STAGES, BN, BK], operand)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return a_bufs, b_bufs, full, empty


@gluon.jit(do_not_specialize=["E", "order"])
def rows_kernel(
    xd, wd, yd, y, row_scale, w_scale, spans, tiles, E, N, K, order,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, OUT_BUFS: gl.constexpr,
    PROGRAMS: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    """y[M, N] = (x[M, K] * row_scale) @ (w[e][N, K] * w_scale[e])^T for the rows of each expert e."""
    a_bufs, b_bufs, full, empty = _rings(xd.dtype, BM, BN, BK, STAGES)
    out = gl.allocate_shared_memory(yd.dtype, [2 * OUT_BUFS, BM // 2, BN // 2], yd.layout)
    gl.warp_specialize(
        [
            (_compute_rows, (yd, y, row_scale, w_scale, a_bufs, b_bufs, out, full, empty, spans, tiles, E, N, K, order, PROGRAMS, PRECISE, 0)),
            (_compute_rows, (yd, y, row_scale, w_scale, a_bufs, b_bufs, out, full, empty, spans, tiles, E, N, K, order, PROGRAMS, PRECISE, 1)),
            (_load_rows, (xd, wd, a_bufs, b_bufs, full, empty, spans, tiles, E, N, K, order, PROGRAMS)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _wgrad_tile(t, spans, NP, K, order, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Tile t -> expert, part, first row in the part, first column, first padded column of the operands, rows of the group."""
    down = gl.cdiv(NP, BM) * PARTS
    across = gl.cdiv(K, BN)
    e = t // (down * across)
    i, j = _place(t % (down * across), down, across, order)
    part = i // gl.cdiv(NP, BM)
    size = gl.load(spans + e * 4 + 1) - gl.load(spans + e * 4)
    return e, part, (i - part * gl.cdiv(NP, BM)) * BM, j * BN, gl.load(spans + e * 4 + 2) * 128, size


@gluon.jit
def _load_wgrad(
    ad, bd, a_bufs, b_bufs, full, empty, spans, E, NP, K, order, PARTS: gl.constexpr, PROGRAMS: gl.constexpr
):
    STAGES: gl.constexpr = a_bufs.shape[0]
    BM: gl.constexpr = a_bufs.shape[1]
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), E * PARTS * gl.cdiv(NP, BM) * gl.cdiv(K, BN), PROGRAMS):
        e, part, n, k, token, size = _wgrad_tile(t, spans, NP, K, order, PARTS, BM, BN)
        for i in range(gl.cdiv(size, BK)):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK)
            async_load(ad, [part * NP + n, token + i * BK], bar, a_bufs.index(stage))
            async_load(bd, [k, token + i * BK], bar, b_bufs.index(stage))
            stage, phase = _advance(stage, phase, STAGES)


@gluon.jit
def _compute_wgrad(
    od, dw, a_scale, b_scale, a_bufs, b_bufs, out, full, empty, spans, E, NP, K, order,
    PARTS: gl.constexpr, PROGRAMS: gl.constexpr, PRECISE: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = a_bufs.shape[0]
    BM: gl.constexpr = a_bufs.shape[1]
    BN: gl.constexpr = b_bufs.shape[1]
    BK: gl.constexpr = b_bufs.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), E * PARTS * gl.cdiv(NP, BM) * gl.cdiv(K, BN), PROGRAMS):
        e, part, n, k, _, size = _wgrad_tile(t, spans, NP, K, order, PARTS, BM, BN)
        n += WG * (BM // 2)
        steps = gl.cdiv(size, BK)
        if n < NP:
            acc, stage, phase = _multiply(a_bufs, b_bufs, full, empty, steps, stage, phase, WG, layout, PRECISE)
            rows = n + gl.arange(0, BM // 2, layout=gl.SliceLayout(1, layout))
            columns = k + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
            a_row = a_scale + e.to(gl.int64) * NP * PARTS + part * NP
            sa = gl.load(a_row + rows, mask=rows < NP, other=0.0)
            sb = gl.load(b_scale + e.to(gl.int64) * K + columns, mask=columns < K, other=0.0)
            acc = acc * gl.expand_dims(sa, 1) * gl.expand_dims(sb, 0)
            _store(od, dw, out, acc, (part * E + e) * NP + n, k, NP - n, K, WG, layout)
        else:
            stage, phase = _skip(full, empty, steps, stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E", "order"])
def wgrad_kernel(
    ad, bd, od, dw, a_scale, b_scale, spans, E, NP, K, order, PARTS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, OUT_BUFS: gl.constexpr,
    PROGRAMS: gl.constexpr, PRECISE: gl.constexpr,
):  # fmt: skip
    """dw[part, e][NP, K] = (a[part * NP .., tokens of e] * a_scale[e]) @ (b[K, tokens of e] * b_scale[e])^T."""
    a_bufs, b_bufs, full, empty = _rings(ad.dtype, BM, BN, BK, STAGES)
    out = gl.allocate_shared_memory(od.dtype, [2 * OUT_BUFS, BM // 2, BN // 2], od.layout)
    gl.warp_specialize(
        [
            (_compute_wgrad, (od, dw, a_scale, b_scale, a_bufs, b_bufs, out, full, empty, spans, E, NP, K, order, PARTS, PROGRAMS, PRECISE, 0)),
            (_compute_wgrad, (od, dw, a_scale, b_scale, a_bufs, b_bufs, out, full, empty, spans, E, NP, K, order, PARTS, PROGRAMS, PRECISE, 1)),
            (_load_wgrad, (ad, bd, a_bufs, b_bufs, full, empty, spans, E, NP, K, order, PARTS, PROGRAMS)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
