"""The tables of a comparison: every metric at matched steps, a summary, and the verdict."""

import math

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.compare_numbers import Comparison, Pair
from recipes.run_info import perplexity
from recipes.runs import NAMES

MAX_ROWS = 12

Columns = dict[str, list[str]]
"""heading -> one cell a row"""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the tables, the notes and the verdict; a narrow console gets the columns in several tables."""
    steps = shown_steps(comparison)
    groups = step_columns(comparison, steps)
    together = 10 + sum(max(map(len, [head, *cells])) + 2 for group in groups for head, cells in group.items())
    title = f"A = {comparison.a.label}, B = {comparison.b.label}, gap = B - A"
    console.print(Text(title, style="bold"))
    for columns in [{k: v for group in groups for k, v in group.items()}] if together <= console.width else groups:
        console.print(_table(steps, columns))
    console.print(_summary(comparison))
    for note in comparison.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    colour = {True: "bold green", False: "bold red", None: "bold"}[comparison.passed]
    console.print(Text(comparison.verdict, style=colour))


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
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("")
    for heading in ("A", "B", "B - A", "B / A"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _loss_rows(comparison) + _cost_rows(comparison):
        table.add_row(*row)
    return table


def _loss_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    rows = []
    for metric in ("loss", "val_loss", "test_loss"):
        pair = comparison.pairs[metric]
        if not pair.steps:
            continue
        rows.append((f"{NAMES[metric]}, step {pair.steps[-1]}", *_row(pair.a[-1], pair.b[-1], "{:.6f}")))
        if metric == "loss" and comparison.limits.smooth > 1:
            label = f"  gap smoothed over {comparison.limits.smooth} steps"
            rows.append((label, "", "", f"{pair.smoothed[-1]:+.6f}", ""))
        if metric != "loss":
            rows.append(("  perplexity", *_row(perplexity(pair.a[-1]), perplexity(pair.b[-1]), "{:,.4f}")))
        if len(pair.steps) > 1:
            worst = pair.largest()
            rows.append((f"  largest gap, step {pair.steps[worst]}", *_row(pair.a[worst], pair.b[worst], "{:.6f}")))
    return rows


def _cost_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    pairs, rows = comparison.pairs, []
    for metric, name, form in (
        ("grad_norm", "gradient norm, median", "{:.5f}"),
        ("tokens_per_second", "tokens/s a device, median", "{:,.1f}"),
    ):
        if pairs[metric].steps:
            rows.append((name, *_row(*pairs[metric].medians(), form)))
    if pairs["memory_gib"].steps:
        rows.append(("peak memory a device, GiB", *_row(*pairs["memory_gib"].maxima(), "{:.3f}")))
    peaks = [(run.info or {}).get("mfu_peak") for run in (comparison.a, comparison.b)]
    # An MFU says nothing without the peak it refers to, and two of different peaks do not compare.
    if pairs["mfu_percent"].steps and peaks[0] and peaks[0] == peaks[1]:
        name = f"MFU %, of {peaks[0]['flops'] / 1e12:,.0f} TFLOP/s ({peaks[0]['of']})"
        rows.append((name, *_row(*pairs["mfu_percent"].medians(), "{:.2f}")))
    return rows


def _row(a: float, b: float, form: str) -> tuple[str, str, str, str]:
    """Cells of a, b, b - a and b / a."""
    ratio = b / a if a else math.nan
    return form.format(a), form.format(b), form.replace("{:", "{:+").format(b - a), f"{ratio:.4f}"
