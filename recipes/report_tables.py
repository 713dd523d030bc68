"""The tables that a run prints: what was converted, before the first step, and what came of it, at the end."""

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from converters.selection import ConversionReport, ConvertedWeight
from recipes.run_info import Point

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the end table shows. None: the run did not get that far, or does not measure it."""

    steps_done: int
    steps_planned: int
    loss: Point | None
    """the last logged training loss"""
    val_loss: Point | None
    test_loss: Point | None
    non_finite_step: int | None
    """the one that stopped the run"""
    tokens_per_second: float | None
    """median of one device, without the first logged step"""
    peak_memory_gib: float | None
    mfu: str
    folder: str
    tensorboard: str
    converters: tuple[str, ...]

    def results(self) -> dict[str, Any]:
        """For run.json."""
        losses = {"training": self.loss, "validation": self.val_loss, "test": self.test_loss}
        return {
            "steps": self.steps_done,
            "non_finite_step": self.non_finite_step,
            **{name: None if point is None else point.as_dict() for name, point in losses.items()},
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_gib": self.peak_memory_gib,
        }


def conversion_table(reports: list[ConversionReport]) -> Group:
    """What each converter switched to FP8 and what it left out; says so when there was no converter."""
    if not reports:
        return Group(Text("No converter: every layer trains in the model's own precision.", style="bold"))
    return Group(*(part for report in reports for part in (_title(report), _converted(report), _skipped(report))))


def _title(report: ConversionReport) -> Text:
    done = f"{len(report.converted)} weights in FP8, recipe {report.recipe}, {report.backend} backend"
    return Text("\n  ".join([f"{report.converter}: {done}", *report.notes]), style="bold green")


def _converted(report: ConversionReport) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("converted", overflow="fold")
    dims = " x ".join("ENK"[-len(report.converted[0].shape) :]) if report.converted else "shape"
    for heading in (dims, "kept as", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    notes = any(weight.note for weight in report.converted)
    if notes:
        table.add_column("note", overflow="fold")
    for group in _alike(report.converted):
        first = group[0]
        shape, kept = " x ".join(map(str, first.shape)), str(first.dtype).removeprefix("torch.")
        memory = _memory(sum(_bytes(weight) for weight in group))
        for i, name in enumerate(collapse(weight.fqn for weight in group)):
            table.add_row(name, *((shape, kept, memory) if i == 0 else ("", "", "")), *([first.note] if notes else []))
    return table


def _skipped(report: ConversionReport) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("left as it is", overflow="fold")
    table.add_column("why", overflow="fold")
    by_reason: dict[str, list[str]] = {}
    for module in report.skipped:
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
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 1024**2:.1f} MiB"


def collapse(fqns: Iterable[str]) -> list[str]:
    """Names with their layer numbers and last components folded together.

    layers.0.moe.experts.w1, layers.1.moe.experts.w1, and the same of w3 -> layers.{0..1}.moe.experts.{w1,w3}. Only the
    first number of a name is folded, and last components only where they have the same numbers.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for fqn in fqns:
        parts = fqn.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        head, tail = (fqn, "") if at is None else (".".join(parts[:at]), ".".join(parts[at + 1 :]))
        numbers.setdefault((head, tail), []).extend([] if at is None else [int(parts[at])])
    folded: dict[str, list[str]] = {}
    for (head, tail), found in numbers.items():
        name = ".".join(part for part in (head, _ranges(found), tail) if part)
        stem, _, last = name.rpartition(".")
        folded.setdefault(stem, []).append(last)
    return [_join(stem, lasts) for stem, lasts in folded.items()]


def _join(stem: str, lasts: list[str]) -> str:
    last = lasts[0] if len(lasts) == 1 else "{" + ",".join(lasts) + "}"
    return f"{stem}.{last}" if stem else ", ".join(lasts)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> {0..2,5}; one number stays bare; none is empty."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}..{high}" for low, high in runs]
    bare = len(runs) <= 1 and "".join(texts).isdigit()
    return texts[0] if bare else "{" + ",".join(texts) + "}" if texts else ""


def end_table(summary: RunSummary) -> Table:
    """Losses, speed, memory and where everything lies. Every number can be followed to the folder it names."""
    done = summary.steps_done >= summary.steps_planned
    title = f"{'Trained' if done else 'Stopped after'} {summary.steps_done} of {summary.steps_planned} steps"
    colour = "bold green" if done else "bold red"
    table = Table(title=title, title_justify="left", title_style=colour, show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row("training loss", _loss(summary.loss))
    table.add_row("validation loss", _loss(summary.val_loss, perplexity=True))
    if summary.test_loss is not None:
        table.add_row("test loss", _loss(summary.test_loss, perplexity=True))
    stop = summary.non_finite_step
    stopped = "0" if stop is None else Text(f"1, step {stop}: the run stopped there", style="bold red")
    table.add_row("non-finite steps", stopped)
    speed = summary.tokens_per_second
    table.add_row("tokens/s a device", "n/a" if speed is None else f"{speed:,.0f} (median)")
    memory = summary.peak_memory_gib
    table.add_row("peak memory a device", "n/a" if memory is None else f"{memory:.2f} GiB")
    table.add_row("MFU", summary.mfu)
    table.add_row("run", Text(str(summary.folder)))
    table.add_row("curves", Text(f"tensorboard --logdir {shlex.quote(str(summary.tensorboard))}"))
    folder = shlex.quote(str(summary.folder))
    pair = f"BF16_RUN {folder}" if summary.converters else f"{folder} FP8_RUN"
    table.add_row("compare", Text(f"python -m recipes.compare {pair}"))
    return table


def _loss(point: Point | None, perplexity: bool = False) -> Text | str:
    if point is None:
        return "n/a"
    text = f"{point.loss:.5f} at step {point.step}"
    text += f", perplexity {point.perplexity:,.4f}" if perplexity else ""
    return text if math.isfinite(point.loss) else Text(text, style="bold red")
