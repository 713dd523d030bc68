"""The pictures of a comparison: loss curves on top, the gaps between them with their band below."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.compare_charts import FEW, Chart, Curve, beyond, gap_chart, loss_chart, value_range
from recipes.compare_facts import provenance
from recipes.compare_numbers import Report

# Okabe and Ito's palette, told apart with every common colour blindness; dashes tell the runs apart too.
# B is drawn thin over a broad A, so that both stay visible where they lie on each other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)))
INK, MUTED, RULE, SEED = "#1f2430", "#5d6573", "#dfe3e8", "#a9b1bd"


def plot_report(report: Report, path: Path) -> None:
    """Writes the picture of `report` to `path` (PNG, 1800 x 1260 pixels)."""
    figure = Figure(figsize=(10, 7), dpi=180, facecolor="white")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1], gridspec_kw={"hspace": 0.27})
    figure.subplots_adjust(left=0.085, right=0.97, top=0.845, bottom=0.115)
    _draw(curves, loss_chart(report), size=1.0)
    gap = gap_chart(report)
    _draw(gaps, gap, size=1.0)
    curves.set_title("Loss", loc="left", size=11.5, weight="bold", color=INK)
    gaps.set_title("Gap", loc="left", size=11.5, weight="bold", color=INK)
    curves.set_ylabel("cross-entropy, nats a token", color=MUTED)
    gaps.set_ylabel(f"difference to {report.reference.label}"[:38], color=MUTED, size=9)
    gaps.set_xlabel(_step_label(gap), color=MUTED)
    _legend(curves, ncols=2, loc="upper right", fontsize=9.5)
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.985), "columnspacing": 1.4, "handlelength": 1.6}
    _legend(gaps, fontsize=9, ncols=5, **above)
    title = f"Loss of {' and '.join(c.b.label for c in report.comparisons)} against {report.reference.label}"
    figure.text(0.022, 0.943, title, size=17 if len(title) < 75 else 12, weight="bold", color=INK)
    figure.text(0.022, 0.907, _subtitle(report), size=10, color=MUTED)
    figure.text(0.022, 0.016, provenance(report.comparisons[0].b), size=7.8, color=MUTED)
    figure.savefig(path, format="png", metadata={"Title": report.comparisons[0].verdict})


def plot_column(report: Report, path: Path) -> None:
    """Writes a picture as wide as a column of a two-column paper, 3.35 inches, in 7-point type (PNG, 400 dots an inch).

    No title: the caption has it.
    """
    figure = Figure(figsize=(3.35, 3.2), dpi=400, facecolor="white")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[1.35, 1], gridspec_kw={"hspace": 0.32})
    figure.subplots_adjust(left=0.155, right=0.955, top=0.985, bottom=0.115)
    gap = gap_chart(report)
    for axes, chart in ((curves, loss_chart(report)), (gaps, gap)):
        _draw(axes, chart, size=0.55)
        axes.tick_params(labelsize=7, pad=2)
    curves.set_ylabel("loss (nats/token)", color=INK, size=7, labelpad=2)
    gaps.set_ylabel(f"gap to {report.reference.label}"[:30], color=INK, size=7, labelpad=1)
    gaps.set_xlabel(_step_label(gap), color=INK, size=7, labelpad=2)
    _legend(curves, loc="upper right", fontsize=6.2, handlelength=1.6, labelspacing=0.25)
    above = {"loc": "lower right", "bbox_to_anchor": (1.05, 0.96), "columnspacing": 0.9, "handletextpad": 0.4}
    _legend(gaps, fontsize=5.6, ncols=3, handlelength=1.3, **above)
    figure.savefig(path, format="png", metadata={"Title": report.comparisons[0].verdict})


def _draw(axes: Axes, chart: Chart, size: float) -> None:
    """All curves of `chart`; `size` scales lines and marks."""
    several = len({curve.run for curve in chart.curves if curve.kind == "line"}) > 1
    for curve in chart.curves:
        colour, dash = COLOURS[curve.colour], DASHES[curve.colour]
        steps, values, name = curve.steps, curve.values, _label(curve, several)
        match curve.kind:
            case "band":
                low = [-value for value in values]
                axes.fill_between(steps, low, values, color=COLOURS[0], alpha=0.13, lw=0, label=name, zorder=0)
            case "guide":
                label = f"{curve.name} ±{values[0]:g}"
                axes.axhspan(-values[0], values[0], color=COLOURS[2], alpha=0.12, lw=0, label=label, zorder=0)
            case "broad":
                axes.plot(steps, values, color=colour, lw=5 * size, alpha=0.38, solid_capstyle="round", label=name)
            case "seed":
                axes.plot(steps, values, color=SEED, lw=1.0 * size, label=name, zorder=1)
            case "dots":
                few = len(steps) < FEW
                style = {"ms": (6 if few else 4) * size, "alpha": 0.6 if few else 0.3, "mew": 0, "zorder": 1.5}
                axes.plot(steps, values, ".", color=colour, label=name, **style)
            case "rings":
                style = {"mfc": "white", "mec": colour, "mew": 1.8 * size}
                axes.plot(steps, values, "o", ms=9 * size, label=name, zorder=4, **style)
            case "points":
                style = {"mec": "white", "mew": 0.6 * size}
                axes.plot(steps, values, "D", ms=4.6 * size, color=colour, label=name, zorder=5, **style)
            case _:
                axes.plot(steps, values, color=colour, ls=dash, lw=1.7 * size, label=name, zorder=3)
    if chart.base is not None:
        axes.axhline(chart.base, color=INK, lw=0.9 * size, zorder=1)
    axes.set_ylim(*value_range(chart))
    style_axes(axes, size)


def _label(curve: Curve, several: bool) -> str | None:
    """What a legend calls `curve`: of `several` runs, whose lines have their names, one kind of mark is named once."""
    if curve.kind == "seed":
        return "other seeds"
    run, comma, kind = curve.name.rpartition(", ")
    if not (several and run and comma) or curve.kind in ("broad", "rings"):
        return curve.name
    return kind if curve.run == 1 else None


def _step_label(chart: Chart) -> str:
    """Says also what the axis above it leaves out."""
    outside, dots = beyond(chart)
    return "training step" + (f" ({outside:,} of {dots:,} dots lie beyond the axis)" if outside else "")


def _legend(axes: Axes, **where: object) -> None:
    """The seeds are drawn first, to lie under the rest, and named last."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted((labels.index(label) for label in dict.fromkeys(labels)), key=lambda i: labels[i] == "other seeds")
    axes.legend([handles[i] for i in order], [labels[i] for i in order], frameon=False, labelcolor=INK, **where)


def style_axes(axes: Axes, size: float) -> None:
    """A quiet frame and grid; `size` scales the lines."""
    axes.grid(axis="y", color=RULE, lw=0.8 * size)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0, labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.015)


def _subtitle(report: Report) -> str:
    """The verdict of one pair; of several, each last gap."""
    if len(report.comparisons) == 1:
        return _short(report.comparisons[0].verdict, 120)
    gaps = []
    for comparison in report.comparisons:
        gap = comparison.pairs["loss"].smoothed[-1]
        number = f"{gap:+.4f}" if math.isfinite(gap) else str(gap)
        gaps.append(f"{comparison.b.label} {number}, {comparison.word}")
    return _short(f"Smoothed training loss at the end: {'; '.join(gaps)}", 120)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
