"""The table that a run prints at its end: what came of it."""

import math
import shlex
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from recipes.run_info import Point


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
