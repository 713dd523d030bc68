"""The picture of a comparison: both loss curves on top, the gap between them below, each with its own axis."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.compare_numbers import Comparison
from recipes.runs import Run

# Okabe and Ito's palette, told apart with every common colour blindness. B is drawn thin over a broad A, so that both
# stay visible where they lie on each other.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, MUTED, RULE = "#1f2430", "#5d6573", "#dfe3e8"


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the picture of `comparison` to `path` (PNG, 1800 x 1260 pixels)."""
    figure = Figure(figsize=(10, 7), dpi=180, facecolor="white")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1], gridspec_kw={"hspace": 0.27})
    figure.subplots_adjust(left=0.085, right=0.97, top=0.845, bottom=0.115)
    _draw_curves(curves, comparison)
    _draw_gaps(gaps, comparison)
    for axes in (curves, gaps):
        _style(axes)
    title = f"Loss of {comparison.b.label} against {comparison.a.label}"
    figure.text(0.022, 0.943, title, size=17, weight="bold", color=INK)
    figure.text(0.022, 0.907, _subtitle(comparison), size=10, color=MUTED)
    figure.text(0.022, 0.016, _provenance(comparison.b), size=7.8, color=MUTED)
    figure.savefig(path, metadata={"Title": comparison.verdict})


def _draw_curves(axes: Axes, comparison: Comparison) -> None:
    loss, val = comparison.pairs["loss"], comparison.pairs["val_loss"]
    a, b = comparison.a.label, comparison.b.label
    axes.plot(loss.steps, loss.a, color=BLUE, lw=5, alpha=0.38, solid_capstyle="round", label=f"{a}, training")
    axes.plot(loss.steps, loss.b, color=ORANGE, lw=1.5, label=f"{b}, training")
    axes.plot(val.steps, val.a, "o", ms=9, mfc="white", mec=BLUE, mew=1.8, label=f"{a}, validation", zorder=4)
    axes.plot(val.steps, val.b, "D", ms=3.8, color=ORANGE, label=f"{b}, validation", zorder=5)
    axes.set_title("Loss", loc="left", size=11.5, weight="bold", color=INK)
    axes.set_ylabel("cross-entropy, nats a token", color=MUTED)
    axes.legend(frameon=False, ncols=2, loc="upper right", labelcolor=INK, fontsize=9.5)


def _draw_gaps(axes: Axes, comparison: Comparison) -> None:
    loss, val, limits = comparison.pairs["loss"], comparison.pairs["val_loss"], comparison.limits
    axes.axhline(0, color=INK, lw=0.9, zorder=1)
    axes.plot(loss.steps, loss.gap, ".", ms=5, color=MUTED, alpha=0.55, label="training, each step")
    axes.plot(loss.steps, loss.smoothed, color=INK, lw=1.8, label=f"training, mean of {limits.smooth} steps")
    axes.plot(val.steps, val.gap, "D", ms=6, color=GREEN, mec="white", mew=0.8, label="validation", zorder=5)
    _draw_limits(axes, comparison)
    axes.set_title("Gap", loc="left", size=11.5, weight="bold", color=INK)
    difference = f"{comparison.b.label} - {comparison.a.label}"
    axes.set_ylabel(difference if len(difference) < 38 else "difference", color=MUTED, size=9)
    axes.set_xlabel("training step", color=MUTED)
    above = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 0.985),
        "ncols": 5,
        "columnspacing": 1.4,
        "handlelength": 1.6,
    }
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, **above)


def _draw_limits(axes: Axes, comparison: Comparison) -> None:
    """The band that a gap must end in, and axis limits that keep zero in the middle."""
    limits, pairs = comparison.limits, comparison.pairs
    given = {name: value for name, value in (("training", limits.loss), ("validation", limits.val_loss)) if value}
    seen = [abs(gap) for name in ("loss", "val_loss") for gap in pairs[name].gap if math.isfinite(gap)]
    reach = 1.2 * max([*given.values(), *seen, 1e-6])
    axes.set_ylim(-reach, reach)
    for (name, value), shade in zip(given.items(), (0.14, 0.10), strict=False):
        axes.axhspan(-value, value, color=GREEN, alpha=shade, lw=0, zorder=0, label=f"{name} limit ±{value:g}")


def _style(axes: Axes) -> None:
    axes.grid(axis="y", color=RULE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, length=0, labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.015)


def _subtitle(comparison: Comparison) -> str:
    """The last losses and their gap, in words."""
    parts = []
    for metric, name in (("val_loss", "validation"), ("loss", "training")):
        pair = comparison.pairs[metric]
        if pair.steps:
            parts.append(f"{name} {pair.b[-1]:.4f} and {pair.a[-1]:.4f}, gap {pair.gap[-1]:+.4f}")
    return f"At step {comparison.pairs['loss'].steps[-1]}: {';  '.join(parts)}"


def _provenance(run: Run) -> str:
    """Model, data, device and versions, where run.json tells them."""
    info = run.info
    if info is None:
        return "Run of stock torchtitan, without run.json: seed, data and versions are not known."
    data, used = info["data"], info["versions"]
    batch = f"{data['global_batch_size']} x {data['seq_len']} tokens a step of {data['dataset']}"
    stack = ", ".join(f"{name} {used[name]}" for name in ("torchtitan", "torch", "torchao") if name in used)
    device = f"{info['world_size']} x {info['device']}" if info["world_size"] > 1 else info["device"]
    return f"{info['model']}, {batch}, seed {info['seed']}   |   {device}   |   {stack}"
