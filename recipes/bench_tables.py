"""The tables that recipes.bench prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.bench_parts import COLD, WARM, WEIGHTS
from recipes.timing import machine


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _share(tflops: float, environment: dict[str, Any]) -> str:
    peak = environment["peak_tflops"].get("fp8")
    return f"{tflops / peak:.0%}" if peak else ""


def _conditions(environment: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    console.print(
        f"{machine(environment)}, {environment['date']}, {versions}, {environment['numerics']}", highlight=False
    )
    if environment["gpu"] == "none":
        console.print("Without a GPU: BF16 is not compiled, memory is not measured. The times say nothing of a GPU's.")


def show(data: dict[str, Any], console: Console) -> None:
    """One row a case: times, times BF16, TFLOP/s and share of the measured dense peak, memory, SQNR against BF16."""
    columns = ["case", "BF16 ms", "torchao", "cold", "warm", "cold x", "warm x", "TFLOP/s", "peak"]
    table = _table("Forward and backward of one expert MLP", [*columns, "memory", "SQNR dB", "torchao dB"])
    for c in data["cases"]:
        tflops = 18 * c["M"] * c["D"] * c["H"] / c["warm_ms"] / 1e9
        memory = f"{c['fp8_peak_bytes'] / c['bf16_peak_bytes']:.2f}x" if c["bf16_peak_bytes"] else ""
        quality = " ".join(f"{v:.1f}" for v in c["sqnr_db"].values())
        theirs = " ".join(f"{v:.1f}" for v in c["torchao_sqnr_db"].values()) if c["torchao_sqnr_db"] else ""
        table.add_row(
            c["case"],
            f"{c['bf16_ms']:.2f}",
            f"{c['torchao_ms']:.2f}" if c["torchao_ms"] else "fails",
            *(f"{c[k]:.2f}" for k in ("cold_ms", "warm_ms")),
            *(f"{c['bf16_ms'] / c[k]:.2f}" for k in ("cold_ms", "warm_ms")),
            f"{tflops:.0f}",
            _share(tflops, data["environment"]),
            memory,
            quality,
            theirs,
        )
    console.print(table)
    _conditions(data["environment"], console)
    for c in data["cases"]:
        if error := c.get("torchao_error"):
            console.print(f"{c['case']}: torchao fails: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print("SQNR: output, dx, dW13, dW2. Memory: over inputs and weights, quantized weights included.")


def show_sizes(data: dict[str, Any], console: Console) -> None:
    """One row a size: times of the GPU, and times BF16."""
    columns = ["D x H", "experts", "rows each", "BF16 ms", "cold", "warm", "cold x", "warm x"]
    table = _table("Forward and backward of one expert MLP, the GPU alone", columns)
    for c in data["cases"]:
        times = [f"{c[k]:.3f}" for k in ("bf16_ms", "cold_ms", "warm_ms")]
        speed = [f"{c['bf16_ms'] / c[k]:.2f}" for k in ("cold_ms", "warm_ms")]
        table.add_row(f"{c['D']} x {c['H']}", str(c["E"]), f"{c['M'] // c['E']:,}", *times, *speed)
    console.print(table)
    _conditions(data["environment"], console)


def show_parts(row: dict[str, Any], environment: dict[str, Any], console: Console) -> None:
    """One row a part of the MLP, and their two sums."""
    table = _table(f"{row['case']}: parts, in place", ["part", "ms", "TFLOP/s", "peak"])
    for name, part in row["parts"].items():
        tflops = part.get("tflops")
        rate = [f"{tflops:.0f}", _share(tflops, environment)] if tflops else ["", ""]
        table.add_row(name, f"{part['ms']:.3f}", *rate, style="bold" if name in (WARM, COLD) else None)
    console.print(table)
    console.print(f"{WARM}: without {' and '.join(WEIGHTS)}, which only changed weights take.", highlight=False)
