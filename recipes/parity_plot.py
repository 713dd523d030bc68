"""The picture of a parity test, one a model:  python -m recipes.parity_plot assets/results/parity_h200.json

Losses on top; below, what the validation loss of each FP8 rule lies above the BF16 runs of the same seeds (a mean over
them), in the band by which the BF16 seeds lie around their own mean. Drawn from the JSON alone.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare_band import trailing_mean
from recipes.compare_plot import COLOURS, DASHES, INK, MUTED, style_axes

BLUE = COLOURS[0]  # BF16; the rules take the others, in the order of the file
LOOKS = list(zip(COLOURS[1:], DASHES[1:], strict=True))
SMOOTH = 10  # logged points

Curves = list[dict[str, Any]]


def plot_parity(found: dict[str, Any], model: str, path: Path) -> None:
    """Writes the picture of one model's runs to `path` (PNG, 1800 x 1260 pixels)."""
    runs = [run for run in found["runs"] if run["model"] == model]
    bf16, others = ([run for run in runs if (run["recipe"] == "bf16") == want] for want in (True, False))
    figure = Figure(figsize=(10, 7), dpi=180, facecolor="white")
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1], gridspec_kw={"hspace": 0.27})
    figure.subplots_adjust(left=0.085, right=0.97, top=0.865, bottom=0.115)
    _draw_losses(losses, bf16, others)
    _draw_gaps(gaps, bf16, others)
    for axes in (losses, gaps):
        style_axes(axes, 1.0)
    figure.text(0.022, 0.943, f"{model}: FP8 against {len(bf16)} BF16 seeds", size=17, weight="bold", color=INK)
    figure.text(0.022, 0.912, _subtitle(found, model), size=9.5, color=MUTED)
    figure.text(0.022, 0.016, _provenance(found["environment"], runs), size=7.8, color=MUTED)
    figure.savefig(path)


def _draw_losses(axes: Axes, bf16: Curves, others: Curves) -> None:
    for i, run in enumerate(bf16):
        label = f"BF16, {len(bf16)} seeds" if i == 0 else None
        axes.plot(*_smoothed(run), color=BLUE, lw=4, alpha=0.3, label=label, solid_capstyle="round")
    for (recipe, runs), (colour, dash) in zip(_by_rule(others).items(), LOOKS, strict=False):
        for i, run in enumerate(runs):
            axes.plot(*_smoothed(run), color=colour, ls=dash, lw=1.4, label=_label(recipe, runs) if i == 0 else None)
            axes.plot(*zip(*run["val_curve"], strict=True), "D", ms=3.8, color=colour)
    for i, run in enumerate(bf16):
        label = "validation" if i == 0 else None
        axes.plot(*zip(*run["val_curve"], strict=True), "o", ms=7, mfc="none", mec=BLUE, mew=1.2, label=label)
    axes.set_title(
        f"Training loss, mean of {SMOOTH} logged steps, and validation loss", loc="left", size=11.5, color=INK
    )
    axes.set_ylabel("cross-entropy, nats a token", color=MUTED)
    axes.legend(frameon=False, ncols=3, loc="upper right", labelcolor=INK, fontsize=9.5)
    tail = [loss for run in (*bf16, *others) for _, loss in run["curve"][len(run["curve"]) // 20 :]]
    if tail:
        axes.set_ylim(min(tail) - 0.03 * (max(tail) - min(tail)), max(tail))


def _draw_gaps(axes: Axes, bf16: Curves, others: Curves) -> None:
    """Validation losses minus those of BF16 with the same seed, at the steps that all runs have, the first left out."""
    steps = sorted(set.intersection(*({s for s, _ in run["val_curve"]} for run in (*bf16, *others))))[1:]
    if not bf16 or not steps:
        return
    seeds = {run["seed"]: [dict(run["val_curve"])[s] for s in steps] for run in bf16}
    mean = [statistics.fmean(values) for values in zip(*seeds.values(), strict=True)]
    low, high = ([f(v) - m for v, m in zip(zip(*seeds.values(), strict=True), mean, strict=True)] for f in (min, max))
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, lw=0, label="BF16 seeds around their mean")
    for runs, (colour, dash) in zip(_by_rule(others).values(), LOOKS, strict=False):
        gaps = [
            [dict(run["val_curve"])[s] - twin for s, twin in zip(steps, seeds[run["seed"]], strict=True)]
            for run in runs
            if run["seed"] in seeds
        ]
        for values in gaps if len(gaps) > 1 else ():
            axes.plot(steps, values, "D", ms=2.8, color=colour, alpha=0.5)
        if gaps:
            values = [statistics.fmean(v) for v in zip(*gaps, strict=True)]
            axes.plot(steps, values, "D", ls=dash, ms=4.5, lw=1.2, color=colour)
    axes.axhline(0, color=INK, lw=0.9, zorder=1)
    axes.set_title("Validation loss minus BF16 of the same seed", loc="left", size=11.5, color=INK)
    axes.set_xlabel("training step", color=MUTED)
    # the colours are named above
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 0.985))


def _by_rule(runs: Curves) -> dict[str, Curves]:
    return {
        recipe: [run for run in runs if run["recipe"] == recipe] for recipe in dict.fromkeys(r["recipe"] for r in runs)
    }


def _label(recipe: str, runs: Curves) -> str:
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return f"{recipe}, seed{'s' * (len(runs) > 1)} {seeds}"


def _smoothed(run: dict[str, Any]) -> tuple[list[int], tuple[float, ...]]:
    steps = [step for step, _ in run["curve"]]
    return steps, trailing_mean([loss for _, loss in run["curve"]], SMOOTH)


def _subtitle(found: dict[str, Any], model: str) -> str:
    lines = [v["line"] for v in found["verdicts"] if v["name"].startswith(f"{model} ")]
    # Whole lines do not fit; each says its model, which the title has said.
    return ";  ".join(line.removeprefix(f"{model} ").split(" at step")[0] for line in lines)


def _provenance(environment: dict[str, Any], runs: Curves) -> str:
    used = environment["versions"]
    stack = ", ".join(f"{name} {used[name]}" for name in ("torchtitan", "torch", "torchao") if name in used)
    tokens = f"{runs[0]['steps']:,} steps, {runs[0]['tokens'] / 1e6:.1f} M tokens a run"
    return f"{tokens}   |   {environment['gpu']}, {environment['date']}   |   {stack}"


def main() -> None:
    """See the module's docstring."""
    path = Path(sys.argv[1])
    found = json.loads(path.read_text())
    for model in dict.fromkeys(run["model"] for run in found["runs"]):
        plot_parity(found, model, path.with_name(f"{path.stem}_{model}.png"))


if __name__ == "__main__":
    main()
