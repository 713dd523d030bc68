"""GEMMs of quantized operands in high precision: FP8's rounding without FP8's tensor cores.

On a GPU the values are multiplied as bfloat16, by torch._grouped_mm, which takes nothing else: exact products, float32
accumulation, and a result that is rounded to bfloat16 once before scales of whole tensors are applied. On a CPU they
are multiplied as float32, one group at a time. What is left to do with a product is `finish_rows` or `finish_weights`
(plain.py, fused.py).
"""

import torch
from torch import Tensor

from converters.group_ends import spans
from converters.rules.operand import Operand
from converters.rules.ragged import Ragged


def rows_times_weights(a: Operand, b: Operand, rows: Ragged, transposed: bool) -> Tensor:
    """The values of a [M, K] @ b[e]^T, b [E, N, K] (transposed: a [M, N] @ b[e]) for the rows of each expert: [M, N]
    ([M, K]), bfloat16 on a GPU, else float32. Rows of nobody hold anything.
    """
    dtype = product_dtype(rows.offs)
    x, w = a.values(dtype), b.values(dtype)
    w = w if transposed else w.transpose(1, 2)
    if x.is_cuda and len(x):
        return torch._grouped_mm(x, w, offs=rows.offs)
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for e, span in enumerate(_spans(rows, len(x))):
        out[span] = x[span] @ w[e]
    return out


def contracted(a: Operand, b: Operand, rows: Ragged) -> Tensor:
    """The values of a_e^T @ b_e for a [M, N] and b [M, K]: [E, N, K], of the same dtypes. An expert without rows has
    anything.
    """
    dtype = product_dtype(rows.offs)
    return contracted_hp(a.values(dtype), b.values(dtype), rows)


def contracted_hp(a: Tensor, b: Tensor, rows: Ragged) -> Tensor:
    """`contracted` of tensors that are not quantized."""
    if a.is_cuda and len(a):
        return torch._grouped_mm(a.bfloat16().t(), b.bfloat16(), offs=rows.offs)
    out = a.new_zeros((rows.experts, a.shape[1], b.shape[1]), dtype=torch.float32)
    for e, span in enumerate(_spans(rows, len(a))):
        out[e] = a[span].float().t() @ b[span].float()
    return out


def outer(a: Operand, b: Operand) -> Tensor | None:
    """What a product of the two is multiplied by: float32 [E], or None."""
    return a.outer * b.outer if a.outer is not None and b.outer is not None else None


def product_dtype(x: Tensor) -> torch.dtype:
    """What FP8 values are multiplied as on x's device."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def _spans(rows: Ragged, M: int) -> list[slice]:
    """Of the experts; none if there are no rows on a GPU, which would have to be asked for their ends."""
    return [] if rows.offs.is_cuda else [slice(*span) for span in spans(rows.offs, M)]
