"""May two runs be compared? Same steps, seed, model and data, or a sentence that says what differs."""

import math
from typing import Any

from recipes.run_info import config_differences
from recipes.runs import NAMES, TAGS, Run, RunError

# What an FP8 run and its BF16 twin differ in.
_EXPECTED_DIFFERENCES = ("model.converters", "fp8.")


def check_comparable(a: Run, b: Run) -> list[str]:
    """Notes on what two comparable runs differ in, or what could not be checked.

    Raises:
        RunError: the runs do not belong side by side.
    """
    if a.folder.resolve() == b.folder.resolve():
        raise RunError(f"RUN_A and RUN_B are the same folder, {a.folder}: name two runs.")
    last = _check_last_step(a, b)
    notes = [*_unmatched_steps(a, b), *_validation_steps(a, b, last)]
    stock = [run.label for run in (a, b) if run.info is None]
    if stock:
        return [*notes, f"No run.json in {' and '.join(stock)}: seed and data could not be checked."]
    _check_start(a.info, b.info)
    _check_data(a.info, b.info)
    return [*notes, *_other_differences(a.info, b.info)]


def _check_last_step(a: Run, b: Run) -> int:
    lasts = []
    for run in (a, b):
        if not run.series(TAGS["loss"]):
            raise RunError(f"{run.label} has no training loss ({TAGS['loss']}) in its events.")
        lasts.append(max(run.series(TAGS["loss"])))
    if lasts[0] != lasts[1]:
        ends = " and ".join(
            f"{run.label} ends at step {last}{_broke(run, last)}" for run, last in zip((a, b), lasts, strict=True)
        )
        raise RunError(f"The runs do not match in steps: {ends}; train both for the same number of steps.")
    return lasts[0]


def _broke(run: Run, last: int) -> str:
    """A run stops at its first nan or inf; then that is why it is shorter."""
    bad = [f"{NAMES[m]} {v}" for m in NAMES if not math.isfinite(v := run.series(TAGS[m]).get(last, 0.0))]
    return f" ({', '.join(bad)})" if bad else ""


def _unmatched_steps(a: Run, b: Run) -> list[str]:
    steps_a, steps_b = (set(run.series(TAGS["loss"])) for run in (a, b))
    only = {a.label: len(steps_a - steps_b), b.label: len(steps_b - steps_a)}
    alone = [f"{count} only in {label}" for label, count in only.items() if count]
    return [f"{len(steps_a & steps_b)} logged steps match; {' and '.join(alone)}, left out."] if alone else []


def _validation_steps(a: Run, b: Run, last: int) -> list[str]:
    validated = [set(run.series(TAGS["val_loss"])) for run in (a, b)]
    if not any(validated):
        return ["Neither run was validated: the training loss is of data that the models learn from."]
    common = validated[0] & validated[1]
    if not common:
        return ["No validation step is common to both runs: their validation losses are not compared."]
    final = max(common)
    return [] if final == last else [f"The last common validation is at step {final}, the runs end at step {last}."]


def _check_start(a: dict[str, Any], b: dict[str, Any]) -> None:
    if a["seed"] != b["seed"]:
        seeds = f"{a['seed']} and {b['seed']}"
        raise RunError(f"The runs do not match in seed: {seeds}; train both with the same debug.seed.")
    if a["seed"] is None:
        raise RunError("Neither run set debug.seed, so they began with different weights: train both with one seed.")
    if a["model"] != b["model"]:
        raise RunError(f"The runs train different models, {a['model']} and {b['model']}: compare runs of one model.")


def _check_data(a: dict[str, Any], b: dict[str, Any]) -> None:
    for part, prefix in (("data", ""), ("validation", "validation ")):
        mine, other = a[part], b[part]
        if mine is None or other is None:
            continue  # only one run was validated: no validation step is common, which is noted
        for key in sorted(mine.keys() | other.keys()):
            if mine.get(key) != other.get(key):
                values = f"{mine.get(key)!r} in A and {other.get(key)!r} in B"
                raise RunError(
                    f"The runs do not match in data: {prefix}{key} is {values}; train both on the same data."
                )


def _other_differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Everything else that may explain a gap: other config keys, versions, the machine."""
    found = {
        k: v for k, v in config_differences(a["config"], b["config"]).items() if not k.startswith(_EXPECTED_DIFFERENCES)
    }
    versions = {name: (a["versions"].get(name), b["versions"].get(name)) for name in a["versions"] | b["versions"]}
    found |= {name: pair for name, pair in versions.items() if pair[0] != pair[1]}
    found |= {key: (a[key], b[key]) for key in ("device", "world_size") if a[key] != b[key]}
    return (
        ["Also different: " + "; ".join(f"{k} {v!r} and {w!r}" for k, (v, w) in found.items()) + "."] if found else []
    )
