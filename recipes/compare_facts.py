"""The tables of a comparison's page: what was run, what differs, validation losses, the figures beside a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipes.compare_numbers import Comparison, Report
from recipes.compare_pairs import Pair
from recipes.run_info import config_differences
from recipes.runs import TAGS, Run


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A table: headings of the columns after the first, and rows of a name and its cells. `text`: cells are words."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, Sequence[str]]]
    text: bool = False


def provenance(run: Run) -> str:
    """Model, data, device and versions of `run`, where its run.json tells them."""
    info = run.info
    if info is None:
        return "Run of stock torchtitan, without run.json: seed, data and versions are not known."
    data, used = info["data"], info["versions"]
    batch = f"{data['global_batch_size']} x {data['seq_len']} tokens a step of {data['dataset']}"
    stack = ", ".join(f"{name} {used[name]}" for name in ("torchtitan", "torch", "torchao") if name in used)
    return f"{info['model']}, {batch}, seed {info['seed']}   |   {_device(info)}   |   {stack}"


def tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    """What, the number, and a word about it."""
    pairs, found = comparison.pairs, []
    for metric, name in (("val_loss", "validation"), ("test_loss", "test")):
        pair = pairs[metric]
        if pair.steps:
            more = f"{pair.b[-1]:.4f} against {pair.a[-1]:.4f}{_band(pair)}"
            found.append((f"{name}, step {pair.steps[-1]:,}", f"{pair.gap[-1]:+.4f}", more))
    loss = pairs["loss"]
    more = f"mean of {comparison.limits.smooth} logged steps{_band(loss)}"
    found.append((f"training, step {loss.steps[-1]:,}", f"{loss.smoothed[-1]:+.4f}", more))
    if norm := comparison.norm_ratio:
        more = f"farthest from 1, at step {norm.steps[norm.worst]:,}"
        found.append(("gradient norm", f"{norm.values[norm.worst]:.4f}x", more))
    if comparison.load:
        step, share = comparison.load.last
        found.append(("rows to other experts", f"{share:.1%}", f"{comparison.load.layer}, step {step:,}"))
    speed, memory = pairs["tokens_per_second"], pairs["memory_gib"]
    if speed.steps and speed.medians()[0]:
        a, b = speed.medians()
        found.append(("speed", f"{b / a:.2f}x", f"{b:,.0f} tokens/s a device"))
    if memory.steps and memory.maxima()[0]:
        a, b = memory.maxima()
        found.append(("peak memory", f"{b / a:.2f}x", f"{b:.2f} GiB a device"))
    return found


def validation_facts(report: Report) -> Facts | None:
    """Validation loss of every run at the steps of the first pair, at most 12 of them, each gap and the band."""
    first = report.comparisons[0].pairs["val_loss"]
    if not first.steps:
        return None
    heads = [run.label for run in report.runs]
    rows = []
    for i in sorted({*np.linspace(0, len(first.steps) - 1, 12).round().astype(int).tolist()}):
        step = first.steps[i]
        cells = [_at(run.series(TAGS["val_loss"]).get(step), ".5f") for run in report.runs]
        for comparison in report.comparisons:
            gaps = dict(zip(comparison.pairs["val_loss"].steps, comparison.pairs["val_loss"].gap, strict=True))
            cells.append(_at(gaps.get(step), "+.5f"))
        cells += [f"{first.band[i]:.5f}"] if first.band else []
        rows.append((f"step {step:,}", cells))
    gaps = [f"gap of {c.b.label}" for c in report.comparisons]
    return Facts(heads=(*heads, *gaps, *(["band"] if first.band else [])), rows=rows)


def run_facts(report: Report) -> Facts:
    """One column a run; rows that no run can fill are left out."""
    columns = [_facts_of(run) for run in report.runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, "") for column in columns]) for name in names]
    return Facts(heads=tuple(run.label for run in report.runs), rows=rows, text=True)


def config_facts(report: Report) -> Facts | None:
    """Config keys in which any run differs from the reference."""
    known = [run for run in report.runs if run.info is not None]
    if len(known) < 2 or report.reference.info is None:
        return None
    reference = report.reference.info["config"]
    differing = [config_differences(reference, run.info["config"]) for run in known[1:]]
    keys = sorted({key for differences in differing for key in differences})
    if not keys:
        return None
    rows = []
    for key in keys:
        own = next(differences[key][0] for differences in differing if key in differences)
        others = [differences[key][1] if key in differences else own for differences in differing]
        rows.append((key, [_shown(own), *map(_shown, others)]))
    return Facts(heads=tuple(run.label for run in known), rows=rows, text=True)


def _facts_of(run: Run) -> dict[str, str]:
    losses = run.series(TAGS["loss"])
    facts = {"last logged step": f"{max(losses):,}" + (", ended" if run.ended else "")}
    speed, memory = run.series(TAGS["tokens_per_second"]), run.series(TAGS["memory_gib"])
    if speed:
        facts["tokens/s a device, median"] = f"{np.median(list(speed.values())[len(speed) > 1 :]):,.1f}"
    if memory:
        facts["peak memory a device"] = f"{max(memory.values()):.3f} GiB"
    info = run.info
    if info is None:
        return facts | {"run.json": "none"}
    data = info["data"]
    return facts | {
        "model": info["model"],
        "converters": ", ".join(info["converters"]) or "none",
        "seed": str(info["seed"]),
        "data": f"{data['dataset']}, {data['global_batch_size']} x {data['seq_len']} tokens a step",
        "device": _device(info),
        "started": str(info["started"]),
        **{f"{name} version": version for name, version in info["versions"].items()},
        "folder": str(run.folder),
    }


def _device(info: dict) -> str:
    return f"{info['world_size']} x {info['device']}" if info["world_size"] > 1 else info["device"]


def _band(pair: Pair) -> str:
    return f", band {pair.band[-1]:.4f}" if pair.band else ""


def _at(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
