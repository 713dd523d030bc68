"""Does a rule end where BF16 ends?  Its runs against the BF16 runs of the same seeds, and the band of all BF16 seeds.

Runs of one seed share their weights and the order of their data, so their difference is sharper than that of two means:
seeds alone differ by the band, and that part of it cancels. With several seeds the mean difference counts, with its
standard error.
"""

import itertools
import math
import statistics
from typing import Any

from recipes.compare_band import band, spread
from recipes.compare_pairs import farthest_from_1, match, ratio
from recipes.compare_verdict import MIN_STEPS, UNKNOWN
from recipes.parity_arms import Arm
from recipes.runs import TAGS, Run, Series

# The gap of issue and README: what FP8 may differ by from BF16, in nats a token.
TARGET = 0.005
# Gradient norms are means over so many steps, of which one in `metrics.log_freq` is logged.
NORM_STEPS = 200


def verdicts(read: dict[Arm, Run]) -> list[dict[str, Any]]:
    """One for each rule of each model that has BF16 runs of its seeds, in the order of `read`."""
    rules = dict.fromkeys((arm.model, arm.recipe) for arm in read if arm.recipe != "bf16")
    return [found for model, recipe in rules if (found := _verdict(model, recipe, read))]


def runs_of(model: str, recipe: str, read: dict[Arm, Run]) -> dict[int, Run]:
    """Seed -> run of one rule, or of BF16."""
    return {arm.seed: run for arm, run in read.items() if (arm.model, arm.recipe) == (model, recipe)}


def _verdict(model: str, recipe: str, read: dict[Arm, Run]) -> dict[str, Any] | None:
    """Of the last validation that all runs share; None without a BF16 run of one of the rule's seeds."""
    mine, bf16 = runs_of(model, recipe, read), runs_of(model, "bf16", read)
    seeds = sorted(mine.keys() & bf16.keys())
    losses, bf16_losses = ({s: run.series(TAGS["val_loss"]) for s, run in runs.items()} for runs in (mine, bf16))
    steps = sorted(set.intersection(*map(set, (*losses.values(), *bf16_losses.values()))))
    if not seeds or not steps:
        return None
    last = steps[-1]
    gaps = [losses[s][last] - bf16_losses[s][last] for s in seeds]
    gap, width = statistics.fmean(gaps), _band([*bf16_losses.values()], steps)
    means = [statistics.fmean(curve[last] for curve in curves.values()) for curves in (losses, bf16_losses)]
    judged = next(arm.steps for arm in read if (arm.model, arm.recipe) == (model, recipe)) >= MIN_STEPS
    word = _word(gap, width) if judged else UNKNOWN
    held = "one BF16 seed, so no band" if width is None else f"band {width:.4f}"
    of = f"mean of seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    name = f"{model} {recipe}"
    worst = worst_ratio([bf16[s] for s in seeds], [mine[s] for s in seeds])
    return {
        "name": name,
        "seeds": seeds,
        "step": last,
        "gap": round(gap, 6),
        "gaps": {str(seed): round(value, 6) for seed, value in zip(seeds, gaps, strict=True)},
        "standard_error": round(statistics.stdev(gaps) / math.sqrt(len(gaps)), 6) if len(gaps) > 1 else None,
        "gap_to_all_seeds": round(means[0] - means[1], 6),
        "bf16_seeds": {str(seed): round(curve[last], 6) for seed, curve in bf16_losses.items()},
        "band": None if width is None else round(width, 6),
        "grad_norm_ratio": worst,
        "verdict": word,
        "line": f"{name} - BF16 = {gap:+.4f} at step {last} ({of}), {held}: {word} (validation loss)",
    }


def _band(curves: list[Series], steps: list[int]) -> float | None:
    return band(steps, spread(curves, steps, 1))[-1] if len(curves) > 1 else None


def _word(gap: float, width: float | None) -> str:
    """`same` is within TARGET, and inside the band if there is one. A nan is worse."""
    if math.isnan(gap):
        return "worse"
    inside = width is None or abs(gap) <= width
    if abs(gap) <= TARGET and inside:
        return "same"
    if width is not None and inside:
        return "inside the band"
    return "worse" if gap > 0 else "better"


def worst_ratio(references: list[Run], runs: list[Run]) -> dict[str, Any] | None:
    """The ratio of the smoothed gradient norms, each a mean over the runs, that is farthest from 1, and its step.

    Only windows that are full count. None without a common step.
    """
    a, b = (_mean([run.series(TAGS["grad_norm"]) for run in side]) for side in (references, runs))
    pair = match(a, b, 1)
    if not pair.steps:
        return None
    window = _window(pair.steps)
    found = ratio(pair, window)
    assert found is not None  # there are steps
    worst = window - 1 + farthest_from_1(found.values[window - 1 :])
    return {
        "ratio": round(found.values[worst], 5),
        "step": found.steps[worst],
        "window": window,
        "against": ", ".join(run.label for run in references),
    }


def _window(steps: tuple[int, ...]) -> int:
    """Logged steps in NORM_STEPS steps, at most half of them. Step 1 is logged out of turn, and the last one too."""
    every = statistics.median_low([b - a for a, b in itertools.pairwise(steps)] or [1])
    return min(max(1, NORM_STEPS // every), max(1, len(steps) // 2))


def _mean(curves: list[Series]) -> Series:
    """The mean of all curves at the steps that all have."""
    steps = sorted(set.intersection(*map(set, curves)))
    return {step: statistics.fmean(curve[step] for curve in curves) for step in steps}
