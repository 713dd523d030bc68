"""How good is a quantized operand, and how good a GEMM of two of them?  Sums on the device, from a sample of rows.

Nothing here waits for the device, and nothing is as large as an operand. Letters: S sampled rows, C sampled columns.
A record is a float64 vector; two records of the same thing are joined by `join` (another expert, another rank).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 1024  # sampled rows of an operand: a share of 1e-6 of 1024 x 5120 values is 5 of them
GEMM_ROWS = 256  # of a GEMM's output; with its columns 8192 values, an SQNR to about 0.1 dB
COLUMNS = 32  # of a GEMM's output, and along each dim of a weight gradient
WGRAD_EXPERTS = 4  # the largest experts

# Fields of an operand's record. The first three are joined by their maximum, the others by their sum.
MAXIMA = ("amax", "scale_max", "minus_scale_min")
OPERAND = (*MAXIMA, "flushed", "nonzero", "saturated", "finite", "non_finite", "signal", "noise")
GEMM = ("signal", "noise")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows of a buffer [M, ...] that belong to an expert. rows, expert: int64 [S]; valid: bool [S]."""

    rows: Tensor
    valid: Tensor
    expert: Tensor

    def thinned(self, most: int) -> "Sample":
        """Every n-th of them, at most `most`."""
        step = max(1, -(-self.rows.shape[0] // most))
        return Sample(rows=self.rows[::step], valid=self.valid[::step], expert=self.expert[::step])


def sample_rows(offs: Tensor, M: int) -> Sample:
    """Evenly spread over the rows that belong to somebody: offs int32 [E] are the ends of their groups."""
    S = min(ROWS, M)
    total = offs[-1].long()
    step = ((total + S - 1) // max(S, 1)).clamp_min(1)
    rows = torch.arange(S, device=offs.device) * step
    expert = torch.searchsorted(offs.long(), rows, right=True).clamp_max(offs.shape[0] - 1)
    return Sample(rows=rows.clamp_max(max(M - 1, 0)), valid=rows < total, expert=expert)


def _square(x: Tensor) -> Tensor:
    """Sum of squares in float64: gradients of 1e-25 have squares too."""
    return torch.linalg.vector_norm(x, dtype=torch.float64) ** 2


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


def operand(x: Tensor, q: Tensor, scale: Tensor, valid: Tensor, amax: Tensor | None = None) -> Tensor:
    """The record of x [S, K], float64 [10], whose FP8 version is q [S, K] with a scale that broadcasts over it.

    valid [S]: rows that count. amax: of the whole operand, where it is known; else the sample's. Flushed: not zero
    before and zero in FP8. Saturated: beyond what FP8 can hold with this scale. Non-finite values are counted and
    left out of the shares; the SQNR of an operand that has one is nan.
    """
    x, scale = x.float(), scale.float().expand(x.shape)
    valid = valid[:, None].expand(x.shape)
    finite = valid & x.isfinite()
    nonzero = finite & (x != 0)
    clean = torch.where(finite, x, 0)
    noise = torch.where(valid, q.float() * scale - x, 0)
    counts = [
        (nonzero & (q.float() == 0)).sum(),
        nonzero.sum(),
        (finite & (x.abs() > torch.finfo(q.dtype).max * scale)).sum(),
        finite.sum(),
        (valid & ~x.isfinite()).sum(),
    ]
    maxima = [largest(x.abs(), valid) if amax is None else amax]
    used = nonzero.any(1, keepdim=True)  # a row of zeros has the smallest scale there is, and no use for it
    maxima += [largest(s, used, -torch.inf) for s in (scale, -scale)]
    return torch.stack([*maxima, *counts, _square(clean), _square(noise)])


def largest(x: Tensor, where: Tensor, least: float = 0.0) -> Tensor:
    """The largest element of x where `where`, `least` if there is none; inf if it is nan (a maximum would lose it)."""
    x = torch.where(where, torch.where(x.isnan(), torch.inf, x), least)
    return x.amax().double() if x.numel() else x.new_full((), least, dtype=torch.float64)


def owned(M: int, offs: Tensor) -> Tensor:
    """bool [M]: the rows that belong to somebody."""
    return torch.arange(M, device=offs.device) < offs[-1]


def stride(size: int) -> int:
    """Which of `size` columns are looked at: every stride-th."""
    return max(1, size // COLUMNS)


def columns(x: Tensor, sizes: Sequence[int] = ()) -> Tensor:
    """Some of the columns of x [M, K], or of each of its parts of these sizes: [M, C]."""
    parts = x.split(list(sizes), dim=1) if sizes else [x]
    return torch.cat([part[:, :: stride(part.shape[1])] for part in parts], dim=1)


def gemm(a: Tensor, w: Tensor, out: Tensor, sample: Sample) -> Tensor:
    """Signal and noise [2] of out [S, C], some columns of a GEMM, against a [S, K] @ w[e]^T in float32.

    w: [E, C, K], those rows of the weight in float32.
    """
    every = torch.einsum("sk,eck->sec", a.float(), w)
    exact = every[torch.arange(len(a), device=a.device), sample.expert]
    valid = sample.valid[:, None]
    return _compare(torch.where(valid, exact, 0), torch.where(valid, out.float(), 0))


def wgrad(a: Tensor, b: Tensor, dws: list[Tensor], offs: Tensor) -> Tensor:
    """Signal and noise [2] of the largest experts' weight gradients against dY_e^T @ X_e.

    dws: parts [E, N_i, K] of dW, joined along N. a, b: `columns(dY, sizes)`, of the parts, and `columns(X)`, in high
    precision.
    """
    some = [dw[:, :: stride(dw.shape[1]), :: stride(dw.shape[2])] for dw in dws]
    dw, ends = torch.cat(some, dim=1).float(), offs.long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    rows = torch.arange(a.shape[0], device=a.device)[:, None]
    record = torch.zeros(len(GEMM), dtype=torch.float64, device=a.device)
    for e in sizes.topk(min(WGRAD_EXPERTS, len(sizes))).indices.split(1):  # [1]: indexing with [] waits for the host
        mine = (rows >= ends[e] - sizes[e]) & (rows < ends[e])
        exact = torch.where(mine, a.float(), 0).t() @ torch.where(mine, b.float(), 0)
        record = record + _compare(exact, dw[e][0])
    return record


def _compare(exact: Tensor, actual: Tensor) -> Tensor:
    return torch.stack([_square(exact), _square(actual - exact)])


def join(a: Tensor, b: Tensor) -> Tensor:
    """One record out of two of the same kind."""
    n = len(MAXIMA) if a.shape[0] == len(OPERAND) else 0
    return torch.cat([torch.maximum(a[:n], b[:n]), a[n:] + b[n:]])
