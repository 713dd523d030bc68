"""How good is a quantized operand, and how good a GEMM of two of them?  By row, from a sample of rows, on the device.

Nothing here waits for the device, and nothing is as large as an operand. On a small model a measured step is bound by
the number of operators, not by their size: what can be summed up later is left by row here, for telemetry_records.py.
Letters: S sampled rows, C sampled columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from converters.telemetry_records import GemmRows, OperandRows

ROWS = 1024  # sampled rows of an operand: a share of 1e-6 of 1024 x 5120 values is 5 of them
GEMM_ROWS = 256  # of a GEMM's output; with its columns 8192 values, an SQNR to about 0.1 dB
COLUMNS = 32  # of a GEMM's output, and along each dim of a weight gradient
WGRAD_EXPERTS = 4  # the largest experts


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows of a buffer [M, ...] that belong to an expert. rows, expert: int64 [S]; valid: bool [S]; place: 0, 1, ..."""

    rows: Tensor
    valid: Tensor
    expert: Tensor
    place: Tensor

    @cached_property
    def thin(self) -> "Sample":
        """Those that a GEMM looks at."""
        rows, valid, expert = (self.thinned(t) for t in (self.rows, self.valid, self.expert))
        return Sample(rows=rows, valid=valid, expert=expert, place=self.place[: rows.shape[0]])

    def thinned(self, taken: Tensor) -> Tensor:
        """`t[sample.rows]` of some tensor t -> `t[sample.thin.rows]`, a view."""
        return taken[:: max(1, -(-len(taken) // GEMM_ROWS))]


def sample_rows(offs: Tensor, M: int) -> Sample:
    """Evenly spread over the rows that belong to somebody: offs int32 [E] are the ends of their groups."""
    S, total = min(ROWS, M), offs[-1]
    place = torch.arange(S, device=offs.device)
    rows = place * ((total + (S - 1)) // max(S, 1)).clamp_min(1)
    expert = torch.searchsorted(offs.long(), rows, right=True).clamp_max(offs.shape[0] - 1)
    return Sample(rows=rows.clamp_max(max(M - 1, 0)), valid=rows < total, expert=expert, place=place)


def expand_scale(scale: Tensor, shape: torch.Size) -> Tensor:
    """A scale as it is stored -> one that broadcasts over `shape`.

    Stored are one scale for all, one a slice of the leading dims ([M] of [M, K]; [E], [E, N] of [E, N, K]), or one a
    block of 128 along dims that are longer than the scale's.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.shape == shape[: scale.dim()]:
        return scale.reshape(*scale.shape, *[1] * (len(shape) - scale.dim()))
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(128, dim=dim)[(slice(None),) * dim + (slice(size),)]
    return scale


def operand(x: Tensor, q: Tensor, scale: Tensor, valid: Tensor | None, amax: Tensor | None = None) -> OperandRows:
    """What is found in x [S, K], whose FP8 version is q [S, K] with a scale that broadcasts over it.

    valid [S]: rows that count, None for all. amax []: of the whole operand, where it is known; else the sample's.
    Flushed: not zero before and zero in FP8. Saturated: beyond what FP8 can hold with this scale. Non-finite values are
    counted and left out of the shares; the SQNR of an operand that has one is nan.
    """
    S, limit = x.shape[0], torch.finfo(q.dtype).max
    x, q, scale = x.float(), q.float(), scale.float()
    clean = x.nan_to_num(0.0, 0.0, 0.0)
    kept, saturated = torch.logical_and(clean, q), clean.abs() > limit * scale
    if scale.dim() == 2 and scale.shape[1] > 1:
        least, most = scale.expand(S, -1).aminmax(dim=1)
    else:
        least = most = scale.reshape(-1) if scale.numel() == S else scale.reshape(1).expand(S)
    return OperandRows(
        counts=torch.stack([clean != 0, kept, saturated, x != clean]).sum(2),
        norms=(_norms(clean), _norms(q * scale - x)),
        maxima=(torch.linalg.vector_norm(x, torch.inf, dim=1) if amax is None else amax.expand(S), most, least),
        valid=valid,
        width=x.shape[1],
    )


def _norms(x: Tensor) -> Tensor:
    """x [S, K] -> [S], in float64: gradients of 1e-25 have squares too."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)


def amax_of_rows(x: Tensor) -> Tensor:
    """x [M, K] -> [M], without a temporary as large as x; nan where there is one."""
    return torch.linalg.vector_norm(x, torch.inf, dim=1) if x.numel() else x.new_zeros(len(x))


def largest_owned(rows: Tensor, offs: Tensor) -> Tensor:
    """[M], none below zero -> [], the largest of those that belong to somebody; nan where there is one."""
    nobodys = torch.arange(len(rows), device=offs.device) >= offs[-1]
    return rows.masked_fill(nobodys, 0).amax() if len(rows) else rows.new_zeros(())


def stride(size: int) -> int:
    """Which of `size` columns are looked at: every stride-th."""
    return max(1, size // COLUMNS)


def columns(x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
    """Some of the columns of x [M, K], a view, or of each of its parts of these sizes, joined: [M, C]."""
    if len(sizes) < 2:
        return x[:, :: stride(x.shape[1])]
    return torch.cat([part[:, :: stride(part.shape[1])] for part in x.split(list(sizes), dim=1)], dim=1)


def gemm(a: Tensor, w: Tensor, out: Tensor, sample: Sample) -> GemmRows:
    """What is found in out [S, C], some columns of a GEMM, against a [S, K] @ w[e]^T in float32.

    w: [E, C, K], those rows of the weight in float32.
    """
    every = torch.bmm(a.float().expand(w.shape[0], -1, -1), w.mT)
    exact = every[0] if w.shape[0] == 1 else every[sample.expert, sample.place]
    return GemmRows(norms=(_norms(exact), _norms(out - exact)), valid=sample.valid)


@dataclass(frozen=True, kw_only=True)
class LargestExperts:
    """at: int64 [n], which, None for all in their order. others: bool [M, n, 1], the rows that are not theirs; nobodys:
    [M, 1], that are none of theirs.
    """

    at: Tensor | None
    others: Tensor
    nobodys: Tensor


def largest_experts(offs: Tensor, M: int) -> LargestExperts:
    """The experts with the most rows, at most WGRAD_EXPERTS. offs int32 [E]: ends of the groups of M rows."""
    at, E = None, offs.shape[0]
    if E > WGRAD_EXPERTS:
        at = torch.diff(offs, prepend=offs.new_zeros(1)).topk(WGRAD_EXPERTS).indices
    expert = torch.searchsorted(offs, torch.arange(M, device=offs.device, dtype=offs.dtype), right=True)
    which = torch.arange(E, device=offs.device) if at is None else at
    others = expert[:, None, None] != which[:, None]
    return LargestExperts(at=at, others=others, nobodys=others.all(1))


def wgrad(a: Tensor, b: Tensor, dws: list[Tensor], experts: LargestExperts) -> GemmRows:
    """What is found in the largest experts' weight gradients, against dY_e^T @ X_e.

    dws: parts [E, N_i, K] of dW, joined along N. a, b: `columns(dY, sizes)`, of the parts, and `columns(X)`, in high
    precision.
    """
    some = [dw[:, :: stride(dw.shape[1]), :: stride(dw.shape[2])] for dw in dws]
    dw = some[0] if len(some) == 1 else torch.cat(some, dim=1)
    dw = dw if experts.at is None else dw[experts.at]
    theirs = a.float()[:, None].masked_fill(experts.others, 0)  # [M, n, C]
    exact = theirs.flatten(1).t() @ b.float().masked_fill(experts.nobodys, 0)
    return GemmRows(norms=(_norms(exact), _norms(dw.reshape(exact.shape) - exact)), valid=None)
