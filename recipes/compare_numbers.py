"""The numbers of a comparison: which steps match, how large are the gaps, do the limits hold?"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recipes.compare_checks import check_comparable
from recipes.run_info import config_differences
from recipes.runs import NAMES, TAGS, Run, RunError, Series


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a comparison is held to; None is no limit. `smooth`: matched steps in the trailing mean of a gap."""

    loss: float | None = None
    val_loss: float | None = None
    smooth: int = 5


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One metric of both runs at the steps where both logged it. gap = b - a, smoothed = trailing mean of the gap."""

    steps: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    gap: tuple[float, ...]
    smoothed: tuple[float, ...]

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
        if not self.steps:
            return series
        named = {}
        for name, i in (("final", len(self.steps) - 1), ("largest", self.largest())):
            values = {key: numbers[i] for key, numbers in series.items() if key != "steps"}
            named[name] = {"step": self.steps[i], **values}
        named["median"] = dict(zip("ab", self.medians(), strict=True))
        named["max"] = dict(zip("ab", self.maxima(), strict=True))
        return named | series


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a table, a picture or a JSON file says about two runs."""

    a: Run
    b: Run
    limits: Limits
    pairs: dict[str, Pair]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    config_differences: dict[str, tuple[Any, Any]]
    verdict: str

    @property
    def passed(self) -> bool | None:
        """False: something failed. True: every given limit holds. None: nothing failed, no limit was given."""
        if self.failures:
            return False
        return None if self.limits.loss is None and self.limits.val_loss is None else True


def compare_runs(a: Run, b: Run, limits: Limits) -> Comparison:
    """Matches the steps of two runs and measures their gaps.

    Raises:
        RunError: the runs differ in steps, seed, model or data, or a limit was given for a metric that they lack.
    """
    if a.label == b.label:
        a, b = (replace(run, label=f"{run.folder.resolve().parent.name}/{run.label}") for run in (a, b))
    notes = check_comparable(a, b)
    _check_limits(a, b, limits)
    differences = {} if not (a.info and b.info) else config_differences(a.info["config"], b.info["config"])
    pairs = {metric: match(a.series(tag), b.series(tag), limits.smooth) for metric, tag in TAGS.items()}
    failures = (*_non_finite(a), *_non_finite(b), *_exceeded(pairs, limits))
    verdict = _verdict(a, b, pairs, limits, failures)
    return Comparison(
        a=a, b=b, limits=limits, pairs=pairs, failures=failures, notes=tuple(notes),
        config_differences=differences, verdict=verdict,
    )  # fmt: skip


def match(a: Series, b: Series, smooth: int) -> Pair:
    """Both series at their common steps, the gap, and its mean over the last `smooth` (or fewer) common steps."""
    steps = tuple(sorted(a.keys() & b.keys()))
    gap = tuple(b[step] - a[step] for step in steps)
    smoothed = tuple(sum(gap[max(0, i + 1 - smooth) : i + 1]) / min(smooth, i + 1) for i in range(len(gap)))
    values = {"a": tuple(a[step] for step in steps), "b": tuple(b[step] for step in steps)}
    return Pair(steps=steps, gap=gap, smoothed=smoothed, **values)


def _check_limits(a: Run, b: Run, limits: Limits) -> None:
    given = (("loss", limits.loss, "--max-loss-gap"), ("val_loss", limits.val_loss, "--max-val-gap"))
    for metric, limit, flag in given:
        if limit is not None and not a.series(TAGS[metric]).keys() & b.series(TAGS[metric]).keys():
            raise RunError(f"{flag} cannot be checked: the runs have no {NAMES[metric]} at a common step.")


def _non_finite(run: Run) -> list[str]:
    """One line for each metric of `run` with a nan or inf, at any step, matched or not."""
    lines = []
    for metric, name in NAMES.items():
        bad = [(step, value) for step, value in run.series(TAGS[metric]).items() if not math.isfinite(value)]
        if bad:
            lines.append(f"{run.label}: {name} is {bad[0][1]} at step {bad[0][0]} ({len(bad)} such steps)")
    return lines


def _exceeded(pairs: dict[str, Pair], limits: Limits) -> list[str]:
    lines = []
    if limits.loss is not None and not abs(pairs["loss"].smoothed[-1]) <= limits.loss:  # `not <=`: a nan gap fails
        lines.append(f"smoothed training loss gap {pairs['loss'].smoothed[-1]:+.6f} is beyond {limits.loss:g}")
    if limits.val_loss is not None and not abs(pairs["val_loss"].gap[-1]) <= limits.val_loss:
        lines.append(f"validation loss gap {pairs['val_loss'].gap[-1]:+.6f} is beyond {limits.val_loss:g}")
    return lines


def _verdict(a: Run, b: Run, pairs: dict[str, Pair], limits: Limits, failures: tuple[str, ...]) -> str:
    """One line, such as: PASS: fp8 - bf16 at step 200: validation loss +0.0021 (limit 0.02)."""
    if failures:
        return "FAIL: " + "; ".join(failures)
    parts = []
    for metric, limit in (("loss", limits.loss), ("val_loss", limits.val_loss)):
        if pairs[metric].steps:
            gap = pairs[metric].smoothed[-1] if metric == "loss" else pairs[metric].gap[-1]
            held = "no limit given" if limit is None else f"limit {limit:g}"
            parts.append(f"{NAMES[metric]} {gap:+.6f} at step {pairs[metric].steps[-1]} ({held})")
    word = "MEASURED" if limits.loss is None and limits.val_loss is None else "PASS"
    return f"{word}: {b.label} - {a.label}: " + ", ".join(parts)
