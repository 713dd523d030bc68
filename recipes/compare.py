"""python -m recipes.compare RUN_A RUN_B [RUN_C ...]: are the other loss curves that of A, and what did they cost?

Reads the runs' TensorBoard events at full precision, also while they are being written. Prints tables of losses,
gradient norm, tokens/s and memory at the steps that both runs of a pair logged, and one line of verdict for each pair:
same, worse, better, or too short or too small to judge (recipes/compare_verdict.py has the rules). A gap is B - A: give
BF16 first. `--band` names BF16 runs of other seeds: their differences are what a gap is held against. Writes
compare.png and compare.json, and with --html a page that stands alone, with --png a picture for a paper's column.

Exit code, of the worst pair: 0 as good, or within the limits; 1 worse, a limit exceeded, or a run with a nan or inf in
its losses or gradient norms; 2 cannot be judged, or the runs cannot be compared, or wrong usage.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from recipes.arguments import count, number, out_file, out_folder
from recipes.compare_numbers import Limits, Report, compare_all
from recipes.compare_outputs import Outputs, write_outputs
from recipes.compare_tables import print_report
from recipes.runs import MismatchError, RunError, read_run

# Wide enough for all columns side by side where the output is no terminal (a file, a CI log).
FILE_WIDTH = 128


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    code, ended = _render(args, console)
    try:
        while args.watch and not ended:
            time.sleep(args.watch)
            console.clear()
            code, ended = _render(args, console)
    except KeyboardInterrupt:
        console.print("Stopped watching.")
    return code


def _render(args: argparse.Namespace, console: Console) -> tuple[int, bool]:
    """Reads, compares, prints and writes once: the exit code, and whether a later look would be in vain."""
    try:
        report = _compare(args)
        written = write_outputs(report, _outputs(args), reload_seconds=args.watch)
    except (RunError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2, isinstance(error, MismatchError)
    print_report(report, console)
    for name, path in written.items():
        console.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)
    return report.code, all(run.ended for run in report.runs)


def _compare(args: argparse.Namespace) -> Report:
    limits = Limits(loss=args.max_loss_gap, val_loss=args.max_val_gap, smooth=args.smooth)
    reference, *rest = (read_run(folder) for folder in (args.run_a, *args.run_b, *args.band))
    return compare_all(reference, rest[: len(args.run_b)], rest[len(args.run_b) :], limits)


def _outputs(args: argparse.Namespace) -> Outputs:
    folder = args.out or Path(args.run_b[0])
    picture, numbers = folder / "compare.png", folder / "compare.json"
    return Outputs(picture=picture, numbers=numbers, page=args.html, column=args.png)


def _parser() -> argparse.ArgumentParser:
    about = "Compares training runs: the loss curves, the gaps between them (B - A), speed and memory."
    ends = "exit code: 0 as good or within the limits, 1 worse or a limit exceeded, 2 cannot be judged or compared"
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description=about, epilog=ends)
    parser.add_argument("run_a", metavar="RUN_A", help="dump folder of the run to measure against, BF16 say")
    parser.add_argument("run_b", metavar="RUN_B", nargs="+", help="dump folders of the other runs, FP8 say")
    band = "runs like RUN_A with other seeds (debug.seed): what they differ by is the band that a gap is held against"
    parser.add_argument("--band", metavar="RUN", nargs="+", default=[], help=band)
    out_help = "where compare.png and compare.json go (default: the first RUN_B)"
    parser.add_argument("--out", metavar="DIR", type=out_folder, help=out_help)
    html_help, png_help = "a page that stands alone, for any browser", "a picture as wide as a column of a paper"
    parser.add_argument("--html", metavar="FILE", type=out_file, help=f"also write {html_help}")
    parser.add_argument("--png", metavar="FILE", type=out_file, help=f"also write {png_help}")
    limit = number("limit", "a finite number, 0 or more", least=0)  # no gap would ever exceed a nan
    loss_help = "limit on |smoothed training loss gap| at the last step"
    parser.add_argument("--max-loss-gap", metavar="X", type=limit, help=loss_help)
    val_help = "limit on |validation loss gap| at the last step"
    parser.add_argument("--max-val-gap", metavar="X", type=limit, help=val_help)
    smooth_help = (
        "smoothed = mean over the last N common logged steps (default: a twentieth of them, at least 5; 1: none)"
    )
    parser.add_argument("--smooth", metavar="N", type=count("steps cannot be averaged"), help=smooth_help)
    watch_help = "read and write everything again after so many seconds, until every run has ended or Ctrl-C"
    seconds = number("pause", "a number of seconds above 0", above=0)
    parser.add_argument("--watch", metavar="SECONDS", type=seconds, help=watch_help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
