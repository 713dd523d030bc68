"""What a comparison's pictures show, as data: the curves of each chart, for the page and for matplotlib alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from recipes.compare_load import load_divergence
from recipes.compare_numbers import Comparison, Report
from recipes.compare_pairs import match, ratio
from recipes.runs import TAGS, Run, Series

Kind = Literal["broad", "line", "seed", "dots", "rings", "points", "band", "guide"]

# A page of 2,000 steps keeps every one; a longer run is thinned to 1,200 points a curve, lows and highs kept.
WHOLE, THINNED = 2000, 1200
# So few dots are drawn larger.
FEW = 400


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve of a chart. `run` counts in Report.runs and gives the colour; a band reaches `values` to both sides."""

    name: str
    run: int
    kind: Kind
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def colour(self) -> int:
        """0 is A's; further ones repeat after five."""
        return 1 + (self.run - 1) % 5 if self.run else 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over the training steps; `base`: the value that means no difference, None for losses."""

    key: str
    title: str
    about: str
    base: float | None
    curves: tuple[Curve, ...]


def charts(report: Report) -> list[Chart]:
    """Losses, gaps, gradient norms and expert loads; a chart without a curve is left out."""
    drawn = (loss_chart(report), gap_chart(report), norm_chart(report), load_chart(report))
    return [chart for chart in drawn if chart.curves]


def loss_chart(report: Report) -> Chart:
    """All that each run logged: training as lines, validation as marks. Compared runs lie thin over a broad A."""
    curves = [_curve(run.label, n, _line(report, n), run.series(TAGS["loss"])) for n, run in _seeds_first(report)]
    for n, run in enumerate(report.runs[: len(report.comparisons) + 1]):
        kind = "rings" if n == 0 else "points"
        curves.append(_curve(f"{run.label}, validation", n, kind, run.series(TAGS["val_loss"])))
    about = "Cross-entropy in nats a token, as logged. Lines: training. Marks: validation."
    return Chart(key="loss", title="Loss", about=about, base=None, curves=_kept(curves))


def gap_chart(report: Report) -> Chart:
    """Each run minus A: every step, smoothed, validation; the band of the seeds, or the limits, behind them."""
    first = report.comparisons[0]
    loss = first.pairs["loss"]
    curves = [Curve(name="band of the seeds", run=0, kind="band", steps=loss.steps, values=loss.band)]
    if first.limits.loss is not None:
        flat = (first.limits.loss,) * len(loss.steps)
        curves.append(Curve(name="limit of the training loss", run=0, kind="guide", steps=loss.steps, values=flat))
    if first.limits.val_loss is not None:
        flat = (first.limits.val_loss,) * len(loss.steps)
        curves.append(Curve(name="limit of the validation loss", run=0, kind="guide", steps=loss.steps, values=flat))
    for n, seed in _seeds(report):
        pair = match(report.reference.series(TAGS["loss"]), seed.series(TAGS["loss"]), first.limits.smooth)
        curves.append(Curve(name=seed.label, run=n, kind="seed", steps=pair.steps, values=pair.smoothed))
    for n, comparison in enumerate(report.comparisons, 1):
        curves += _gap_curves(comparison, n, "" if len(report.comparisons) == 1 else f"{comparison.b.label}, ")
    who = first.b.label if len(report.comparisons) == 1 else "Each run"
    about = f"{who} minus {report.reference.label} on the same data. Above zero is worse."
    about += " The axis holds all curves and 80 % of the dots."
    return Chart(key="gap", title="Gap", about=about, base=0.0, curves=_kept(curves))


def norm_chart(report: Report) -> Chart:
    """Smoothed gradient norm of each run over that of A; the seeds show what is usual."""
    curves, smooth = [], report.comparisons[0].limits.smooth
    for n, seed in _seeds(report):
        norm = ratio(match(report.reference.series(TAGS["grad_norm"]), seed.series(TAGS["grad_norm"]), 1), smooth)
        if norm:
            curves.append(Curve(name=seed.label, run=n, kind="seed", steps=norm.steps, values=norm.values))
    for n, comparison in enumerate(report.comparisons, 1):
        if norm := comparison.norm_ratio:
            curves.append(Curve(name=comparison.b.label, run=n, kind="line", steps=norm.steps, values=norm.values))
    about = f"Smoothed gradient norm over that of {report.reference.label}. 1 is equal."
    return Chart(key="norm", title="Gradient norm ratio", about=about, base=1.0, curves=_kept(curves))


def load_chart(report: Report) -> Chart:
    """Share of the rows that go to other experts than in A, in the worst layer; the seeds show what is usual."""
    curves = [
        _curve(seed.label, n, "seed", load.worst)
        for n, seed in _seeds(report)
        if (load := load_divergence(report.reference, seed))
    ]
    for n, comparison in enumerate(report.comparisons, 1):
        if comparison.load:
            curves.append(_curve(comparison.b.label, n, "line", comparison.load.worst))
    about = (
        f"Share of the rows that go to other experts than in {report.reference.label}, in the worst layer. 0 is equal."
    )
    return Chart(key="load", title="Expert load", about=about, base=0.0, curves=_kept(curves))


def thin(curve: Curve, whole: int = WHOLE, thinned: int = THINNED) -> Curve:
    """`curve`, or some `thinned` of its points when it has more than `whole`: low and high of each stretch."""
    if len(curve.steps) <= whole:
        return curve
    at = _evenly(curve, thinned) if curve.kind == "dots" else _extremes(curve, thinned)
    steps, values = (tuple(numbers[i] for i in at) for numbers in (curve.steps, curve.values))
    return Curve(name=curve.name, run=curve.run, kind=curve.kind, steps=steps, values=values)


def beyond(chart: Chart) -> tuple[int, int]:
    """How many dots lie beyond the axis, and of how many."""
    low, high = value_range(chart)
    dots = [value for curve in chart.curves if curve.kind == "dots" for value in curve.values if math.isfinite(value)]
    return sum(not low <= value <= high for value in dots), len(dots)


def _evenly(curve: Curve, count: int) -> list[int]:
    """Extremes of a cloud would look like a wider cloud."""
    return sorted({*np.linspace(0, len(curve.steps) - 1, count).round().astype(int).tolist()})


def _extremes(curve: Curve, count: int) -> list[int]:
    kept, values = {0, len(curve.steps) - 1}, np.asarray(curve.values)
    for part in np.array_split(np.arange(len(curve.steps)), count // 2 - 1):
        if np.isfinite(values[part]).any():
            kept |= {int(part[np.nanargmin(values[part])]), int(part[np.nanargmax(values[part])])}
    return sorted(kept)


def value_range(chart: Chart) -> tuple[float, float]:
    """Axis limits that hold every curve; of the dots, each one step, 80 %: the rest would flatten what is smoothed."""
    lows, highs = [chart.base] * (chart.base is not None), [chart.base] * (chart.base is not None)
    for curve in chart.curves:
        values = [value for value in curve.values if math.isfinite(value)]
        if not values:
            continue
        low, high = np.percentile(values, [10, 90]) if curve.kind == "dots" else (min(values), max(values))
        both = curve.kind in ("band", "guide")
        lows.append(-high if both else low)
        highs.append(high)
    if not lows:
        return 0.0, 1.0
    low, high = float(min(lows)), float(max(highs))
    room = 0.06 * (high - low) or 1e-6 + 0.01 * abs(high)
    return low - room, high + room


def _gap_curves(comparison: Comparison, n: int, name: str) -> list[Curve]:
    loss, val = comparison.pairs["loss"], comparison.pairs["val_loss"]
    return [
        Curve(name=f"{name}each step", run=n, kind="dots", steps=loss.steps, values=loss.gap),
        Curve(
            name=f"{name}mean of {comparison.limits.smooth}", run=n, kind="line", steps=loss.steps, values=loss.smoothed
        ),
        Curve(name=f"{name}validation", run=n, kind="points", steps=val.steps, values=val.gap),
    ]


def _curve(name: str, run: int, kind: Kind, series: Series) -> Curve:
    return Curve(name=name, run=run, kind=kind, steps=tuple(series), values=tuple(series.values()))


def _line(report: Report, n: int) -> Kind:
    return "broad" if n == 0 else "line" if n <= len(report.comparisons) else "seed"


def _seeds(report: Report) -> list[tuple[int, Run]]:
    return list(enumerate(report.seeds, 1 + len(report.comparisons)))


def _seeds_first(report: Report) -> list[tuple[int, Run]]:
    """Drawn in this order, the seeds lie under the rest."""
    return [*_seeds(report), *list(enumerate(report.runs))[: 1 + len(report.comparisons)]]


def _kept(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    return tuple(curve for curve in curves if curve.values and any(map(math.isfinite, curve.values)))
