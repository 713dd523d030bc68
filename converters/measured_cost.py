"""What an op costs, by what was measured: a sum of terms of its size, each with a cost that is not below zero.

break_even.py (experts) and dense_break_even.py (dense layers) say which terms; the costs of each are fitted here, for
BF16 and for FP8 with weights quantized now (cold) or before (warm).
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

PRECISIONS = ("bf16_ms", "cold_ms", "warm_ms")
Row = TypeVar("Row")


def load_cases(path: Path, row: type[Row], what: str) -> list[Row]:
    """The cases of a file of measurements, each as a `row` with bf16_ms, cold_ms, warm_ms; none if there is no file.

    Raises:
        ValueError: the file holds something else, or a time that is none. what: is said to be missing in it.
    """
    if not path.exists():
        return []
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        rows = [row(**{f.name: case[f.name] for f in fields(row)}) for case in cases]
        if wrong := [r for r in rows if not all(0 < getattr(r, p) < float("inf") for p in PRECISIONS)]:
            raise ValueError(f"{wrong[0]} has a time that is none")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold measured {what} ({error!r}): measure again, or delete it.") from error
    return rows


def fit(terms: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The costs [k], none below zero, with the least squares of relative errors. terms: [n, k], times: [n], above zero.

    All 2**k - 1 choices of the costs above zero are tried: whichever the optimum has, it is the plain least squares of
    those. To drop the lowest cost until none is below zero finds others.
    """
    k = terms.shape[1]
    relative = terms / times[:, None]
    best, least = np.zeros(k), float(len(times))  # no cost at all is an error of 1 a case
    for used in (list(c) for n in range(1, k + 1) for c in combinations(range(k), n)):
        costs = np.linalg.lstsq(relative[:, used], np.ones(len(times)), rcond=None)[0]
        error = float(np.square(relative[:, used] @ costs - 1).sum())
        if costs.min() >= 0 and error < least:
            best, least = np.zeros(k), error
            best[used] = costs
    return best


def fit_all(terms: Sequence[Sequence[float]], cases: Sequence[Any]) -> np.ndarray:
    """The costs [3, k] of the measured `cases`, by PRECISIONS. terms: of each case."""
    return np.stack([fit(np.array(terms), np.array([getattr(c, p) for c in cases])) for p in PRECISIONS])


def fp8_speed(costs: np.ndarray, terms: Sequence[float], micro_batches: int) -> float:
    """Time of BF16 over that of FP8 for a size with these terms; the first of the micro-batches is cold."""
    bf16, cold, warm = (float(t) for t in costs @ np.array(terms))
    return bf16 / ((cold + (micro_batches - 1) * warm) / micro_batches)
