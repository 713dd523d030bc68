"""python -m recipes.compare RUN_A RUN_B: is the loss curve of B that of A, and what did it cost?

Reads both runs' TensorBoard events at full precision, prints tables of loss, validation loss, gradient norm, tokens/s
and memory at the steps that both logged, and writes compare.png and compare.json. A gap is B - A: give BF16 first.

Exit code: 0 the limits hold (or none was given), 1 a limit is exceeded or a run has a nan or inf in its losses or
gradient norms, 2 the runs cannot be compared.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.compare_numbers import Comparison, Limits, compare_runs
from recipes.compare_plot import plot_comparison
from recipes.compare_tables import print_comparison
from recipes.run_info import jsonable, versions
from recipes.runs import Run, RunError, read_run

# Wide enough for all columns side by side where the output is no terminal (a file, a CI log).
FILE_WIDTH = 128


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The files that one comparison writes."""

    picture: Path
    numbers: Path


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    try:
        limits = Limits(loss=args.max_loss_gap, val_loss=args.max_val_gap, smooth=args.smooth)
        comparison = compare_runs(read_run(args.run_a), read_run(args.run_b), limits)
        outputs = write_outputs(comparison, Path(args.out or args.run_b))
    except (RunError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False)
        return 2
    print_comparison(comparison, console)
    console.print(f"Picture: {outputs.picture}\nNumbers: {outputs.numbers}", highlight=False, soft_wrap=True)
    return 1 if comparison.failures else 0


def write_outputs(comparison: Comparison, folder: Path) -> Outputs:
    """Writes compare.png and compare.json into `folder`, which is made when it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = Outputs(picture=folder / "compare.png", numbers=folder / "compare.json")
    plot_comparison(comparison, outputs.picture)
    text = json.dumps(jsonable(as_json(comparison)), indent=2, allow_nan=False, default=str)
    outputs.numbers.write_text(text + "\n", encoding="utf-8")
    return outputs


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The content of compare.json. A nan or inf becomes null there and is listed under `verdict.failures`."""
    return {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": {"passed": comparison.passed, "line": comparison.verdict, "failures": list(comparison.failures)},
        "limits": asdict(comparison.limits),
        "runs": {"a": _run_json(comparison.a), "b": _run_json(comparison.b)},
        "notes": list(comparison.notes),
        "config_differences": comparison.config_differences,
        "metrics": {name: pair.as_dict() for name, pair in comparison.pairs.items()},
        "compared_with": versions(),
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {"label": run.label, "folder": run.folder, "event_files": run.event_files, "run": run.info}


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _limit(text: str) -> float:
    """A limit on a gap. nan is refused: no gap would ever exceed it."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no limit: give a finite number, 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} steps cannot be averaged: give 1 (no smoothing) or more")
    return value


def _parser() -> argparse.ArgumentParser:
    about = "Compares two training runs: the loss curves, the gap between them (B - A), speed and memory."
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description=about)
    parser.add_argument("run_a", metavar="RUN_A", help="dump folder of the run to measure against, BF16 say")
    parser.add_argument("run_b", metavar="RUN_B", help="dump folder of the other run, FP8 say")
    parser.add_argument("--out", metavar="DIR", help="where compare.png and compare.json go (default: RUN_B)")
    loss_help = "limit on |smoothed training loss gap| at the last step"
    parser.add_argument("--max-loss-gap", metavar="X", type=_limit, help=loss_help)
    parser.add_argument(
        "--max-val-gap", metavar="X", type=_limit, help="limit on |validation loss gap| at the last step"
    )
    smooth_help = "smoothed = mean over the last N matched steps (default: 5; 1: none)"
    parser.add_argument("--smooth", metavar="N", type=_count, default=5, help=smooth_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
