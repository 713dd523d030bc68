"""May two runs be compared? Same steps, seed, model and data, or a sentence that says what differs."""

import math
from collections.abc import Sequence
from typing import Any

from recipes.run_info import config_differences
from recipes.runs import NAMES, TAGS, MismatchError, Run, RunError

# What an FP8 run and its BF16 twin differ in.
_EXPECTED_DIFFERENCES = ("model.converters", "fp8.")


def check_comparable(a: Run, b: Run) -> list[str]:
    """Notes on what two comparable runs differ in, or what could not be checked.

    Raises:
        RunError: the runs do not belong side by side.
    """
    _check_folders(a, b, "RUN_A and RUN_B")
    last = _last_common_step(a, b)
    notes = [*_ends(a, b, last), *_unmatched_steps(a, b), *_validation_steps(a, b, last)]
    stock = [run.label for run in (a, b) if run.info is None]
    if stock:
        return [*notes, f"No run.json in {' and '.join(stock)}: seed and data could not be checked."]
    _check_start(a.info, b.info)
    _check_data(a.info, b.info)
    return [*notes, *_other_differences(a.info, b.info)]


def check_band(reference: Run, others: Sequence[Run], seeds: Sequence[Run]) -> list[str]:
    """Notes on the runs that shall make a band, all of them like `reference` but for their seeds.

    Raises:
        RunError: a band run is one of the compared ones, repeats the reference, broke, or is of other model or data.
    """
    notes = []
    for seed in seeds:
        for run in (reference, *others, *(s for s in seeds if s is not seed)):
            _check_folders(seed, run, f"the band run {seed.label} and {run.label}")
        _check_finite(seed)
        _last_common_step(reference, seed)
        if reference.info is None or seed.info is None:
            notes.append(f"Band run {seed.label}: without both run.json, seed, model and data could not be checked.")
            continue
        _check_data(reference.info, seed.info, any_order=True)
        _check_other_seed(reference.info, seed.info, seed.label)
    if len(seeds) == 1:
        notes.append("The band is of two runs: a third one would tell more.")
    return notes


def _check_folders(a: Run, b: Run, names: str) -> None:
    if a.folder.resolve() == b.folder.resolve():
        raise MismatchError(f"{names} are the same folder, {a.folder}: name two runs.")


def _check_finite(seed: Run) -> None:
    for metric in ("loss", "val_loss", "test_loss"):
        bad = [step for step, value in seed.series(TAGS[metric]).items() if not math.isfinite(value)]
        if bad:
            raise MismatchError(f"The band run {seed.label} broke at step {bad[0]} ({NAMES[metric]}): leave it out.")


def _check_other_seed(reference: dict[str, Any], seed: dict[str, Any], label: str) -> None:
    """Another layout with the same seed makes a band too; the same run again only shows what is not deterministic."""
    _check_model(reference, seed)
    if reference["converters"] != seed["converters"]:
        raise MismatchError(
            f"The band run {label} has converters {seed['converters']} and RUN_A {reference['converters']}: "
            "a band is of runs in the precision of RUN_A."
        )
    if not config_differences(reference["config"], seed["config"]) and reference["world_size"] == seed["world_size"]:
        raise MismatchError(
            f"The band run {label} repeats RUN_A, seed {seed['seed']}: train it with another debug.seed."
        )


def _last_common_step(a: Run, b: Run) -> int:
    for run in (a, b):
        if not run.series(TAGS["loss"]):
            raise RunError(f"{run.label} has no training loss ({TAGS['loss']}) in its events.")
    common = a.series(TAGS["loss"]).keys() & b.series(TAGS["loss"]).keys()
    if not common:
        raise RunError(f"{a.label} and {b.label} have no common logged step: train both with one metrics.log_freq.")
    return max(common)


def _ends(a: Run, b: Run, last: int) -> list[str]:
    """Where the runs end, when not at the same step: one is still running, stopped, or broke."""
    ends = {run.label: max(run.series(TAGS["loss"])) for run in (a, b)}
    if len(set(ends.values())) == 1:
        return []
    ways = [f"{run.label} {_state(run)} step {ends[run.label]}{_broke(run, ends[run.label])}" for run in (a, b)]
    return [f"{' and '.join(ways)}: compared up to step {last}."]


def _state(run: Run) -> str:
    """Only a run that came to its end has results in its run.json."""
    return "ends at" if run.info is None or run.ended else "has no end yet and is at"


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
    return [] if final == last else [f"The last common validation is at step {final}, the last common step is {last}."]


def _check_start(a: dict[str, Any], b: dict[str, Any]) -> None:
    if a["seed"] != b["seed"]:
        seeds = f"{a['seed']} and {b['seed']}"
        raise MismatchError(f"The runs do not match in seed: {seeds}; train both with the same debug.seed.")
    if a["seed"] is None:
        raise MismatchError(
            "Neither run set debug.seed, so they began with different weights: train both with one seed."
        )
    _check_model(a, b)


def _check_model(a: dict[str, Any], b: dict[str, Any]) -> None:
    if a["model"] != b["model"]:
        raise MismatchError(
            f"The runs train different models, {a['model']} and {b['model']}: compare runs of one model."
        )


def _check_data(a: dict[str, Any], b: dict[str, Any], any_order: bool = False) -> None:
    """`any_order`: the training documents may come in another order, as those of another seed do."""
    for part, prefix in (("data", ""), ("validation", "validation ")):
        if a[part] is None or b[part] is None:
            continue  # only one run was validated: no validation step is common, which is noted
        mine, other = _flat(a[part], any_order), _flat(b[part], any_order)
        for key in sorted(mine.keys() | other.keys()):
            # An option that is off is as one that an older version did not have.
            if (mine.get(key) or None) != (other.get(key) or None):
                values = f"{mine.get(key)!r} in A and {other.get(key)!r} in B"
                raise MismatchError(
                    f"The runs do not match in data: {prefix}{key} is {values}; train both on the same data."
                )


def _flat(data: dict[str, Any], any_order: bool) -> dict[str, Any]:
    """With each option of [data] by its name."""
    options = {f"[data] {key}": value for key, value in (data.get("options") or {}).items()}
    if any_order:
        options.pop("[data] shuffle_seed", None)
    return {key: value for key, value in data.items() if key != "options"} | options


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
