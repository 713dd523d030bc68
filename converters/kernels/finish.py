"""What is done to products of emulated rules (rules/), in one pass: zeros for nobody, scales of whole tensors, dtype.

Bit-equal to the twins in rules/plain.py. Without a factor and for the dtype that a product has, only what becomes zero
is written, in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.fake import narrowed, widened
from converters.kernels.sizes import cdiv

TILE = {"ROWS": 16, "COLS": 256, "num_warps": 4}


@triton.jit
def _scaled(y, to_y, to_out, out, inside, live, factor, FACTOR: tl.constexpr):
    """Loads what is live, multiplies it, stores it; zeros elsewhere."""
    v = widened(tl.load(y + to_y, mask=inside & live, other=0.0))
    if FACTOR:
        v = tl.where(live, v * factor, 0.0)
    tl.store(out + to_out, narrowed(v, out.dtype.element_ty), mask=inside)


@triton.jit
def _rows_kernel(
    y, ids, factor, out, M, N, E,
    FACTOR: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    m, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    e = tl.load(ids + m, mask=m < M, other=E)
    inside, live = (m < M)[:, None] & (c < N)[None, :], (e < E)[:, None]
    to = m.to(tl.int64)[:, None] * N + c[None, :]
    if IN_PLACE:
        tl.store(out + to, tl.zeros((ROWS, COLS), out.dtype.element_ty), mask=inside & ~live)
    else:
        f = tl.load(factor + e, mask=e < E, other=0.0)[:, None] if FACTOR else 1.0
        _scaled(y, to, to, out, inside, live, f, FACTOR)


@triton.jit
def _weights_kernel(
    dw, offs, factor, out, N, K, E, part,
    FACTOR: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows of dw [E, N, K] go to out [N / part, E, part, K]."""
    e, n, c = tl.program_id(2), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS
    c += tl.arange(0, COLS)
    inside = (n < N)[:, None] & (c < K)[None, :]
    size = tl.load(offs + e) - tl.load(offs + e - 1, mask=e > 0, other=0)
    live = (size + tl.zeros((ROWS, 1), tl.int32)) > 0
    source = (e.to(tl.int64) * N + n)[:, None] * K + c[None, :]
    target = (((n // part).to(tl.int64) * E + e) * part + n % part)[:, None] * K + c[None, :]
    if IN_PLACE:
        tl.store(out + target, tl.zeros((ROWS, COLS), out.dtype.element_ty), mask=inside & ~live)
    else:
        f = tl.load(factor + e) if FACTOR else 1.0
        _scaled(dw, source, target, out, inside, live, f, FACTOR)


def _grid(N: int, K: int, E: int = 1) -> tuple[int, int, int]:
    return cdiv(N, TILE["ROWS"]), cdiv(K, TILE["COLS"]), E


def finish_rows(y: Tensor, ids: Tensor, experts: int, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [M, N] times factor [E] of each row's expert, as dtype; zeros where the expert, ids int32 [M], is none.

    y may be overwritten and returned. torch._grouped_mm fills up rows to 16 bytes: then it is copied first.
    """
    y = y.contiguous()
    in_place = factor is None and y.dtype == dtype
    out = y if in_place else torch.empty_like(y, dtype=dtype)
    if y.numel():
        modes = {"FACTOR": factor is not None, "IN_PLACE": in_place}
        _rows_kernel[_grid(*y.shape)](y, ids, factor, out, *y.shape, experts, **modes, **TILE)
    return out


def finish_weights(dw: Tensor, offs: Tensor, factor: Tensor | None, dtype: torch.dtype, parts: int) -> Tensor:
    """dw [E, N, K] times factor [E], as dtype; zeros for an expert without rows. parts 1: [E, N, K], and dw may be
    overwritten and returned; else [parts, E, N / parts, K].
    """
    dw, (E, N, K) = dw.contiguous(), dw.shape
    in_place = factor is None and dw.dtype == dtype and parts == 1
    out = dw if in_place else dw.new_empty((E, N, K) if parts == 1 else (parts, E, N // parts, K), dtype=dtype)
    if dw.numel():
        modes = {"FACTOR": factor is not None, "IN_PLACE": in_place}
        _weights_kernel[_grid(N, K, E)](dw, offs, factor, out, N, K, E, N // parts, **modes, **TILE)
    return out
