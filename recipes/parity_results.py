"""What a parity test found, as JSON: every run's curves and costs; verdicts are made in parity_verdicts.py."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from recipes.parity_arms import Arm
from recipes.parity_verdicts import runs_of, verdicts, worst_ratio
from recipes.run_info import versions
from recipes.runs import TAGS, Run, Series, read_run

CURVE_POINTS = 200


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
        "verdicts": verdicts(read),
    }


def _reference(arm: Arm, read: dict[Arm, Run]) -> Run | None:
    """The BF16 run that an arm's gradient norms are held against: of its seed, or, for a BF16 run, the first seed."""
    seeds = runs_of(arm.model, "bf16", read)
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
        "grad_norm_ratio": None if reference is None else worst_ratio([reference], [run]),
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
