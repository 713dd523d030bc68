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
with the store in two or four pieces (3 % slower); the second partition half a tile late; stores straight from registers
(13 % slower in CUDA C++, though its sums alone took 15 % less). The same kernel in CUDA C++ with clusters of two that
multicast what they share, bit-equal: 0.98 to 1.03 of the time at 1024 and 4096 rows an expert, both kernels.
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
def start(ring, stage, phase, WG: gl.constexpr, layout: gl.constexpr, PRECISE: gl.constexpr):
    """64 rows of a tile over the first step of their contraction, left in flight: the product is the accumulator.

    What the tile's end needs is read behind it, while the whole contraction hides the latency: ptxas moves no load up
    from behind the last wait. 36 loads and the next tile's divisions stood there: 650 instructions from a tile's last
    product to the next one's first, now 284 (bfloat16 weight gradient, Triton 3.6).
    """
    a_bufs, b_bufs, full, empty = ring
    STAGES: gl.constexpr = b_bufs.shape[0]
    BN: gl.constexpr = b_bufs.shape[1]
    mbarrier.wait(full.index(stage), phase)
    a = a_bufs.index(stage * WGS + WG)
    b = b_bufs.index(stage).permute((1, 0))
    zero = gl.zeros((ROWS, BN), gl.float32, layout)
    if PRECISE:
        acc = warpgroup_mma(a, b, zero, use_acc=False)
        mbarrier.arrive(empty.index(stage))
    else:
        acc = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))  # waits for nothing: one is in flight
    stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def proceed(acc, ring, steps, stage, phase, WG: gl.constexpr, PRECISE: gl.constexpr):
    """The other steps; the last product is left in flight, for `finish`."""
    a_bufs, b_bufs, full, empty = ring
    STAGES: gl.constexpr = b_bufs.shape[0]
    BN: gl.constexpr = b_bufs.shape[1]
    layout: gl.constexpr = acc.type.layout
    for _ in range(1, steps):
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
            mbarrier.arrive(empty.index(before(stage, STAGES)))
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def finish(acc, ring, stage, PRECISE: gl.constexpr):
    """Waits for the last product."""
    STAGES: gl.constexpr = ring[1].shape[0]
    if not PRECISE:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring[3].index(before(stage, STAGES)))
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
def _scaled(acc, a, b, dtype: gl.constexpr):
    """acc * a * b in `dtype`; a [rows, 1], b [1, columns] or one number."""
    if dtype == gl.bfloat16:
        a, _ = gl.broadcast(a.to(gl.bfloat16), acc)
        b, _ = gl.broadcast(b.to(gl.bfloat16), acc)
        return gl.inline_asm_elementwise(
            SCALE_TO_BF16, "=r,f,f,r,r", [acc, a, b], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    return (acc * a.to(gl.float32) * b.to(gl.float32)).to(dtype)


@gluon.jit
def _pointers(base, row, column, rows_left, width, shape: gl.constexpr, layout: gl.constexpr):
    """Of shape from (row, column) on, and which of them are inside."""
    r = gl.arange(0, shape[0], layout=gl.SliceLayout(1, layout))
    c = column + gl.arange(0, shape[1], layout=gl.SliceLayout(0, layout))
    at = base + gl.expand_dims((row + r).to(gl.int64) * width, 1) + gl.expand_dims(c, 0)
    return at, gl.expand_dims(r < rows_left, 1) & gl.expand_dims(c < width, 0)


@gluon.jit
def _emit(acc, to, row_scale, column_scale, row, column, rows_left, width):
    layout: gl.constexpr = acc.type.layout
    desc, base, out = to
    a = gl.expand_dims(gl.convert_layout(row_scale, gl.SliceLayout(1, layout), assert_trivial=True), 1)
    b = column_scale
    if len(b.shape) == 1:
        b = gl.expand_dims(gl.convert_layout(b, gl.SliceLayout(0, layout), assert_trivial=True), 0)
    tile = _scaled(acc, a, b, out.dtype)
    if rows_left >= acc.shape[0]:
        tma.store_wait(0)  # the buffer's last store has been read
        out.store(tile)
        fence_async_shared()
        async_store(desc, [row, column], out)
    else:
        at, inside = _pointers(base, row, column, rows_left, width, acc.shape, layout)
        gl.store(at, tile, mask=inside)


@gluon.jit
def emit(acc, to, row_scale, column_scale, row, column, rows_left, width):
    """Scales acc and stores it to rows row .. row + rows_left, at most its own, of `to`: row-major, `width` wide.

    to: descriptor, pointer, shared buffer; a buffer half as wide as acc is used twice. column_scale: one each, or one.
    """
    PIECE: gl.constexpr = to[2].shape[1]
    if acc.shape[1] == PIECE:
        _emit(acc, to, row_scale, column_scale, row, column, rows_left, width)
    else:
        left, right = acc.reshape((acc.shape[0], 2, PIECE)).permute((0, 2, 1)).split()
        b0, b1 = column_scale, column_scale
        if len(column_scale.shape) == 1:
            b0, b1 = column_scale.reshape((2, PIECE)).permute((1, 0)).split()
        _emit(left, to, row_scale, b0, row, column, rows_left, width)
        _emit(right, to, row_scale, b1, row, column + PIECE, rows_left, width)


@gluon.jit
def emit_zeros(base, row, column, rows_left, width, BN: gl.constexpr):
    """The 64 x BN of a group without rows, in stores of 16 bytes: sharing `_emit`'s, LLVM moves 64 values a tile."""
    V: gl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, V], [1, 32], [4, 1], [1, 0])
    at, inside = _pointers(base, row, column, rows_left, width, (ROWS, BN), layout)
    gl.store(at, gl.zeros((ROWS, BN), base.dtype.element_ty, layout), mask=inside)


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
