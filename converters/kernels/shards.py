"""FSDP2's shards on their way into the all-gather: the amax of each slice, and the cast once all ranks know the scale.

A slice is an expert, or this rank's piece of one; contiguous, any float dtype. 4 bytes an element of float32 are read
for the amax, 4 read and 1 written for the cast: 6.9 ms a step for 3.2 G elements at 4.3 TB/s, where the same in torch
operators (abs, amax, multiply, clamp, cast) moved 33 bytes and took 35 ms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import reciprocal, to_e4m3
from converters.kernels.ops import operator
from converters.kernels.sizes import cdiv
from converters.kernels.weights import amax_kernel

CHUNK, BLOCK = 1 << 15, 4096


@triton.jit
def _shard_cast_kernel(w, q, scale, size, BLOCK: tl.constexpr):
    e = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(w + e * size + o, mask=o < size, other=0.0).to(tl.float32)
    tl.store(q + e * size + o, to_e4m3(v * reciprocal(tl.load(scale + e))), mask=o < size)


def _amax(w: Tensor) -> Tensor:
    return w.new_empty(w.shape[0], dtype=torch.float32)


@operator(_amax)
def amax_slices(w: Tensor) -> Tensor:
    """w [e, ...] -> float32 [e], the largest |value| of each slice; inf and nan stay."""
    bits = torch.zeros(w.shape[0], dtype=torch.int32, device=w.device)
    if w.numel():
        w = w.contiguous()
        size = w[0].numel()
        grid = (cdiv(size, CHUNK), w.shape[0])
        amax_kernel[grid](w, bits, size, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8)
    return bits.view(torch.float32)


def _cast(w: Tensor, scale: Tensor) -> Tensor:
    return w.new_empty(w.shape, dtype=torch.float8_e4m3fn)


@operator(_cast)
def cast_slices(w: Tensor, scale: Tensor) -> Tensor:
    """w [e, ...], scale float32 [e], powers of two -> E4M3 of w's shape."""
    q = _cast(w, scale)
    if w.numel():
        w = w.contiguous()
        size = w[0].numel()
        grid = (cdiv(size, BLOCK), w.shape[0])
        _shard_cast_kernel[grid](w, q, scale.contiguous(), size, BLOCK=BLOCK, num_warps=8)
    return q
