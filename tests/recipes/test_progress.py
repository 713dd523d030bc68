"""The progress bar: under whole log lines on a terminal, nothing elsewhere."""

import io
import logging
import sys

from rich.console import Console

from recipes.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal_keeps_log_lines_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        bar = ProgressBar(10)
        bar.start()
        bar.advance(3)  # resumed at step 2
        bar.show_loss(4.5)
        logging.getLogger().error("\x1b[31mstep:  3\x1b[39m " + "x" * 100)
        bar.advance(4)
        assert isinstance(bar.console, Console)
        bar.stop()
        bar.stop()
        assert handler.stream is terminal
    finally:
        logging.getLogger().removeHandler(handler)
    text = terminal.getvalue()
    assert "x" * 100 + "\n" in text.replace("\x1b[0m", "")  # one line although the terminal is narrower
    assert "step 4/10" in text
    assert "loss 4.5000" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


def test_no_bar_without_a_terminal(capsys):
    bar = ProgressBar(10)
    bar.start()
    bar.advance(1)
    bar.stop()
    assert bar.console is None
    assert capsys.readouterr() == ("", "")
