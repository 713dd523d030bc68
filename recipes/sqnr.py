"""python -m recipes.sqnr RECIPE: what does FP8 do to one step of this recipe?

Builds the recipe's model twice from the same weights, in high precision and in FP8, runs one batch of the recipe's data
forward and backward through both, and prints how far apart they are: logits, loss, every module's output and its
gradient, every parameter's gradient, worst first; where tokens went to other experts; gradient norms by group. What the
recipe's options do to a model shows in seconds, before a run of hours does. Further arguments are torchtitan's:

    python -m recipes.sqnr recipes/mixtral_fp8.toml --floor 20
    python -m recipes.sqnr recipes/llama4_bf16.toml --converters fp8.grouped_experts --training.seq_len 64

Exit code: 0 done, 1 the logits are below --floor or something is nan or inf, 2 it could not run.
"""

import argparse
import json
import logging
import math
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from parallel.device import prepare_device
from recipes.arguments import count, listed, number, out_file
from recipes.run_info import jsonable, versions
from recipes.sqnr_measure import Report, measure
from recipes.sqnr_tables import print_report, verdict
from recipes.sqnr_twins import Twins, build_twins, read_config, twin_converters

FILE_WIDTH = 140  # where the output is no terminal


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args, overrides = _parser().parse_known_args(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    try:
        prepare_device()
        config = read_config(args.recipe, overrides)
        if args.converters is not None:
            config.model.converters = args.converters
        twin_converters(config)  # refuses a recipe without FP8 before anything is built
        twins = build_twins(config, args.checkpoint)
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    report = measure(twins, args.warmup)
    print_report(report, twins, console, 0 if args.all else args.rows)
    if args.out:
        write_json(args.out, report, twins, args.recipe)
        console.print(f"Numbers: {args.out}", markup=False, highlight=False, soft_wrap=True)
    problem = failure(report, args.floor)
    if problem:
        console.print(f"[bold red]failed:[/] {problem}", highlight=False)
    return 1 if problem else 0


def failure(report: Report, floor: float | None) -> str | None:
    """Why the exit code is 1, or None."""
    bad = next((row for row in report.rows if math.isnan(row.sqnr_db)), None)
    if bad is not None or not all(map(math.isfinite, report.loss)):
        return f"nan or inf, first in the {bad.kind} of {bad.name}" if bad else f"the losses are {report.loss}"
    if floor is not None and report.logits_db < floor:
        return f"logits at {report.logits_db:.2f} dB, below the floor of {floor:g} dB"
    return None


def write_json(path: Path, report: Report, twins: Twins, recipe: str) -> None:
    """All rows and what they were measured with; an inf or nan becomes null."""
    batch = twins.batch
    content: dict[str, Any] = {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": recipe,
        "verdict": verdict(report),
        "converters": twins.converters,
        "batch": {
            "shape": list(batch.inputs.shape),
            "tokens_of_a_step": batch.tokens,
            "micro_batches": batch.micro_batches,
        },
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "config": twins.config.to_dict(),
        **report.as_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jsonable(content), indent=2, allow_nan=False, default=str) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    about = "One batch through a recipe's model in high precision and in FP8: how far apart are they, and where?"
    after = "Further arguments override the recipe as in training: --training.seq_len 64, --fp8.grouped_experts.recipe"
    parser = argparse.ArgumentParser(prog="python -m recipes.sqnr", description=about, epilog=after, allow_abbrev=False)
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file")
    parser.add_argument("--converters", type=listed, metavar="A,B", help="instead of the recipe's model.converters")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="weights of a torchtitan checkpoint, OUTPUT/checkpoint/step-N"
    )
    floor = number("floor", "a finite number of dB")
    parser.add_argument("--floor", metavar="DB", type=floor, help="exit code 1 if the logits' SQNR is lower")
    warmup = "steps of the FP8 model, same batch and weights, before the measured one: for delayed scales (default: 0)"
    parser.add_argument("--warmup", metavar="N", type=count("is no number of steps", least=0), default=0, help=warmup)
    rows = "rows of the first table (default: 30)"
    parser.add_argument("--rows", metavar="N", type=count("is no number of rows"), default=30, help=rows)
    parser.add_argument("--all", action="store_true", help="all rows")
    parser.add_argument("--out", metavar="FILE", type=out_file, help="write everything as JSON")
    return parser


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    sys.exit(main())
