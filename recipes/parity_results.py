"""What a parity test found, as JSON: every run's curves and costs, and each FP8 arm held against the BF16 seeds."""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from recipes.compare_band import band, spread
from recipes.compare_pairs import match, ratio
from recipes.compare_verdict import MIN_STEPS, UNKNOWN
from recipes.parity_arms import Arm
from recipes.run_info import versions
from recipes.runs import TAGS, Run, Series, read_run

CURVE_POINTS = 200
# Of the logged gradient norms: at every tenth step these are 200 steps.
NORM_WINDOW = 20
# The gap of issue and README: what FP8 may differ by from the mean of the BF16 seeds, in nats a token.
TARGET = 0.005


def environment(jobs: int, command: Sequence[str]) -> dict[str, Any]:
    """Date, GPU, versions and command (its arguments are given) of a result file."""
    return {
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": versions(),
        "command": " ".join(["python -m recipes.parity", *command]),
        "runs_at_a_time": jobs,
    }


def collect(arms: Sequence[Arm], folder: Path) -> dict[str, Any]:
    """`runs` and `verdicts` of the arms that are done, in the order of models, then BF16 first."""
    ordered = sorted(arms, key=lambda arm: (arm.model, arm.recipe != "bf16", arm.recipe, arm.seed))
    read = {arm: read_run(arm.home(folder)) for arm in ordered if arm.is_done(folder)}
    return {
        "runs": [_run_json(arm, run, _reference(arm, read)) for arm, run in read.items()],
        "verdicts": [found for arm in read if arm.recipe != "bf16" and (found := _verdict(arm, read))],
    }


def _bf16(model: str, read: dict[Arm, Run]) -> dict[int, Run]:
    """Seed -> BF16 run of a model."""
    return {arm.seed: run for arm, run in read.items() if arm.model == model and arm.recipe == "bf16"}


def _reference(arm: Arm, read: dict[Arm, Run]) -> Run | None:
    """The BF16 run that an arm's gradient norms are held against: of its seed, or, for a BF16 run, the first seed."""
    seeds = _bf16(arm.model, read)
    if arm.recipe != "bf16":
        return seeds.get(arm.seed)
    first = min(seeds)
    return None if arm.seed == first else seeds[first]


def _run_json(arm: Arm, run: Run, reference: Run | None) -> dict[str, Any]:
    speed, data = run.series(TAGS["tokens_per_second"]), run.info["data"]
    return {
        "name": arm.name,
        "model": arm.model,
        "recipe": arm.recipe,
        "seed": arm.seed,
        "steps": arm.steps,
        "tokens": arm.steps * data["global_batch_size"] * data["seq_len"],
        "final_val_loss": _last(run.series(TAGS["val_loss"])),
        "final_test_loss": _last(run.series(TAGS["test_loss"])),
        "grad_norm_ratio": None if reference is None else worst_ratio(run, reference),
        # The runs share the GPU: a speed among these is none to quote.
        "tokens_per_second": round(sorted(speed.values())[len(speed) // 2]),
        "peak_gib": round(max(run.series(TAGS["memory_gib"]).values()), 2),
        "val_curve": [[step, round(loss, 5)] for step, loss in run.series(TAGS["val_loss"]).items()],
        "curve": thinned(run.series(TAGS["loss"])),
    }


def _last(series: Series) -> float | None:
    return series[max(series)] if series else None


def thinned(series: Series) -> list[list[float]]:
    """[step, loss] pairs, at most CURVE_POINTS and the last step among them."""
    steps = sorted(series)
    every = -(-len(steps) // CURVE_POINTS)
    return [[step, round(series[step], 5)] for step in steps[::-1][::every][::-1]]


def worst_ratio(run: Run, reference: Run) -> dict[str, Any] | None:
    """The ratio of the smoothed gradient norms that is farthest from 1, its step, and what it was taken against."""
    pair = match(reference.series(TAGS["grad_norm"]), run.series(TAGS["grad_norm"]), 1)
    smooth = min(NORM_WINDOW, max(1, len(pair.steps) // 2))
    found = ratio(pair, smooth)
    if found is None:
        return None
    worst = {"ratio": round(found.values[found.worst], 5), "step": found.steps[found.worst]}
    return worst | {"window": smooth, "against": reference.label}


def _verdict(arm: Arm, read: dict[Arm, Run]) -> dict[str, Any] | None:
    """The arm's last validation loss against the mean of the BF16 seeds and the band they make; None without BF16."""
    mine = read[arm].series(TAGS["val_loss"])
    seeds = {seed: run.series(TAGS["val_loss"]) for seed, run in _bf16(arm.model, read).items()}
    steps = sorted(set(mine).intersection(*seeds.values()))
    if not seeds or not steps:
        return None
    last = steps[-1]
    mean = sum(series[last] for series in seeds.values()) / len(seeds)
    gap = mine[last] - mean
    width = band(steps, spread(list(seeds.values()), steps, 1))[-1] if len(seeds) > 1 else None
    word = _word(gap, width) if arm.steps >= MIN_STEPS else UNKNOWN
    held = "one BF16 seed, so no band" if width is None else f"band {width:.4f}"
    return {
        "name": arm.name,
        "gap": round(gap, 6),
        "gap_to_same_seed": round(mine[last] - seeds[arm.seed][last], 6) if arm.seed in seeds else None,
        "bf16_mean": round(mean, 6),
        "bf16_seeds": {str(seed): round(series[last], 6) for seed, series in seeds.items()},
        "band": None if width is None else round(width, 6),
        "verdict": word,
        "line": f"{arm.name} - BF16 mean = {gap:+.4f} at step {last}, {held}: {word} (validation loss)",
    }


def _word(gap: float, width: float | None) -> str:
    """Inside the band is the same; without a band, within TARGET is. A nan is worse."""
    if math.isnan(gap):
        return "worse"
    if abs(gap) <= (TARGET if width is None else width):
        return "same"
    return "worse" if gap > 0 else "better"
