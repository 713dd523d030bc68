"""One metric of two runs, step by step: the gap, its smoothed value, and the band that seeds of A's precision make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.compare_band import band, spread, trailing_mean
from recipes.runs import Series


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A metric of both runs at their common steps. gap = b - a, smoothed = trailing mean of the gap.

    `band` has one value a step, or none where no seeds were given or they lack the metric.
    """

    steps: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    gap: tuple[float, ...]
    smoothed: tuple[float, ...]
    band: tuple[float, ...] = ()

    def largest(self) -> int:
        """Index of the largest |gap|; a nan counts as the largest of all. ValueError when no step matches."""
        return int(np.argmax(np.abs(self.gap)))

    def medians(self) -> tuple[float, float]:
        """Medians of a and b without the first logged step, which holds compilation and first-touch memory."""
        skip = 1 if len(self.steps) > 1 else 0
        return float(np.median(self.a[skip:])), float(np.median(self.b[skip:]))

    def maxima(self) -> tuple[float, float]:
        """Largest a and largest b; nan when one is nan."""
        return float(np.max(self.a)), float(np.max(self.b))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every number, and the final and the largest gap by name."""
        series = {"steps": self.steps, "a": self.a, "b": self.b, "gap": self.gap, "gap_smoothed": self.smoothed}
        if self.band:
            series["band"] = self.band
        if not self.steps:
            return series
        named = {}
        for name, i in (("final", len(self.steps) - 1), ("largest", self.largest())):
            values = {key: numbers[i] for key, numbers in series.items() if key != "steps"}
            named[name] = {"step": self.steps[i], **values}
        named["median"] = dict(zip("ab", self.medians(), strict=True))
        named["max"] = dict(zip("ab", self.maxima(), strict=True))
        return named | series


def match(a: Series, b: Series, smooth: int, seeds: Sequence[Series] = (), band_smooth: int = 1) -> Pair:
    """Both series at the steps that they and all `seeds` have, the gap, and its mean over the last `smooth` steps.

    Each seed must share a step with a and b. `band_smooth`: the same for the seeds' curves before their spread.
    """
    steps = tuple(sorted(a.keys() & b.keys() & set.intersection(*({*seed} for seed in (a, *seeds)))))
    gap = tuple(b[step] - a[step] for step in steps)
    values = {"a": tuple(a[step] for step in steps), "b": tuple(b[step] for step in steps)}
    held = band(steps, spread((a, *seeds), steps, band_smooth)) if seeds and steps else ()
    return Pair(steps=steps, gap=gap, smoothed=trailing_mean(gap, smooth), band=held, **values)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """b / a of a metric, each smoothed first; `worst` is the index farthest from 1 (a nan is farthest of all)."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    worst: int


def ratio(pair: Pair, smooth: int) -> Ratio | None:
    """Trailing mean of b over trailing mean of a: one outlier counts for what it adds. None without a common step."""
    if not pair.steps:
        return None
    means = zip(trailing_mean(pair.a, smooth), trailing_mean(pair.b, smooth), strict=True)
    values = tuple(b / a if a else np.nan for a, b in means)
    return Ratio(steps=pair.steps, values=values, worst=farthest_from_1(values))


def farthest_from_1(ratios: Sequence[float]) -> int:
    """Index of it. Half and twice are equally far; 0, below 0 and nan are farther."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return int(np.argmax(np.abs(np.log(ratios))))
