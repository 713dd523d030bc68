"""A progress bar under torchtitan's log lines, on a terminal only."""

import io
import logging
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# Of steps: validation and checkpoints come every few hundred steps at most, and belong into the average.
SPEED_WINDOW_S = 600


class _AboveBar(io.TextIOBase):
    """Takes what a log handler writes and prints it above the bar, colours and all, without cutting long lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return len(text)


class ProgressBar:
    """Steps done, the loss, time spent and time left. Does nothing where neither stdout nor stderr is a terminal.

    The bar is drawn again at each step and there is no refresh thread, which a forking data loader could deadlock.
    """

    def __init__(self, total: int, *, no_color: bool = False) -> None:
        self._stream: TextIO | None = next((s for s in (sys.stdout, sys.stderr) if s.isatty()), None)
        self._on_stdout = self._stream is sys.stdout
        self._total = total
        self._no_color = no_color
        self._bar: Progress | None = None
        self._loss = ""
        self._redirected: list[tuple[logging.StreamHandler, TextIO]] = []
        self._begun = False

    @property
    def console(self) -> Console | None:
        """Where to print while the bar is on stdout; None: print to stdout itself."""
        return self._bar.console if self._bar is not None and self._on_stdout else None

    def start(self) -> None:
        """Shows the bar."""
        if self._stream is None or self._bar is not None:
            return
        console = Console(file=self._stream, no_color=self._no_color or None)
        steps, loss = TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.fields[loss]}")
        columns = (
            steps,
            BarColumn(bar_width=None),
            loss,
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        # Prints go above the bar too, unless stdout is a file: they belong into it.
        settings = {"auto_refresh": False, "redirect_stdout": self._on_stdout, "speed_estimate_period": SPEED_WINDOW_S}
        self._bar = Progress(*columns, console=console, **settings)
        self._bar.add_task("train", total=self._total, loss="")
        self._bar.start()
        self._redirect_logs(console)

    def _redirect_logs(self, console: Console) -> None:
        """A log handler holds the terminal's stream itself, so that rich cannot see what it writes."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream.isatty():
                self._redirected.append((handler, handler.stream))
                handler.setStream(_AboveBar(console))

    def advance(self, step: int) -> None:
        """`step` is done."""
        if self._bar is None:
            return
        task = self._bar.task_ids[0]
        if self._begun:
            self._bar.update(task, completed=step, loss=self._loss, refresh=True)
        else:  # a resumed run begins at its own step, and the first step tells nothing about the speed of the others
            self._bar.reset(task, completed=step, total=self._total)
            self._begun = True

    def show_loss(self, loss: float) -> None:
        """Shows `loss` beside the bar from the next step on."""
        self._loss = f"loss {loss:.4f}"

    def stop(self) -> None:
        """Ends the bar and gives the log handlers their streams back. May be called twice."""
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
