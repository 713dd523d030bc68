"""The table of what a run has measured, at its end: a line an operand and a GEMM, with the module that fared worst."""

import math
import shlex
import statistics
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from recipes.telemetry_tags import GEMMS, GRAD_NORM, OPERANDS, ROOT, parse

Worst = tuple[float, str, int]  # value, module, step


@dataclass
class TelemetrySummary:
    """What the table needs of all measured steps. steps: which; last: the figures of the last one.

    worst: (operand or GEMM, figure) -> its worst value, where and when: the highest of a share, the lowest of an SQNR.
    """

    steps: list[int] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    worst: dict[tuple[str, str], Worst] = field(default_factory=dict)
    busiest: Worst | None = None
    most_empty: Worst | None = None

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Takes the figures of one step, by TensorBoard's tags."""
        self.steps.append(step)
        self.last = figures
        for tag, value in figures.items():
            module, _, figure = tag.removeprefix(ROOT).rpartition("/")
            if (found := parse(tag)) is not None:
                self._keep_worst(found, value, step)
            elif figure == "load_max_over_mean":
                self.busiest = max(self.busiest or (0.0, "", 0), (value, module, step))
            elif figure == "empty_experts":
                self.most_empty = max(self.most_empty or (-1.0, "", 0), (value, module, step))

    def _keep_worst(self, found: tuple[str, str, str], value: float, step: int) -> None:
        module, key, figure = found
        badness = _badness(figure, value)
        before = self.worst.get((key, figure))
        if badness is not None and (before is None or badness > _badness(figure, before[0])):
            self.worst[key, figure] = (value, module, step)

    def median(self, key: str, figure: str) -> float | None:
        """Over the modules, of the last measured step."""
        found = [v for tag, v in self.last.items() if (p := parse(tag)) and p[1:] == (key, figure)]
        return statistics.median(found) if found else None


def _badness(figure: str, value: float) -> float | None:
    """Grows with what one would worry about; None for figures that are neither good nor bad."""
    if figure in ("flushed", "saturated", "non_finite"):
        return value
    return (math.inf if math.isnan(value) else -value) if figure == "sqnr_db" else None


def telemetry_table(seen: TelemetrySummary, folder: str) -> Group:
    """Everything that fits on a screen; the rest is in TensorBoard."""
    first, last = seen.steps[0], seen.steps[-1]
    when = f"{len(seen.steps)} steps, {first} to {last}" if seen.steps[1:] else f"step {first}"
    title = f"FP8 telemetry of {when}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), header_style="bold")
    table.add_column("operand, GEMM", no_wrap=True)
    for heading in ("SQNR, last", "lowest", "flushed, most", "saturated, most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("lowest SQNR in", overflow="fold")
    for key, what in (OPERANDS | GEMMS).items():
        if any(k == key for k, _ in seen.worst):
            table.add_row(f"{key}  {what}", *_cells(seen, key))
    lines = [Text(line) for line in (_gradients(seen), _loads(seen)) if line]
    hint = Text(f"why, and what to do: python -m recipes.diagnose {shlex.quote(folder)}")
    return Group(*([table] if seen.worst else []), *lines, hint)


def _cells(seen: TelemetrySummary, key: str) -> list[str]:
    median, lowest = seen.median(key, "sqnr_db"), seen.worst.get((key, "sqnr_db"))
    shares = [seen.worst.get((key, figure)) for figure in ("flushed", "saturated")]
    return [
        "" if median is None else f"{median:.1f} dB",
        "" if lowest is None else f"{lowest[0]:.1f} dB",
        *("" if share is None else f"{100 * share[0]:.2g} %" for share in shares),
        "" if lowest is None else f"{lowest[1]}, step {lowest[2]}",
    ]


def _gradients(seen: TelemetrySummary) -> str:
    norms = {tag.removeprefix(GRAD_NORM): v for tag, v in seen.last.items() if tag.startswith(GRAD_NORM)}
    text = ", ".join(f"{group} {norm:.4g}" for group, norm in norms.items())
    return f"gradient norms at step {seen.steps[-1]}, before clipping: {text}" if text else ""


def _loads(seen: TelemetrySummary) -> str:
    if seen.busiest is None:
        return ""
    value, module, step = seen.busiest
    text = f"busiest expert: {value:.2f} times the mean ({module}, step {step})"
    if seen.most_empty is not None:
        empty, module, step = seen.most_empty
        text += f"; experts without a token: {empty:.0f}" + (f" at most ({module}, step {step})" if empty else "")
    agreed = [v for tag, v in seen.last.items() if tag.endswith("/twin_agreement")]
    return text + (f"; loads as the twin's: {100 * min(agreed):.1f} % in the layer that differs most" if agreed else "")
