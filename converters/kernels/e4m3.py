"""E4M3 and its power-of-two scales inside a kernel, exact: exponent arithmetic on the bits of an amax, no log2.

The scale rule is that of `backends/reference.py`: the smallest power of two that brings the amax to 448 or below, amax
floor 1e-30, nan for an amax that is inf or nan. An amax travels as the int32 bits of a non-negative float32: they order
as the floats do, nan is above inf is above every number, so an integer maximum keeps nan and needs no float atomics.
"""

import triton
import triton.language as tl

AMAX_FLOOR_BITS = 0x0DA24260  # float32 1e-30
FLOOR_BITS = tl.constexpr(AMAX_FLOOR_BITS)
NAN_BITS = tl.constexpr(0x7FC00000)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run in numpy, on a CPU
PACK_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def _code(v):
    """The byte of `to_e4m3`, put together from bits, as int32."""
    bits = abs_bits(v)
    a = tl.minimum(bits, 0x43E00000)  # 448
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((a.to(tl.float32, bitcast=True) * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
    code = tl.where(a < 0x3C800000, subnormal, normal)  # 2**-6, the smallest normal
    return tl.where(bits > 0x7F800000, 0x7F, code) | ((v.to(tl.int32, bitcast=True) >> 31) & 1) << 7


@triton.jit
def to_e4m3(v):
    """float32 -> E4M3, round to nearest even, saturating at 448; nan stays nan. One instruction for two elements.

    Not `.to(tl.float8e4nv)`: with Triton 3.6 it gave float32 weights other bytes than torch's cast, and Triton's
    interpreter truncates and turns nan into 384 (3.9), so there the code is put together from bits.
    """
    if not INTERPRETED:
        codes = tl.inline_asm_elementwise(PACK_E4M3, "=r,f,f,f,f", [v], dtype=tl.int8, is_pure=True, pack=4)
        return codes.to(tl.float8e4nv, bitcast=True)
    return _code(v).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def pack_e4m3(a, b, c, d):
    """Four float32 -> four E4M3 in an int32, a lowest: four rows of a column become a word of a transposed row."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(PACK_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    return _code(a) | (_code(b) << 8) | (_code(c) << 16) | (_code(d) << 24)


@triton.jit
def abs_bits(v):
    """|v| of a float32 as ordered int32."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pow2_scale(amax_bits):
    """The scale of an amax, and its exact reciprocal: dividing instead of multiplying cost 2.5x in dSwiGLU.

    448 = 1.75 * 2**8: the scale of 1.m * 2**e is 2**(e - 8), doubled if 1.m > 1.75. Both stay normal float32.
    """
    bits = tl.maximum(amax_bits, FLOOR_BITS)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    finite = bits < 0x7F800000
    scale = tl.where(finite, exponent << 23, NAN_BITS).to(tl.float32, bitcast=True)
    inverse = tl.where(finite, (254 - exponent) << 23, NAN_BITS).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def reciprocal(scale):
    """1 / scale of a power of two, nan of nan."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, bits, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def raise_amax(amax, bits):
    """Atomic maximum that looks first: of ten thousand programs an expert, a handful still have something to add."""
    tl.atomic_max(amax, bits, mask=bits > tl.load(amax, cache_modifier=".cg"))
