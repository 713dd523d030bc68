"""The numbers of a comparison: may runs be compared, which steps match, how large are the gaps, do the limits hold."""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recipes.run_info import config_differences
from recipes.runs import Run, RunError, Series

TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "val_loss": "validation_metrics/loss",
    "grad_norm": "grad_norm",
    "tokens_per_second": "throughput(tps)",
    "memory_gib": "memory/max_reserved(GiB)",
    "mfu_percent": "mfu(%)",
}
"""metric -> torchtitan's TensorBoard tag. tokens/s and memory are of one device."""

NAMES = {"loss": "training loss", "val_loss": "validation loss", "grad_norm": "gradient norm"}
"""Metrics that must be finite in both runs."""

# What an FP8 run and its BF16 twin differ in.
_EXPECTED_DIFFERENCES = ("model.converters", "fp8.")


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
        return statistics.median(self.a[skip:]), statistics.median(self.b[skip:])

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every number, and the final and the largest gap by name."""
        series = {"steps": self.steps, "a": self.a, "b": self.b, "gap": self.gap, "gap_smoothed": self.smoothed}
        if not self.steps:
            return series
        last, worst = len(self.steps) - 1, self.largest()
        at = {"final": last, "largest": worst}
        named = {name: {key: values[i] for key, values in series.items()} for name, i in at.items()}
        for entry in named.values():
            entry["step"] = entry.pop("steps")
        medians = self.medians()
        return (
            named | {"median": {"a": medians[0], "b": medians[1]}, "max": {"a": max(self.a), "b": max(self.b)}} | series
        )


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
    differences = {} if not (a.info and b.info) else config_differences(a.info["config"], b.info["config"])
    notes = [*check_comparable(a, b, limits), *_unexpected(differences)]
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
    smoothed = tuple(math.fsum(gap[max(0, i + 1 - smooth) : i + 1]) / min(smooth, i + 1) for i in range(len(gap)))
    values = {"a": tuple(a[step] for step in steps), "b": tuple(b[step] for step in steps)}
    return Pair(steps=steps, gap=gap, smoothed=smoothed, **values)


def check_comparable(a: Run, b: Run, limits: Limits) -> list[str]:
    """Notes on what could not be checked; RunError where two runs do not belong side by side."""
    if a.folder.resolve() == b.folder.resolve():
        raise RunError(f"RUN_A and RUN_B are the same folder, {a.folder}: name two runs.")
    notes = _check_steps(a, b)
    for metric, limit, flag in (
        ("loss", limits.loss, "--max-loss-gap"),
        ("val_loss", limits.val_loss, "--max-val-gap"),
    ):
        if limit is not None and not a.series(TAGS[metric]).keys() & b.series(TAGS[metric]).keys():
            raise RunError(f"{flag} cannot be checked: the runs have no {NAMES[metric]} at a common step.")
    stock = [run.label for run in (a, b) if run.info is None]
    if stock:
        return [*notes, f"No run.json in {' and '.join(stock)}: seed and data could not be checked."]
    _check_info(a, b)
    return notes


def _check_steps(a: Run, b: Run) -> list[str]:
    steps_a, steps_b = (set(run.series(TAGS["loss"])) for run in (a, b))
    for run, steps in ((a, steps_a), (b, steps_b)):
        if not steps:
            raise RunError(f"{run.label} has no training loss ({TAGS['loss']}) in its events.")
    if max(steps_a) != max(steps_b):
        ends = f"{a.label} ends at step {max(steps_a)} and {b.label} at {max(steps_b)}"
        raise RunError(f"The runs do not match in steps: {ends}; train both for the same number of steps.")
    alone = [
        f"{len(only)} only in {run.label}" for run, only in ((a, steps_a - steps_b), (b, steps_b - steps_a)) if only
    ]
    notes = _check_validation_steps(a, b, max(steps_a))
    if alone:
        notes.append(f"{len(steps_a & steps_b)} logged steps match; {' and '.join(alone)}, left out.")
    return notes


def _check_validation_steps(a: Run, b: Run, last: int) -> list[str]:
    validated = [set(run.series(TAGS["val_loss"])) for run in (a, b)]
    if not any(validated):
        return ["Neither run was validated: the training loss is of data the models learned from."]
    common = validated[0] & validated[1]
    if not common:
        return ["No validation step is common to both runs: their validation losses are not compared."]
    return (
        [] if max(common) == last else [f"The last common validation is at step {max(common)}, the runs end at {last}."]
    )


def _check_info(a: Run, b: Run) -> None:
    seeds = (a.info["seed"], b.info["seed"])
    if seeds[0] != seeds[1]:
        raise RunError(
            f"The runs do not match in seed: {seeds[0]} and {seeds[1]}; train both with the same debug.seed."
        )
    if seeds[0] is None:
        raise RunError(
            "Neither run set debug.seed, so they began with different weights: train both with one debug.seed."
        )
    if a.info["model"] != b.info["model"]:
        raise RunError(f"The runs train different models: {a.info['model']!r} and {b.info['model']!r}.")
    for part in ("data", "validation"):
        if part == "validation" and not (a.info[part] and b.info[part]):
            continue
        for key in sorted(a.info[part].keys() | b.info[part].keys()):
            values = (a.info[part].get(key), b.info[part].get(key))
            if values[0] != values[1]:
                what = key if part == "data" else f"validation {key}"
                raise RunError(f"The runs do not match in data: {what} is {values[0]!r} in A and {values[1]!r} in B.")


def _unexpected(differences: dict[str, tuple[Any, Any]]) -> list[str]:
    found = {key: pair for key, pair in differences.items() if not key.startswith(_EXPECTED_DIFFERENCES)}
    return ["Also different: " + "; ".join(f"{key} {a!r} and {b!r}" for key, (a, b) in found.items())] if found else []


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
