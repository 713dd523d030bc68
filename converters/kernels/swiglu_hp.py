"""SwiGLU and its gradient in float32, each in one pass, for what is quantized by emulated rules (rules/).

The same operations in the same order as in `backends/reference.py`, none of them fused with another, exp and division
as torch's kernels have them: not the approximations of swiglu.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from converters.kernels.e4m3 import INTERPRETED
from converters.kernels.fake import EXACT
from converters.kernels.sizes import cdiv

TILE = {"ROWS": 4, "COLS": 512, "num_warps": 4}


@triton.jit
def _exp(v):
    return tl.exp(v) if INTERPRETED else libdevice.exp(v)


@triton.jit
def _tile(M, H, ROWS: tl.constexpr, COLS: tl.constexpr):
    m, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (m < M)[:, None] & (c < H)[None, :]
    single = m.to(tl.int64)[:, None] * H + c[None, :]
    return inside, single, single + m.to(tl.int64)[:, None] * H  # in [M, H]; in [M, 2H], left half


@triton.jit
def _swiglu_kernel(y13, h, M, H, ROWS: tl.constexpr, COLS: tl.constexpr):
    inside, single, double = _tile(M, H, ROWS, COLS)
    a = tl.load(y13 + double, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y13 + double + H, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + single, tl.div_rn(a, 1.0 + _exp(-a)) * b, mask=inside)


@triton.jit
def _dswiglu_kernel(dh, y13, dy, M, H, ROWS: tl.constexpr, COLS: tl.constexpr):
    inside, single, double = _tile(M, H, ROWS, COLS)
    g = tl.load(dh + single, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(y13 + double, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(y13 + double + H, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + _exp(-a))
    tl.store(dy + double, g * b * sigmoid * (1.0 + a * (1.0 - sigmoid)), mask=inside)
    tl.store(dy + double + H, g * a * sigmoid, mask=inside)


def _grid(M: int, H: int) -> tuple[int, int]:
    return cdiv(M, TILE["ROWS"]), cdiv(H, TILE["COLS"])


def swiglu(y13: Tensor) -> Tensor:
    """y13 [M, 2H] -> silu(left) * right, float32 [M, H]."""
    y13, (M, H) = y13.contiguous(), (y13.shape[0], y13.shape[1] // 2)
    h = y13.new_empty((M, H), dtype=torch.float32)
    if M:
        _swiglu_kernel[_grid(M, H)](y13, h, M, H, **TILE, **EXACT)
    return h


def dswiglu(dh: Tensor, y13: Tensor) -> Tensor:
    """dh [M, H], y13 [M, 2H] -> gradient of `swiglu`, float32 [M, 2H]."""
    dh, y13, (M, H) = dh.contiguous(), y13.contiguous(), dh.shape
    dy = y13.new_empty(y13.shape, dtype=torch.float32)
    if M:
        _dswiglu_kernel[_grid(M, H)](dh, y13, dy, M, H, **TILE, **EXACT)
    return dy
