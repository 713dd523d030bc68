"""From what was found by row to records: of a whole step's operands and GEMMs at once, in a few operators.

A record is a float64 vector. Two records of the same thing (another expert, another rank) are joined by the maximum of
its first fields and the sum of the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Fields of an operand's record. The first three are joined by their maximum, the others by their sum.
MAXIMA = ("amax", "scale_max", "minus_scale_min")
OPERAND = (*MAXIMA, "flushed", "nonzero", "saturated", "finite", "non_finite", "signal", "noise")
GEMM = ("signal", "noise")

Key = tuple[str, str]  # what it is shown under, and the operand or GEMM


@dataclass(frozen=True, kw_only=True)
class OperandRows:
    """S sampled rows of an operand.

    counts: int64 [4, S], values that are not zero, that are not zero in FP8 either, that are saturated, that are not
    finite. norms: of the values and of their error, float64 [S]. maxima: the largest |value|, the largest scale, the
    smallest scale, [S]. valid: bool [S], the rows that count, None for all. width: values of a row.
    """

    counts: Tensor
    norms: tuple[Tensor, Tensor]
    maxima: tuple[Tensor, Tensor, Tensor]
    valid: Tensor | None
    width: int


@dataclass(frozen=True, kw_only=True)
class GemmRows:
    """S rows of a GEMM's output. norms: of what is exact and of the error, float64 [S]; valid: as of an operand."""

    norms: tuple[Tensor, Tensor]
    valid: Tensor | None


Found = OperandRows | GemmRows


def operand_records(found: Sequence[tuple[Key, Found]], keys: Sequence[Key], device: torch.device) -> Tensor:
    """float64 [len(keys), len(OPERAND)]; a key of which nothing was found has the record that changes no other."""
    neutral, n = torch.zeros((1, len(OPERAND)), dtype=torch.float64, device=device), len(MAXIMA)
    neutral[:, :n].fill_(-torch.inf)
    records = _records(found, OperandRows, keys, neutral, _of_operands)
    return torch.cat([records[:, :, :n].amax(1), records[:, :, n:].sum(1)], dim=1)


def gemm_records(found: Sequence[tuple[Key, Found]], keys: Sequence[Key], device: torch.device) -> Tensor:
    """float64 [len(keys), len(GEMM)]."""
    neutral = torch.zeros((1, len(GEMM)), dtype=torch.float64, device=device)
    return _records(found, GemmRows, keys, neutral, _of_gemms).sum(1)


def _records(
    found: Sequence[tuple[Key, Found]], kind: type, keys: Sequence[Key], neutral: Tensor, sums: Callable
) -> Tensor:
    """[len(keys), P, fields]: the records of each key, not yet joined, and neutral ones up to P."""
    at: dict[Key, list[int]] = {key: [] for key in keys}  # places in a table that begins with the neutral record
    groups: dict[object, list[tuple[Key, Found]]] = {}  # of equally many rows
    for key, rows in found:
        S = rows.norms[0].shape[0]
        if isinstance(rows, kind) and key in at and S > 0:
            groups.setdefault((S, rows.valid is None), []).append((key, rows))
    for place, (key, _) in enumerate((each for group in groups.values() for each in group), start=1):
        at[key].append(place)
    P = max((len(places) for places in at.values()), default=0) or 1
    padded = torch.tensor([places + [0] * (P - len(places)) for places in at.values()], dtype=torch.int64).view(-1, P)
    table = torch.cat([neutral, *(sums([rows for _, rows in group]) for group in groups.values())])
    return table[padded.to(neutral.device, non_blocking=True)]


def _valid(found: Sequence[Found]) -> Tensor | None:
    """bool [n, S], None for all."""
    return None if found[0].valid is None else torch.stack([rows.valid for rows in found])


def _kept(rows: Tensor, valid: Tensor | None) -> Tensor:
    """[n, fields, S], zero where a row does not count."""
    return rows if valid is None else torch.where(valid[:, None], rows, 0)


def _squares(found: Sequence[Found], valid: Tensor | None) -> Tensor:
    """float64 [n, 2]: sums of squares."""
    norms = torch.stack([norm for rows in found for norm in rows.norms]).view(len(found), 2, -1)
    return _kept(norms.square(), valid).sum(2)


def _of_gemms(found: Sequence[GemmRows]) -> Tensor:
    """float64 [n, len(GEMM)] of GEMMs with equally many rows."""
    return _squares(found, _valid(found))


def _of_operands(found: Sequence[OperandRows]) -> Tensor:
    """float64 [n, len(OPERAND)] of operands with equally many rows."""
    valid, n = _valid(found), len(found)
    by_row = _kept(torch.stack([rows.counts for rows in found]), valid)  # [n, 4, S]
    used = by_row[:, :1] > 0  # a row of zeros has the smallest scale there is, and no use for it
    amax, most, least = torch.stack([m for rows in found for m in rows.maxima]).view(n, 3, 1, -1).unbind(1)
    scales = torch.where(used, torch.cat([most, -least], dim=1), -torch.inf)
    maxima = torch.cat([_kept(amax, valid), scales], dim=1).amax(2).double()
    maxima = torch.where(maxima.isnan(), torch.inf, maxima)  # a maximum over ranks would lose a nan
    nonzero, kept, saturated, non_finite = by_row.sum(2).double().unbind(1)
    count = torch.full_like(nonzero, by_row.shape[2]) if valid is None else valid.sum(1)
    widths = torch.tensor([rows.width for rows in found]).to(count.device, non_blocking=True)
    counts = [nonzero - kept, nonzero, saturated, count * widths - non_finite, non_finite]
    return torch.cat([maxima, torch.stack(counts, dim=1), _squares(found, valid)], dim=1)
