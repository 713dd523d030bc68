"""SwiGLU and its gradient, each fused with row quantization: the float32 result exists in registers only.

    h  = silu(a) * b                    y13 [M, 2H] = a | b      q [M, H]     5 bytes an element of h
    da = dh * b * sig * (1 + a * (1 - sig)),  db = dh * a * sig  q [M, 2H]    8 bytes an element of h

A row of dh in BF16 has as many bytes as its row of q, so q may be written over dh: a program has read all of its row
before it stores, since the scale depends on all of it.

One program holds one row, at most 32768 elements of h: H = 14336 (Mixtral) takes 16 warps without spilling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, pow2_scale, to_e4m3
from converters.kernels.ops import operator
from converters.kernels.sizes import power_of_2


@triton.jit
def _swiglu_kernel(y13, q, scale, H, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < H
    a = tl.load(y13 + r * 2 * H + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y13 + r * 2 * H + H + c, mask=inside, other=0.0).to(tl.float32)
    h = a * tl.sigmoid(a) * b
    s, inverse = pow2_scale(tl.max(abs_bits(h), 0))
    tl.store(q + r * H + c, to_e4m3(h * inverse), mask=inside)
    tl.store(scale + r, s)


@triton.jit
def _dswiglu_kernel(dh, y13, q, scale, H, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < H
    g = tl.load(dh + r * H + c, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(y13 + r * 2 * H + c, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y13 + r * 2 * H + H + c, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    db = g * a * sigmoid
    da = g * b * sigmoid * (1.0 + a * (1.0 - sigmoid))
    s, inverse = pow2_scale(tl.max(tl.maximum(abs_bits(da), abs_bits(db)), 0))
    tl.store(q + r * 2 * H + c, to_e4m3(da * inverse), mask=inside)
    tl.store(q + r * 2 * H + H + c, to_e4m3(db * inverse), mask=inside)
    tl.store(scale + r, s)


def _empty_swiglu(y13: Tensor) -> tuple[Tensor, Tensor]:
    M, H2 = y13.shape
    return y13.new_empty((M, H2 // 2), dtype=torch.float8_e4m3fn), y13.new_empty(M, dtype=torch.float32)


@operator(_empty_swiglu)
def swiglu_rows(y13: Tensor) -> tuple[Tensor, Tensor]:
    """y13 [M, 2H] -> q [M, H] E4M3, scale [M] float32: silu(left half) * right half in float32, quantized by row."""
    q, scale = _empty_swiglu(y13)
    y13, (M, H) = y13.contiguous(), q.shape
    if M:
        block = power_of_2(H)
        _swiglu_kernel[(M,)](y13, q, scale, H, BLOCK=block, num_warps=8 if block <= 8192 else 16)
    return q, scale


def _empty_dswiglu(dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
    return y13.new_empty(y13.shape, dtype=torch.float8_e4m3fn), y13.new_empty(y13.shape[0], dtype=torch.float32)


def _fill_dswiglu(dh: Tensor, y13: Tensor, q: Tensor, scale: Tensor) -> None:
    M, H = dh.shape
    if M:
        _dswiglu_kernel[(M,)](dh, y13, q, scale, H, BLOCK=power_of_2(H), num_warps=16)


@operator(_empty_dswiglu)
def dswiglu_rows(dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
    """dh [M, H], y13 [M, 2H] -> q [M, 2H] E4M3, scale [M]: gradient of SwiGLU, one scale over both halves of a row."""
    q, scale = _empty_dswiglu(dh, y13)
    _fill_dswiglu(dh.contiguous(), y13.contiguous(), q, scale)
    return q, scale


def _empty_scale(dh: Tensor, y13: Tensor) -> Tensor:
    return y13.new_empty(y13.shape[0], dtype=torch.float32)


@operator(_empty_scale, mutates_args=("dh",))
def dswiglu_rows_over(dh: Tensor, y13: Tensor) -> Tensor:
    """The same for a contiguous dh of two bytes an element, which becomes q [M, 2H] (`dh.view(float8_e4m3fn)`)."""
    scale = _empty_scale(dh, y13)
    _fill_dswiglu(dh, y13.contiguous(), dh.view(torch.float8_e4m3fn), scale)
    return scale
