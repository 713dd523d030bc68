"""The weight gradient from high precision operands, over uneven groups: torch's own wants aligned ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.ops import operator
from converters.kernels.sizes import cdiv

BN, BK, BT = 128, 128, 64  # output tile, tokens a step


@triton.jit
def _wgrad_hp_kernel(a, b, dw, spans, N, K, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    e = tl.program_id(1)
    n = (tl.program_id(0) // tl.cdiv(K, BK)) * BN + tl.arange(0, BN)
    k = (tl.program_id(0) % tl.cdiv(K, BK)) * BK + tl.arange(0, BK)
    begin, end = tl.load(spans + e * 4), tl.load(spans + e * 4 + 1)
    acc = tl.zeros((BN, BK), tl.float32)
    for t0 in range(begin, end, BT):
        t = t0 + tl.arange(0, BT)
        rows = (t < end)[:, None]
        at = tl.load(a + t[:, None].to(tl.int64) * N + n[None, :], mask=rows & (n < N)[None, :], other=0.0)
        bt = tl.load(b + t[:, None].to(tl.int64) * K + k[None, :], mask=rows & (k < K)[None, :], other=0.0)
        acc = tl.dot(tl.trans(at), bt, acc, input_precision="ieee")
    to = dw + (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(to, acc.to(dw.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def _empty_wgrad_hp(a: Tensor, b: Tensor, spans: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((spans.shape[0] - 1, a.shape[1], b.shape[1]), dtype=out_dtype)


@operator(_empty_wgrad_hp)
def gemm_wgrad_hp(a: Tensor, b: Tensor, spans: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [M, N], b [M, K] -> dw [E, N, K]: a_e^T @ b_e over the rows of each expert; none: zeros.

    In a's dtype: under autocast x is float32 where dY is bfloat16.
    """
    dw = _empty_wgrad_hp(a, b, spans, out_dtype)
    E, N, K = dw.shape
    grid = (cdiv(N, BN) * cdiv(K, BK), E)
    _wgrad_hp_kernel[grid](
        a.contiguous(), b.to(a.dtype).contiguous(), dw, spans, N, K, BN=BN, BK=BK, BT=BT, num_warps=8, num_stages=3
    )
    return dw
