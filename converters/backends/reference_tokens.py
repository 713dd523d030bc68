"""Tokens to routed rows and back in plain torch: the oracle of kernels/tokens.py, function by function.

Letters. T tokens, k experts a token, M routed rows (T * k, or fewer where other ranks have the rest), D model dim.
`slots` int32 [T, k]: the row of each token and choice, -1 for a row that is not here. Everything in float32, rounded
or quantized once at the end.
"""

import torch
from torch import Tensor

from converters.backends.reference import quantize_rows
from parallel.expert_parallel import pack


def slots_of(order: Tensor, T: int, k: int) -> Tensor:
    """order int64 [M], the place t * k + j of each row among all choices -> slots int32 [T, k]."""
    slots = torch.full((T * k,), -1, dtype=torch.int32, device=order.device)
    slots[order] = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return slots.view(T, k)


def _token_of_row(slots: Tensor, M: int) -> Tensor:
    flat = slots.flatten().long()
    places = (flat >= 0).nonzero()[:, 0]
    return torch.empty(M, dtype=torch.int64, device=slots.device).index_copy_(0, flat[places], places // slots.shape[1])


def to_rows(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] -> q [M, D], scale [M] of rows x[t] * scores[r], r = slots[t, :]; dots [M] = <x[t], other[r]>.

    scores: float32 [M], None: ones. other: [M, D], None: no dots (an empty tensor).
    """
    rows = x.float()[_token_of_row(slots, M)]
    dots = rows.new_empty(0) if other is None else (rows * other.float()).sum(1)
    return *quantize_rows(rows if scores is None else rows * scores[:, None]), dots


def to_packed_rows(
    x: Tensor, slots: Tensor, M: int, scores: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`to_rows` with q and scale side by side as they travel: bytes [M, packed_width]; dots."""
    *quantized, dots = to_rows(x, slots, M, scores, other)
    return pack(quantized), dots


def to_tokens(
    rows: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    scores: Tensor | None = None,
    base: Tensor | None = None,
    x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """rows [M, D] -> out [T, D] = base[t] + the sum of rows[r] * scores[r] over r = slots[t, :], rounded to dtype.

    base: [T, D], None: zeros. x: [T, D], for dots [M] = <x[t], rows[r]>, None: no dots (an empty tensor).
    """
    M, rows = rows.shape[0], rows.float()
    dots = rows.new_empty(0) if x is None else (rows * x.float()[_token_of_row(slots, M)]).sum(1)
    weighted = rows if scores is None else rows * scores[:, None]
    with_none = torch.cat([weighted, rows.new_zeros((1, rows.shape[1]))])  # slot -1: the last row
    out = with_none[slots.long()].sum(1)
    return (out if base is None else out + base.float()).to(dtype), dots
