"""The tables of a comparison: every metric at matched steps, a summary, and the verdict."""

import math

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.compare_facts import provenance
from recipes.compare_numbers import Comparison, Report
from recipes.compare_pairs import Pair
from recipes.run_info import perplexity
from recipes.runs import NAMES

MAX_ROWS = 12

Columns = dict[str, list[str]]
"""heading -> one cell a row"""

Row = tuple[str, str, str, str, str, str]
"""what, A, B, B - A, B / A, band"""


def print_report(report: Report, console: Console) -> None:
    """Prints each comparison's tables, what each run was with which versions, notes, and a line of verdict each."""
    for comparison in report.comparisons:
        _print_comparison(comparison, console)
    for run in report.runs:
        console.print(Text(f"{run.label}: {provenance(run)}", style="dim"), soft_wrap=True)
    for note in [*notes(report), *([band_note(report)] if report.seeds else [])]:
        console.print(Text(f"Note: {note}", style="yellow"))
    for comparison in report.comparisons:
        colour = {True: "bold green", False: "bold red", None: "bold"}[comparison.passed]
        console.print(Text(comparison.verdict, style=colour), soft_wrap=True)
        for line in comparison.exceeded:
            console.print(Text(f"FAIL: {line}", style="bold red"), soft_wrap=True)


def notes(report: Report) -> list[str]:
    """What the runs differ in or could not be checked for, and what gaps are held against where nothing was given."""
    found = dict.fromkeys(note for comparison in report.comparisons for note in comparison.notes)
    if not report.seeds and not report.comparisons[0].limits.given:
        found["Tolerance: 0.25 % of the loss, as there are no runs of other seeds (--band) and no limits."] = None
    return list(found)


def smoothing_note(comparison: Comparison) -> str:
    """What "smoothed" means, in logged steps and in training steps."""
    steps, smooth = comparison.pairs["loss"].steps, comparison.limits.smooth
    width = steps[-1] - steps[-smooth - 1] if len(steps) > smooth else steps[-1]
    return f"mean over the last {smooth} common logged steps ({width} training steps at the end)"


def band_note(report: Report) -> str:
    """Which runs make the band and how."""
    names = ", ".join(run.label for run in (report.reference, *report.seeds))
    return f"Band: the largest difference between any two of {names} since half of each step, smoothed like the gap."


def _print_comparison(comparison: Comparison, console: Console) -> None:
    """A narrow console gets the columns in several tables."""
    steps = shown_steps(comparison)
    groups = step_columns(comparison, steps)
    together = 10 + sum(max(map(len, [head, *cells])) + 2 for group in groups for head, cells in group.items())
    title = f"A = {comparison.a.label}, B = {comparison.b.label}, gap = B - A, smoothed: {smoothing_note(comparison)}"
    console.print(Text(title, style="bold"))
    for columns in [{k: v for group in groups for k, v in group.items()}] if together <= console.width else groups:
        console.print(_table(steps, columns))
    console.print(_summary(comparison))


def shown_steps(comparison: Comparison) -> list[int]:
    """The steps that get a row: all of them, or the validation steps, or evenly spaced ones with the first and last."""
    loss, val = comparison.pairs["loss"].steps, comparison.pairs["val_loss"].steps
    everything = sorted({*loss, *val})
    if len(everything) <= MAX_ROWS:
        return everything
    if 3 <= len(val) <= MAX_ROWS and val[-1] == everything[-1]:
        return list(val)
    picked = np.linspace(0, len(everything) - 1, MAX_ROWS).round().astype(int)
    return [everything[i] for i in picked]


def step_columns(comparison: Comparison, steps: list[int]) -> list[Columns]:
    """The columns of the step table in groups that belong together."""
    pairs = comparison.pairs
    loss = _columns(pairs["loss"], steps, "loss", "{:.5f}", gap="{:+.5f}", smoothed=comparison.limits.smooth > 1)
    val = _columns(pairs["val_loss"], steps, "val", "{:.5f}", gap="{:+.5f}")
    norm = _columns(pairs["grad_norm"], steps, "norm", "{:.4f}")
    speed = _columns(pairs["tokens_per_second"], steps, "tok/s", "{:,.0f}")
    memory = _columns(pairs["memory_gib"], steps, "GiB", "{:.2f}")
    return [loss | val, norm | speed | memory]


