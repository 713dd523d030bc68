"""Row quantization: one power-of-two scale a row, in one pass. Optionally the rows are gathered on the way.

A token permutation, its padding and its quantization are then one read and one write: 3 bytes an element instead of 7.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, pow2_scale, to_e4m3
from converters.kernels.ops import operator
from converters.kernels.sizes import power_of_2

MAX_BLOCK = 16384  # columns a program holds in registers; longer rows are read twice, the second time from L2


@triton.jit
def _load_row(x, row, width, c0, BLOCK: tl.constexpr):
    c = c0 + tl.arange(0, BLOCK)
    return tl.load(x + row + c, mask=c < width, other=0.0).to(tl.float32)


@triton.jit
def _rows_kernel(x, index, q, scale, D, stride, GATHER: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    source = tl.load(index + r).to(tl.int64) if GATHER else r
    width = tl.where(source >= 0, D, 0)
    row = source * stride
    v = _load_row(x, row, width, 0, BLOCK)
    bits = tl.max(abs_bits(v), 0)
    if not ONE_BLOCK:
        for c0 in range(BLOCK, D, BLOCK):
            bits = tl.maximum(bits, tl.max(abs_bits(_load_row(x, row, width, c0, BLOCK)), 0))
    s, inverse = pow2_scale(bits)
    tl.store(scale + r, s)
    c = tl.arange(0, BLOCK)
    tl.store(q + r * D + c, to_e4m3(v * inverse), mask=c < D)
    if not ONE_BLOCK:
        for c0 in range(BLOCK, D, BLOCK):
            w = _load_row(x, row, width, c0, BLOCK) * inverse
            tl.store(q + r * D + c0 + c, to_e4m3(w), mask=c0 + c < D)


def _empty_rows(x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    M = x.shape[0] if index is None else index.shape[0]
    return x.new_empty((M, x.shape[1]), dtype=torch.float8_e4m3fn), x.new_empty(M, dtype=torch.float32)


@operator(_empty_rows)
def quantize_rows(x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [R, D], any float dtype -> q [M, D] E4M3, scale [M] float32.

    index: int32 or int64 [M], the row of x each output row is; negative: a row of zeros. None: M = R, rows as they are.
    """
    q, scale = _empty_rows(x, index)
    x = x if x.stride(1) == 1 else x.contiguous()
    D = x.shape[1]
    block = min(power_of_2(max(D, 16)), MAX_BLOCK)
    if q.shape[0]:
        _rows_kernel[(q.shape[0],)](
            x, index, q, scale, D, x.stride(0), GATHER=index is not None, ONE_BLOCK=block >= D, BLOCK=block,
            num_warps=8 if block <= 8192 else 16,
        )  # fmt: skip
    return q, scale
