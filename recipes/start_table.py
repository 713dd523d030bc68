"""The table that a run prints before its first step: what was converted, how, and what its FP8 copies take."""

import math
from collections.abc import Iterable, Mapping

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from converters.kept_memory import Kept, kept_memory, most
from converters.numerics import Numerics
from converters.selection import ConversionReport, ConvertedWeight, weights_of
from recipes.folded_names import collapse

GIB = 1024**3


def conversion_reports(model_parts: list[nn.Module]) -> list[ConversionReport]:
    """What the converters left on the model, each report once: pipeline stages are copies of one converted model."""
    found: list[ConversionReport] = []
    for part in model_parts:
        found += [report for report in getattr(part, "conversion_reports", []) if report not in found]
    return found


def start_table(model_parts: list[nn.Module]) -> Group:
    """What each converter switched to FP8 and what it left out; says so when there was no converter.

    model_parts: parallelized, so that memory is that of this rank.
    """
    reports, kept = conversion_reports(model_parts), kept_memory(model_parts)
    if not reports:
        return Group(Text("No converter: every layer trains in the model's own precision.", style="bold"))
    return Group(*(part for r in reports for part in (_title(r, kept), _converted(r, kept), _skipped(r, reports))))


def _title(report: ConversionReport, kept: Mapping[str, Kept]) -> Text:
    done = f"{weights_of(report)} in FP8, recipe {report.recipe}, {report.backend} backend"
    lines = [f"{report.converter}: {done}"]
    if report.numerics is not None:
        lines.append(_settings(report.numerics))
    here = [kept[weight.fqn] for weight in report.converted if weight.fqn in kept]
    for why in dict.fromkeys(k.why for k in here):
        lines.append(f"FP8 copies kept on this rank: {_amount([k for k in here if k.why == why])} ({why})")
    return Text("\n  ".join([*lines, *report.notes]), style="bold green")


def _settings(n: Numerics) -> str:
    sums = "" if n.backend == "hopper" else f" (the {n.backend} backend sums in float32)"
    if n.backend == "hopper" and n.wgrad == "bf16" and n.accumulate == "precise_wgrad":  # the default of linear layers
        sums = " (as fast: sums of BF16 products are float32)"
    return f"wgrad = {n.wgrad}, cache = {str(n.cache).lower()}, accumulate = {n.accumulate}{sums}"


def _amount(kept: list[Kept]) -> str:
    between, peak = sum(k.between for k in kept), most(kept)
    if between == peak:
        return _memory(between)
    return f"{_memory(between)} between steps, up to {_memory(peak)} in one"


def _converted(report: ConversionReport, kept: Mapping[str, Kept]) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("converted", overflow="fold")
    dims = " x ".join("ENK"[-len(report.converted[0].shape) :]) if report.converted else "shape"
    for heading in (dims, "kept as", "parameters", "FP8 here"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = any(weight.note for weight in report.converted)
    if notes:
        table.add_column("note", overflow="fold")
    for group in _alike(report.converted):
        first = group[0]
        shape, dtype = " x ".join(map(str, first.shape)), str(first.dtype).removeprefix("torch.")
        cells = shape, dtype, _memory(sum(_bytes(weight) for weight in group)), _peak(report, group, kept)
        for i, name in enumerate(collapse(weight.fqn for weight in group)):
            table.add_row(name, *(cells if i == 0 else [""] * len(cells)), *([first.note] if notes else []))
    return table


def _peak(report: ConversionReport, group: list[ConvertedWeight], kept: Mapping[str, Kept]) -> str:
    if report.backend == "emulated":  # linear layers keep weights of the plain kind then
        return _memory(0)
    here = [kept[weight.fqn] for weight in group if weight.fqn in kept]
    return _memory(most(here)) if here else "other ranks"


def _skipped(report: ConversionReport, reports: list[ConversionReport]) -> Table:
    """What no converter took, as this one says it; what another one took stands in that one's table."""
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("left as it is", overflow="fold")
    table.add_column("why", overflow="fold")
    by_reason: dict[str, list[str]] = {}
    taken = {weight.fqn.rpartition(".")[0] for r in reports for weight in r.converted}
    for module in report.skipped:
        if module.fqn not in taken:
            by_reason.setdefault(module.reason, []).append(module.fqn)
    for reason, fqns in by_reason.items():
        table.add_row(", ".join(collapse(fqns)), reason)
    if not by_reason:
        table.add_row("nothing", "")
    return table


def _alike(weights: Iterable[ConvertedWeight]) -> list[list[ConvertedWeight]]:
    """Weights of the same shape, dtype and note together, in order of appearance."""
    groups: dict[tuple, list[ConvertedWeight]] = {}
    for weight in weights:
        groups.setdefault((weight.shape, weight.dtype, weight.note), []).append(weight)
    return list(groups.values())


def _bytes(weight: ConvertedWeight) -> int:
    return math.prod(weight.shape) * getattr(torch, weight.dtype.removeprefix("torch.")).itemsize


def _memory(size: int) -> str:
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / 1024**2:.1f} MiB" if size >= 1024**2 else f"{size / 1024:.1f} KiB" if size else "none"