def _columns(pair: Pair, steps: list[int], name: str, number: str, gap: str = "", smoothed: bool = False) -> Columns:
    if not pair.steps:
        return {}
    at = {step: i for i, step in enumerate(pair.steps)}

    def cells(values: tuple[float, ...], form: str) -> list[str]:
        return [form.format(values[at[step]]) if step in at else "" for step in steps]

    columns = {f"{name} A": cells(pair.a, number), f"{name} B": cells(pair.b, number)}
    if gap:
        columns["gap" if name == "loss" else f"{name} gap"] = cells(pair.gap, gap)
    if smoothed:
        columns["smoothed"] = cells(pair.smoothed, gap)
    if pair.band:
        columns["band" if name == "loss" else f"{name} band"] = cells(pair.band, "{:.5f}")
    return columns


def _table(steps: list[int], columns: Columns) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    for heading in ("step", *columns):
        table.add_column(heading, justify="right", no_wrap=True, style="cyan" if "gap" in heading else None)
    for i, step in enumerate(steps):
        table.add_row(str(step), *(cells[i] for cells in columns.values()))
    return table


def _summary(comparison: Comparison) -> Table:
    """Final and largest gaps, medians and peaks: one row a metric."""
    rows = summary_rows(comparison)
    banded = any(row[5] for row in rows)
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("")
    for heading in ("A", "B", "B - A", "B / A", *(["band"] if banded else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row[: 6 if banded else 5])
    return table


def summary_rows(comparison: Comparison) -> list[Row]:
    """What, A, B, B - A, B / A and the band, as text: first the losses, then what the runs cost."""
    return [*_loss_rows(comparison), *_cost_rows(comparison)]


def _loss_rows(comparison: Comparison) -> list[Row]:
    rows = []
    for metric in ("loss", "val_loss", "test_loss"):
        pair = comparison.pairs[metric]
        if not pair.steps:
            continue
        held = f"{pair.band[-1]:.6f}" if pair.band else ""
        smoothed = metric == "loss" and comparison.limits.smooth > 1
        last = _row(pair.a[-1], pair.b[-1], "{:.6f}")
        rows.append((f"{NAMES[metric]}, step {pair.steps[-1]}", *last, "" if smoothed else held))
        if smoothed:
            label = f"  gap smoothed over {comparison.limits.smooth} steps"
            rows.append((label, "", "", f"{pair.smoothed[-1]:+.6f}", "", held))
        if metric != "loss":
            rows.append(("  perplexity", *_row(perplexity(pair.a[-1]), perplexity(pair.b[-1]), "{:,.4f}"), ""))
        if len(pair.steps) > 1:
            worst = pair.largest()
            at = pair.steps[worst]
            rows.append((f"  largest gap, step {at}", *_row(pair.a[worst], pair.b[worst], "{:.6f}"), ""))
    return rows


def _cost_rows(comparison: Comparison) -> list[Row]:
    pairs, rows = comparison.pairs, []
    for metric, name, form in (
        ("grad_norm", "gradient norm, median", "{:.5f}"),
        ("tokens_per_second", "tokens/s a device, median", "{:,.1f}"),
    ):
        if pairs[metric].steps:
            rows.append((name, *_row(*pairs[metric].medians(), form), ""))
        if metric == "grad_norm" and (norm := comparison.norm_ratio):
            name = f"  smoothed ratio farthest from 1, step {norm.steps[norm.worst]}"
            rows.append((name, "", "", "", f"{norm.values[norm.worst]:.4f}", ""))
    if comparison.load:
        step, share = comparison.load.last
        rows.append(
            (f"rows that go to other experts, {comparison.load.layer}, step {step}", "", "", f"{share:.2%}", "", "")
        )
    if pairs["memory_gib"].steps:
        rows.append(("peak memory a device, GiB", *_row(*pairs["memory_gib"].maxima(), "{:.3f}"), ""))
    peaks = [(run.info or {}).get("mfu_peak") for run in (comparison.a, comparison.b)]
    # An MFU says nothing without the peak it refers to, and two of different peaks do not compare.
    if pairs["mfu_percent"].steps and peaks[0] and peaks[0] == peaks[1]:
        name = f"MFU %, of {peaks[0]['flops'] / 1e12:,.0f} TFLOP/s ({peaks[0]['of']})"
        rows.append((name, *_row(*pairs["mfu_percent"].medians(), "{:.2f}"), ""))
    return rows


def _row(a: float, b: float, form: str) -> tuple[str, str, str, str]:
    """Cells of a, b, b - a and b / a."""
    ratio = b / a if a else math.nan
    return form.format(a), form.format(b), form.replace("{:", "{:+").format(b - a), f"{ratio:.4f}"
