"""Fake quantization: a tensor's FP8 values with power-of-two scales, as bfloat16, in one read and one write.

What emulated rules (rules/) multiply is q * scale, exact in bfloat16: q has at most 4 significant bits. So q need not
exist: rounding to FP8's grid is two float32 additions, the same on a GPU and in Triton's interpreter, for both formats.
`five`: E5M2 instead of E4M3. Every function is bit-equal to its twin in rules/plain.py.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import INTERPRETED, abs_bits
from converters.kernels.e4m3 import pow2_scale as e4m3_scale
from converters.kernels.rows import MAX_BLOCK
from converters.kernels.sizes import cdiv, power_of_2

TILE = 4096  # elements that a program holds, if a row is no longer than that
EXACT = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where torch rounds twice


@triton.jit
def on_grid(v, FIVE: tl.constexpr):
    """v float32 -> the nearest FP8 value, ties to even, saturating; nan stays nan, and -0 stays -0.

    The neighbours of v are `step` apart, 2**-3 (E5M2: 2**-2) of v's power of two, or of the smallest normal one's.
    Adding 2**23 * step pushes all below it out of the mantissa.
    """
    MAX: tl.constexpr = 57344.0 if FIVE else 448.0
    LEAST: tl.constexpr = (113 if FIVE else 121) << 23  # the bits of 2**-14, 2**-6
    UP: tl.constexpr = (21 if FIVE else 20) << 23
    a = tl.minimum(tl.abs(v), MAX, propagate_nan=tl.PropagateNan.ALL)
    power = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, LEAST)
    large = (power + UP).to(tl.float32, bitcast=True)
    bits = ((a + large) - large).to(tl.int32, bitcast=True)
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return (bits | sign).to(tl.float32, bitcast=True)


@triton.jit
def pow2_scale(bits, FIVE: tl.constexpr):
    """The scale of an amax and its reciprocal: 57344 is 2**7 * 448, so E5M2's is 2**-7 of E4M3's."""
    scale, inverse = e4m3_scale(bits)
    if FIVE:
        scale, inverse = scale * 0.0078125, inverse * 128.0
    return scale, inverse


@triton.jit
def widened(v):
    """-> float32. Triton's interpreter (3.9) gets bfloat16 subnormals wrong."""
    if INTERPRETED and v.dtype == tl.bfloat16:
        return (v.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def narrowed(v, dtype: tl.constexpr):
    """float32 -> a float dtype, to nearest even. Triton's interpreter (3.9) truncates to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        high = tl.where(v == v, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(dtype)


@triton.jit
def _load(x, row, inside, c, K):
    return widened(tl.load(x + row[:, None] + c[None, :], mask=inside[:, None] & (c < K)[None, :], other=0.0))


@triton.jit
def _rows_kernel(
    x, out, N, K, out_e, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, FIVE: tl.constexpr
):  # fmt: skip
    """WHOLE: a scale is of a whole row, also if that is longer than WIDTH; else of WIDTH of its columns."""
    e, n = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, source, target = n < N, (e * N + n) * K, e * out_e + n.to(tl.int64) * K
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    v = _load(x, source, inside, c, K)
    bits = tl.max(abs_bits(v), 1)
    if WHOLE:
        for c0 in range(WIDTH, K, WIDTH):
            bits = tl.maximum(bits, tl.max(abs_bits(_load(x, source, inside, c0 + c, K)), 1))
    scale, inverse = pow2_scale(bits, FIVE)
    values = on_grid(v * inverse[:, None], FIVE) * scale[:, None]
    tl.store(out + target[:, None] + c[None, :], narrowed(values, tl.bfloat16), mask=inside[:, None] & (c < K)[None, :])
    if WHOLE:
        for c0 in range(WIDTH, K, WIDTH):
            w = _load(x, source, inside, c0 + c, K)
            values = on_grid(w * inverse[:, None], FIVE) * scale[:, None]
            to = out + target[:, None] + (c0 + c)[None, :]
            tl.store(to, narrowed(values, tl.bfloat16), mask=inside[:, None] & (c0 + c < K)[None, :])


def empty_joined(xs: Sequence[Tensor]) -> Tensor:
    """xs [E, N_i, K] -> bfloat16 [E, N, K], uninitialized."""
    return xs[0].new_empty((len(xs[0]), sum(x.shape[1] for x in xs), xs[0].shape[2]), dtype=torch.bfloat16)


def parts_of(xs: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Each x that has elements, contiguous, and the number of its first row among the joined ones."""
    ends = accumulate(x.shape[1] for x in xs)
    return [(x.contiguous(), end - x.shape[1]) for x, end in zip(xs, ends, strict=True) if x.numel()]


def fake_rows(xs: Sequence[Tensor], five: bool, width: int | None = None) -> Tensor:
    """xs [E, N_i, K], joined along N -> values [E, N, K] bfloat16 with one scale a row, or `width` columns of a row."""
    out = empty_joined(xs)
    for x, at in parts_of(xs):
        E, N, K = x.shape
        block = width or min(power_of_2(K), MAX_BLOCK)
        rows = max(TILE // block, 1)
        grid = (cdiv(N, rows), cdiv(K, width) if width else 1, E)
        _rows_kernel[grid](
            x, out[:, at:], N, K, out.stride(0), ROWS=rows, WIDTH=block, WHOLE=not width, FIVE=five,
            num_warps=4 if block <= TILE else 8, **EXACT,
        )  # fmt: skip
    return out
