"""Does FP8 end where BF16 ends?  python -m recipes.parity --out assets/results/parity_h200.json

Trains every arm of every model, several at a time on one GPU: BF16 with some seeds, which make a band, and FP8 with the
weights and the data order of one of those seeds: the experts under a scale rule, or the whole model. Writes the
curves and a verdict for each arm as JSON, and a picture beside it for each model. A call that runs out of --budget ends
with checkpoints; the same command goes on from there, and leaves out what is done.

Exit code: 0 all arms are done, 1 one failed, 2 wrong usage, 3 some are left for the next call, 130 Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.arguments import count, number, out_file, out_folder
from recipes.parity_arms import parse_arms
from recipes.parity_plot import plot_parity
from recipes.parity_results import collect, environment
from recipes.parity_runs import run_arms
from recipes.run_info import jsonable

MODELS = "mixtral_300m,llama4_300m"
# In the order in which they start: what has ended when a budget is over can be judged.
ARMS = "bf16:1,tokenwise:1,whole:1,bf16:2,tokenwise:2,delayed:1,rowwise:1,bf16:3,tokenwise:3"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    parser = _parser()
    command = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(command)
    try:
        arms = parse_arms(args.models, args.arms, args.extra)
        fate = run_arms(arms, args.folder, jobs=args.jobs, seconds=args.budget, extra=args.extra, say=_say)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        _say("Stopped: the same command leaves out the arms that are done.")
        return 130
    found = {"environment": environment(args.jobs, command), **collect(arms, args.folder)}
    write(found, args.out)
    show(found)
    failed = [arm.name for arm, what in fate.items() if what.startswith("failed")]
    left = [arm.name for arm, what in fate.items() if what in ("stopped", "waiting")]
    if failed:
        _say(f"Failed: {', '.join(failed)}; see log.txt in their folders below {args.folder}.")
    if left:
        _say(f"Left: {', '.join(left)}. The same command goes on from there.")
    return 1 if failed else 3 if left else 0


def write(found: dict[str, Any], out: Path) -> None:
    """Writes the JSON to `out`, one line a run or verdict, and beside it STEM_MODEL.png for each model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = [f'"environment": {json.dumps(found["environment"], indent=2)}']
    for key in ("runs", "verdicts"):
        lines = ",\n".join(json.dumps(jsonable(item), allow_nan=False) for item in found[key])
        parts.append(f'"{key}": [\n{lines}\n]')
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    for model in dict.fromkeys(run["model"] for run in found["runs"]):
        plot_parity(found, model, out.with_name(f"{out.stem}_{model}.png"))


def show(found: dict[str, Any]) -> None:
    """The table of the runs, and a line for each verdict."""
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table(title="Parity", title_justify="left")
    for heading in ("run", "val loss", "test loss", "worst norm ratio", "tokens/s (shared GPU)", "peak GiB"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run in found["runs"]:
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (run["final_val_loss"], run["final_test_loss"])]
        worst = run["grad_norm_ratio"]
        norm = f"{worst['ratio']:.4f} at {worst['step']}" if worst else ""
        table.add_row(run["name"], *losses, norm, f"{run['tokens_per_second']:,}", f"{run['peak_gib']:.1f}")
    console.print(table)
    for verdict in found["verdicts"]:
        console.print(verdict["line"], markup=False, highlight=False, soft_wrap=True)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path("outputs/parity/parity.json")
    parser.add_argument("--out", type=out_file, default=out, help="the JSON; PNGs beside it")
    parser.add_argument("--models", default=MODELS, help=f"stems of twin recipes (default: {MODELS})")
    parser.add_argument("--arms", default=ARMS, help=f"RULE:SEED, with bf16, a scale rule or whole (default: {ARMS})")
    jobs = "runs at a time (default: 6, about 10 GiB each)"
    parser.add_argument("--jobs", type=count("is no number of runs"), default=6, help=jobs)
    seconds = number("budget", "a number of seconds above 0", above=0)
    parser.add_argument("--budget", type=seconds, default=float("inf"), help="seconds that this call may train")
    parser.add_argument("--folder", type=out_folder, default=Path("outputs/parity"), help="dump folders of the runs")
    parser.add_argument("extra", nargs="*", help="after --: more arguments for every run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
