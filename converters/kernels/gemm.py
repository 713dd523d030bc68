"""What the two persistent grouped GEMMs for Hopper share (gemm_rows.py, gemm_wgrad.py); in Gluon.

Both keep one program on every SM, and in it three partitions with their own instruction streams:

    load         1 warp    walks the tiles, fills a ring of STAGES shared-memory buffers with TMA
    compute 0    4 warps   wgmma 64 x BN on the upper half of each 128 x BN tile, then its epilogue
    compute 1    4 warps   the lower half

Group sizes are read from the tables of groups.py. A partition whose 64 rows lie outside the group loads and multiplies
nothing. Stores that would leave a group are masked, the others go through TMA. Operands are E4M3 with the contraction
contiguous (wgmma takes nothing else), K, N and padded columns multiples of 16 (TMA takes nothing else); anything beyond
a tensor's edge is read as zero.

What bounds them is power. At its 700 W limit an H200 lowers the clock until the work fits: 1425 MHz of 1980 for 8192
rows an expert, 1320 for 1024, at 82 % of what wgmma can do at that clock. Energy is then time: without the reads of one
operand from L2 the same kernel is 13 % faster, with zeros for data 15 %. Tried and no faster: three compute partitions
on 192 x 256 tiles, which read 22 % less (a partition then has registers for wgmma 64 x 128 only); a ring of four stages
with the store in two pieces is 3 % slower than three stages and one piece.
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

ROWS = gl.constexpr(64)  # of a tile, for one compute partition: the M of wgmma
WGS = gl.constexpr(2)  # compute partitions, a warpgroup each

# Scales are powers of two, so scaling in bfloat16 is exact; two elements an instruction instead of one in float32.
SCALE_TO_BF16 = gl.constexpr("""{
    .reg .b32 t;
    cvt.rn.bf16x2.f32 t, $2, $1;
    mul.rn.bf16x2 t, t, $3;
    mul.rn.bf16x2 $0, t, $4;
}""")


@gluon.jit
def place(t, down, across, order):
    """Tile t of a grid down x across, walked in bands of `order` rows so that the operands of a wave stay in L2."""
    band = t // (order * across)
    first = band * order
    size = gl.minimum(down - first, order)
    u = t - first * across
    j = u // size
    return first + u - j * size, j


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """One stage on in the ring."""
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage before this one. Not a variable: `previous = stage` in a loop keeps its first value (Triton 3.6)."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def multiply(ring, steps, stage, phase, WG: gl.constexpr, layout: gl.constexpr, PRECISE: gl.constexpr):
    """64 rows of a tile over all steps of their contraction; the last product is left in flight, for `finish`."""
    a_bufs, b_bufs, full, empty = ring
    STAGES: gl.constexpr = b_bufs.shape[0]
    BN: gl.constexpr = b_bufs.shape[1]
    acc = gl.zeros((ROWS, BN), gl.float32, layout)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a = a_bufs.index(stage * WGS + WG)
        b = b_bufs.index(stage).permute((1, 0))
        if PRECISE:  # the tensor core keeps about 14 bits of a sum: add every 128 products in float32
            zero = gl.zeros((ROWS, BN), gl.float32, layout)
            acc += warpgroup_mma(a, b, zero, use_acc=False)
            mbarrier.arrive(empty.index(stage))
        else:
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def finish(acc, ring, steps, stage, PRECISE: gl.constexpr):
    """Waits for the last product of `multiply`."""
    STAGES: gl.constexpr = ring[1].shape[0]
    if not PRECISE:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring[3].index(before(stage, STAGES)), pred=steps > 0)
    return acc


@gluon.jit
def skip(ring, steps, stage, phase):
    """These 64 rows are outside the group: hand the buffers back."""
    STAGES: gl.constexpr = ring[1].shape[0]
    for _ in range(steps):
        mbarrier.wait(ring[2].index(stage), phase)
        mbarrier.arrive(ring[3].index(stage))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def touch(scale, size):
    """Starts to bring the first `size` scales, 128 at most, into L1; nobody waits for them here."""
    i = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = scale + gl.minimum(i, size - 1)
    gl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _scaled(acc, row_scale, column_scale, dtype: gl.constexpr):
    """acc * row_scale * column_scale, in `dtype`; the scales broadcast to acc."""
    if dtype == gl.bfloat16:
        a, _ = gl.broadcast(row_scale.to(gl.bfloat16), acc)
        b, _ = gl.broadcast(column_scale.to(gl.bfloat16), acc)
        return gl.inline_asm_elementwise(
            SCALE_TO_BF16, "=r,f,f,r,r", [acc, a, b], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return (acc * row_scale.to(gl.float32) * column_scale.to(gl.float32)).to(dtype)


@gluon.jit
def _emit(acc, to, row_scale, column_scale, row, column, rows_left, width, live, COLUMNS: gl.constexpr):
    """Scales acc and stores it to rows row .. row + rows_left, at most its own, of `to`: row-major, `width` wide.

    to: descriptor, pointer, shared buffer. column_scale: one each (COLUMNS), or one for all. live: 0 makes zeros.
    """
    desc, base, out = to
    layout: gl.constexpr = acc.type.layout
    r = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    c = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    a = gl.expand_dims(gl.load(row_scale + r, mask=(r < rows_left) & (live > 0), other=0.0), 1)
    if COLUMNS:
        b = gl.expand_dims(gl.load(column_scale + c, mask=(c < width) & (live > 0), other=0.0), 0)
    else:
        b = gl.load(column_scale)
    tile = _scaled(acc, a, b, out.dtype)
    if rows_left >= acc.shape[0]:
        tma.store_wait(0)  # the buffer's last store has been read
        out.store(tile)
        fence_async_shared()
        async_store(desc, [row, column], out)
    else:
        at = base + gl.expand_dims((row + r).to(gl.int64) * width, 1) + gl.expand_dims(c, 0)
        gl.store(at, tile, mask=gl.expand_dims(r < rows_left, 1) & gl.expand_dims(c < width, 0))


@gluon.jit
def emit_all(acc, to, row_scale, column_scale, row, column, rows_left, width, live, COLUMNS: gl.constexpr):
    """`_emit`, in two pieces if the shared buffer is half as wide as acc."""
    PIECE: gl.constexpr = to[2].shape[1]
    if acc.shape[1] == PIECE:
        _emit(acc, to, row_scale, column_scale, row, column, rows_left, width, live, COLUMNS)
    else:
        left, right = acc.reshape((acc.shape[0], 2, PIECE)).permute((0, 2, 1)).split()
        _emit(left, to, row_scale, column_scale, row, column, rows_left, width, live, COLUMNS)
        _emit(right, to, row_scale, column_scale, row, column + PIECE, rows_left, width, live, COLUMNS)


@gluon.jit
def make_ring(dtype: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Buffers of both operands and their barriers: `full` when TMA has written one, `empty` when all have read it."""
    operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES * WGS, ROWS, BK], operand)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], operand)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    return a_bufs, b_bufs, full, empty
