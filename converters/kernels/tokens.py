"""Tokens to routed rows and back, each one pass over memory: what lies between a router and its experts.

    to_rows     a token is read once and written to its rows, weighted and quantized:   2 + top_k bytes an element
    to_tokens   a token's rows are read, weighted and summed, its base is added:        2 * top_k + 2 (+ 2) bytes

The backward of one is the other, and the gradient of a score is a dot product of what is in registers anyway. One
program a token, which finds its rows in `slots`: sums have one order, and no atomics are needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, pow2_scale, to_e4m3
from converters.kernels.ops import operator
from converters.kernels.rows import MAX_BLOCK
from converters.kernels.sizes import power_of_2
from parallel.expert_parallel import packed_width


@triton.jit
def _load(p, c, width):
    return tl.load(p + c, mask=c < width, other=0.0).to(tl.float32)


@triton.jit
def _to_rows_kernel(
    x, slots, scores, other, q, scale, dots, D, stride, q_stride, scale_stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, DOT: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    x += t * stride
    c = tl.arange(0, BLOCK)
    v = _load(x, c, D)
    bits = tl.max(abs_bits(v), 0)
    if not ONE_BLOCK:
        for c0 in range(BLOCK, D, BLOCK):
            bits = tl.maximum(bits, tl.max(abs_bits(_load(x, c0 + c, D)), 0))
    amax = bits.to(tl.float32, bitcast=True)
    weight = 1.0
    for j in tl.static_range(K):
        r = tl.load(slots + t * K + j).to(tl.int64)
        width = tl.where(r >= 0, D, 0)  # a row that is not here: nothing is read or written
        r = tl.maximum(r, 0)
        if WEIGHTED:
            weight = tl.load(scores + r, mask=width > 0, other=0.0)
        # Rounding is monotone, so the largest |v * weight| is the product of the largest: one reduction for all rows.
        s, inverse = pow2_scale(abs_bits(amax * weight))
        tl.store(scale + r * scale_stride, s, mask=width > 0)
        w = v * weight
        tl.store(q + r * q_stride + c, to_e4m3(w * inverse), mask=c < width)
        if DOT:
            dot = tl.sum(v * _load(other + r * D, c, width), 0)
        if not ONE_BLOCK:
            for c0 in range(BLOCK, D, BLOCK):
                w = _load(x, c0 + c, D)
                if DOT:
                    dot += tl.sum(w * _load(other + r * D, c0 + c, width), 0)
                w = w * weight
                tl.store(q + r * q_stride + c0 + c, to_e4m3(w * inverse), mask=c0 + c < width)
        if DOT:
            tl.store(dots + r, dot, mask=width > 0)


@triton.jit
def _to_tokens_kernel(
    rows, slots, scores, base, x, out, dots, D, base_stride, x_stride, K: tl.constexpr, KP: tl.constexpr,
    WEIGHTED: tl.constexpr, BASE: tl.constexpr, DOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    jj = tl.arange(0, KP)
    dot = tl.zeros([KP], dtype=tl.float32)
    for c0 in range(0, D, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK], dtype=tl.float32)
        if DOT:
            v = _load(x + t * x_stride, c, D)
        for j in tl.static_range(K):
            r = tl.load(slots + t * K + j).to(tl.int64)
            width = tl.where(r >= 0, D, 0)
            r = tl.maximum(r, 0)
            row = _load(rows + r * D, c, width)
            if DOT:
                dot = tl.where(jj == j, dot + tl.sum(row * v, 0), dot)
            if WEIGHTED:
                row *= tl.load(scores + r, mask=width > 0, other=0.0)
            acc += row
        if BASE:
            acc += _load(base + t * base_stride, c, D)
        tl.store(out + t * D + c, acc.to(out.dtype.element_ty), mask=c < D)
    if DOT:
        r = tl.load(slots + t * K + jj, mask=jj < K, other=-1).to(tl.int64)
        tl.store(dots + r, dot, mask=r >= 0)


def _launch(D: int) -> tuple[int, int]:
    """Columns a program holds, and its warps: up to 32 elements a thread."""
    block = min(power_of_2(max(D, 16)), MAX_BLOCK)
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_rows(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    q = x.new_empty((M, x.shape[1]), dtype=torch.float8_e4m3fn)
    dots = x.new_empty(0 if other is None else M, dtype=torch.float32)
    return q, x.new_empty(M, dtype=torch.float32), dots


def _fill_rows(
    x: Tensor, slots: Tensor, scores: Tensor | None, other: Tensor | None, q: Tensor, scale: Tensor, dots: Tensor
) -> None:
    """Writes q [M, D], scale [M] and dots, at any row stride."""
    x, (T, K), D = _aligned(x), slots.shape, x.shape[1]
    block, warps = _launch(D)
    if T and q.shape[0]:
        _to_rows_kernel[(T,)](
            x, slots, scores, None if other is None else other.contiguous(), q, scale, dots,
            D, x.stride(0), q.stride(0), scale.stride(0),
            K=K, WEIGHTED=scores is not None, DOT=other is not None, ONE_BLOCK=block >= D, BLOCK=block, num_warps=warps,
        )  # fmt: skip


@operator(_empty_rows)
def to_rows(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] -> q [M, D] E4M3, scale [M] of rows x[t] * scores[r], r = slots[t, :]; dots [M] = <x[t], other[r]>.

    slots: int32 [T, k], the rows of a token, each of M rows once; negative: a row that is not here. scores: float32
    [M], None: ones. other: [M, D], None: no dots (an empty tensor).
    """
    q, scale, dots = _empty_rows(x, slots, M, scores, other)
    _fill_rows(x, slots, scores, other, q, scale, dots)
    return q, scale, dots


def _empty_packed(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    packed = x.new_empty((M, packed_width((x.shape[1], 4))), dtype=torch.uint8)
    return packed, x.new_empty(0 if other is None else M, dtype=torch.float32)


@operator(_empty_packed)
def to_packed_rows(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`to_rows` with q and scale side by side as they travel: bytes [M, packed_width]; dots. D: a multiple of 4."""
    packed, dots = _empty_packed(x, slots, M, scores, other)
    D = x.shape[1]
    scale = packed.view(torch.float32)[:, D // 4]
    _fill_rows(x, slots, scores, other, packed.view(torch.float8_e4m3fn)[:, :D], scale, dots)
    return packed, dots


def _empty_tokens(
    rows: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    scores: Tensor | None = None,
    base: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    dots = rows.new_empty(0 if x is None else rows.shape[0], dtype=torch.float32)
    return rows.new_empty((slots.shape[0], rows.shape[1]), dtype=dtype), dots


@operator(_empty_tokens)
def to_tokens(
    rows: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    scores: Tensor | None = None,
    base: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rows [M, D] -> out [T, D] = base[t] + the sum of rows[r] * scores[r] over r = slots[t, :], rounded once to dtype.

    slots: int32 [T, k] as in `to_rows`. base: [T, D], None: zeros. x: [T, D], for dots [M] = <x[t], rows[r]>, None: no
    dots (an empty tensor).
    """
    out, dots = _empty_tokens(rows, slots, dtype, scores, base, x)
    (T, K), D = slots.shape, rows.shape[1]
    base, x = (None if t is None else _aligned(t) for t in (base, x))
    strides = [0 if t is None else t.stride(0) for t in (base, x)]
    block, warps = _launch(D)
    if T:
        _to_tokens_kernel[(T,)](
            rows.contiguous(), slots, scores, base, x, out, dots, D, *strides, K=K, KP=power_of_2(K),
            WEIGHTED=scores is not None, BASE=base is not None, DOT=x is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, dots
