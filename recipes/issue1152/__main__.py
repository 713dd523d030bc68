"""python -m recipes.issue1152 [--full]: the gap of Megatron-LM #1152, reproduced and removed.  See README.md.

Trains the arms (arms.py), skipping those that a former call has finished, and prints and writes their table. The
reduced size takes minutes on two CPU cores; --full is for a GPU.

Exit code: 0 all arms are done, 1 one failed, 2 wrong usage, 130 Ctrl-C.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown

from recipes.arguments import count, listed, number, out_folder
from recipes.issue1152.arms import ARMS, STEPS, Plan, run_arms, scaled_lr
from recipes.issue1152.table import fill_readme, markdown, read_results, write


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args, extra = _parser().parse_known_args(argv)
    if args.readme:
        return _fill(Path(args.readme))
    plan = plan_from(args, tuple(extra))
    wanted = args.arms or [arm.name for arm in ARMS]
    unknown = [name for name in wanted if name not in {arm.name for arm in ARMS}]
    if unknown:
        print(f"Unknown arms {unknown}: choose of {', '.join(arm.name for arm in ARMS)}.", file=sys.stderr)
        return 2
    try:
        problems = run_arms(plan, [arm for arm in ARMS if arm.name in wanted], args.jobs)
    except KeyboardInterrupt:
        print("Stopped: the same command leaves out the arms that are done.", file=sys.stderr)
        return 130
    results = read_results(plan)
    numbers, text = write(plan, results, problems)
    Console(width=None if sys.stdout.isatty() else 140).print(Markdown(markdown(plan, results, problems)))
    print(f"Numbers: {numbers}\nMarkdown: {text}")
    for problem in problems.values():
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _fill(folder: Path) -> int:
    if not all((folder / name).is_file() for name in ("table.json", "table.md")):
        print(f"{folder} has no table.json and table.md: give the folder that a call has written.", file=sys.stderr)
        return 2
    fill_readme(folder)
    return 0


def plan_from(args: argparse.Namespace, extra: tuple[str, ...]) -> Plan:
    """What the command line asks for."""
    size = "full" if args.full else "reduced"
    precision = args.precision or ("bfloat16" if torch.cuda.is_available() else "float32")
    lr = args.lr if args.lr is not None else scaled_lr(size)
    folder = Path(args.out or Path("outputs") / "issue1152" / size).resolve()
    return Plan(size=size, folder=folder, steps=args.steps or STEPS[size], lr=lr, precision=precision, extra=extra)


def _parser() -> argparse.ArgumentParser:
    after = "Further arguments go to train.py in every arm, --debug.seed=2 say."
    parser = argparse.ArgumentParser(
        prog="python -m recipes.issue1152", description=__doc__.splitlines()[0], epilog=after, allow_abbrev=False
    )
    parser.add_argument("--full", action="store_true", help="full size: 100 steps of 131,072 tokens, for a GPU")
    parser.add_argument("--out", metavar="DIR", type=out_folder, help="default: outputs/issue1152/SIZE")
    jobs = max(1, (os.cpu_count() or 1) // 2)
    at_once = count("is no number of arms")
    parser.add_argument("--jobs", metavar="N", type=at_once, default=min(jobs, 5), help="arms at a time")
    parser.add_argument(
        "--arms", type=listed, metavar="A,B", help=f"only these, of {', '.join(arm.name for arm in ARMS)}"
    )
    steps = "of an arm, the first N of the schedule (default: {full} full, {reduced} reduced)".format(**STEPS)
    parser.add_argument("--steps", metavar="N", type=count("is no number of steps"), help=steps)
    lr = "learning rate at the end of the warm-up (default: 2e-5, the published one, times 4096 / width)"
    parser.add_argument("--lr", metavar="X", type=number("learning rate", "a number above 0", above=0), help=lr)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument(
        "--readme", metavar="DIR", help="train nothing: put the table in DIR into README.md beside this"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
