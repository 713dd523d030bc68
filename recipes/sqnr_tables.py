"""What `python -m recipes.sqnr` prints: the damage, worst first, the routing, gradient norms, one line of verdict."""

import math

from rich.console import Console
from rich.table import Table

from recipes.sqnr_measure import Report, Row
from recipes.sqnr_twins import Twins


def print_report(report: Report, twins: Twins, console: Console, rows: int) -> None:
    """Prints the tables; `rows` limits the first, 0 is all of it."""
    shown = report.rows[:rows] if rows else report.rows
    console.print(_damage(shown, len(report.rows)))
    if report.routing:
        console.print(_routing(report))
    console.print(_norms(report))
    reference = " + ".join(twins.converters["reference"]) or "no converter"
    console.print(f"{' + '.join(twins.converters['fp8'])} against {reference}: {verdict(report)}", highlight=False)


def verdict(report: Report) -> str:
    """One line: low damage, or what is worst."""
    loss = f"loss {report.loss[1]:.5f} against {report.loss[0]:.5f} ({report.loss[1] - report.loss[0]:+.5f})"
    before, after = report.norms["total"]
    norm = f"gradient norm {after:.4g} against {before:.4g} ({_gap(before, after)})"
    facts = f"logits {_db(report.logits_db)}, {loss}, {norm}"
    if report.low_damage:
        return f"low damage. {facts}."
    return f"DAMAGE. {facts}. Worst: {_label(report.worst)}, {_db(report.worst.sqnr_db)}; {_cause(report)}."


def _cause(report: Report) -> str:
    """What a reader should look at first."""
    alone = [row for row in report.rows if row.alone_db is not None]
    worst = min(alone, key=lambda row: -math.inf if math.isnan(row.alone_db) else row.alone_db, default=None)
    parts = [] if worst is None else [f"lowest on its own: {worst.name}, {_db(worst.alone_db)}"]
    zeros = [row.name for row in report.rows if row.kind == "gradient" and row.fp8_norm == 0 < row.reference_norm]
    if zeros:
        parts.append(f"{len(zeros)} gradients are all zeros in FP8, that of {zeros[0]} among them")
    shares = [r.choices for r in report.routing]
    if shares and min(shares) < 1:
        parts.append(f"{100 * (1 - min(shares)):.2f} % of the choices of {_flipped(report)} differ")
    return ", ".join(parts) or "no module stands out"


def _flipped(report: Report) -> str:
    return min(report.routing, key=lambda r: r.choices).name


def _damage(rows: tuple[Row, ...], total: int) -> Table:
    title = f"Damage, worst first ({len(rows)} of {total} tensors; SQNR in dB)"
    table = Table(title=title, title_justify="left")
    for name in ("what", "tensor", "in FP8"):
        table.add_column(name, no_wrap=True)
    for name in ("SQNR", "same route", "alone", "norm", "of twin"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            row.name,
            "yes" if row.in_fp8 else "",
            _db(row.sqnr_db, ""),
            _db(row.same_route_db, ""),
            _db(row.alone_db, ""),
            f"{row.fp8_norm:.4g}",
            _gap(row.reference_norm, row.fp8_norm),
        )
    return table


def _routing(report: Report) -> Table:
    table = Table(title="Routing that both agree on", title_justify="left")
    table.add_column("MoE")
    table.add_column("choices", justify="right")
    table.add_column("tokens with all choices equal", justify="right")
    for r in report.routing:
        table.add_row(r.name, f"{100 * r.choices:.3f} %", f"{100 * r.tokens:.3f} %")
    return table


def _norms(report: Report) -> Table:
    table = Table(title="Gradient norms", title_justify="left")
    table.add_column("group")
    for name in ("high precision", "FP8", "difference"):
        table.add_column(name, justify="right")
    for group, (before, after) in report.norms.items():
        table.add_row(group, f"{before:.5g}", f"{after:.5g}", _gap(before, after))
    return table


def _label(row: Row) -> str:
    return {"output": "the output of ", "output gradient": "the gradient at ", "gradient": "the gradient of "}[
        row.kind
    ] + row.name


def _db(value: float | None, unit: str = " dB") -> str:
    if value is None:
        return ""
    return "equal" if value == math.inf else f"{value:.1f}{unit}"


def _gap(before: float, after: float) -> str:
    return "-" if before == 0 else f"{100 * (after / before - 1):+.2f} %"
