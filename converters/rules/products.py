"""GEMMs of quantized operands in high precision: FP8's rounding without FP8's tensor cores.

On a GPU the values are multiplied as bfloat16, by torch._grouped_mm, which takes nothing else: exact products, float32
accumulation, and a result that is rounded to bfloat16 once before scales of whole tensors are applied. On a CPU they
are multiplied as float32, one group at a time.
"""

import torch
from torch import Tensor

from converters.rules.ragged import Ragged
from converters.rules.rule import Operand


def rows_times_weights(a: Operand, b: Operand, rows: Ragged, dtype: torch.dtype, transposed: bool) -> Tensor:
    """a [M, K] @ b[e]^T, b [E, N, K] (transposed: a [M, N] @ b[e]) for the rows of each expert: [M, N] ([M, K]).

    Rows of nobody are zeros: torch._grouped_mm leaves memory there as it finds it.
    """
    x, w = a.values(product_dtype(a.q)), b.values(product_dtype(b.q))
    y = _grouped(x, w if transposed else w.transpose(1, 2), rows)
    if a.outer is not None and b.outer is not None:
        y = y.float() * rows.by_row(a.outer * b.outer)[:, None]
    return torch.where(rows.owned[:, None], y, 0).to(dtype)


def contracted(a: Operand, b: Operand, rows: Ragged, dtype: torch.dtype) -> Tensor:
    """a_e^T @ b_e for a [M, N] and b [M, K]: [E, N, K], zeros for an expert without rows."""
    dw = contracted_hp(a.values(product_dtype(a.q)), b.values(product_dtype(b.q)), rows, torch.float32)
    if a.outer is not None and b.outer is not None:
        dw = dw * (a.outer * b.outer).view(-1, 1, 1)
    return dw.to(dtype)


def contracted_hp(a: Tensor, b: Tensor, rows: Ragged, dtype: torch.dtype) -> Tensor:
    """`contracted` of tensors that are not quantized."""
    if a.is_cuda and len(a):
        dw = torch._grouped_mm(a.bfloat16().t(), b.bfloat16(), offs=rows.offs)
        return torch.where((rows.sizes > 0).view(-1, 1, 1), dw, 0).to(dtype)
    out = a.new_zeros((rows.experts, a.shape[1], b.shape[1]), dtype=dtype)
    for e, span in enumerate(_spans(rows, len(a))):
        out[e] = a[span].float().t() @ b[span].float()
    return out


def product_dtype(x: Tensor) -> torch.dtype:
    """What FP8 values are multiplied as on x's device."""
    return torch.bfloat16 if x.is_cuda else torch.float32


def _grouped(x: Tensor, w: Tensor, rows: Ragged) -> Tensor:
    if x.is_cuda and len(x):
        return torch._grouped_mm(x, w, offs=rows.offs)
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for e, span in enumerate(_spans(rows, len(x))):
        out[span] = x[span] @ w[e]
    return out


def _spans(rows: Ragged, M: int) -> list[slice]:
    """Of the experts; none if there are no rows, whose ends a GPU would have to be asked for."""
    ends = rows.offs.tolist() if M else []
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []
