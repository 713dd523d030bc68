"""What does FP8 gain in a whole training step?  python -m recipes.bench_e2e --ngpu 2 --out e2e.json

Trains pairs of twin recipes for some steps in each layout and precision, in turn, and reports tokens/s a GPU (mean of
the steps between compilation and the profiler), peak memory, and from the profiler's trace of one step where its time
and its bytes went. Every run is the command a user would type; its own arguments are in the result.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from recipes.arguments import count, listed, out_file
from recipes.bench_e2e_arguments import check_extra, check_flavor, check_layouts, check_names, model_name, twin_stem
from recipes.run_info import versions
from recipes.runs import RunError, read_run
from recipes.trace import read_trace

# A logged step costs more than others (the host waits for it; norms and zeros of every gradient): one in ten is logged,
# as torchtitan does unless told otherwise, and reports the mean speed of the ten. The first ten hold compilation. The
# last hold the profiler, whose step is an ordinary one: not logged, and not followed by the last step, which always is.
DEFAULT = "recipes/llama4_scout_3layers"
STEPS, LOG_FREQ = 37, 10
CLEAN_STEPS, PROFILED = (20, 30), 35
SHOWN = ("gemm", "quantize", "attention", "optimizer", "other", "communication_exposed", "step")  # ms, by trace.py
LAYOUTS = {
    "single": [],
    "fsdp": [],
    "fsdp_ep": ["--parallelism.expert_parallel_degree={ngpu}"],
}
WIRES = "--fp8.grouped_experts.fsdp_fp8_all_gather={0}", "--fp8.grouped_experts.ep_fp8_dispatch={0}"
EXPERTS = "--model.converters=fp8.grouped_experts"
PRECISIONS = {  # name -> twin, its arguments; "fp8" is the recipe as it is
    "bf16": ("bf16", []),
    "fp8 experts, wires in bf16": ("fp8", [EXPERTS, *(w.format("off") for w in WIRES)]),
    "fp8 experts": ("fp8", [EXPERTS]),
    "fp8": ("fp8", []),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the comparison."""

    name: str
    recipe: str
    layout: str
    precision: str
    command: tuple[str, ...]
    folder: Path


def jobs(recipes: list[str], layouts: list[str], ngpu: int, folder: Path, extra: list[str]) -> list[Job]:
    """All runs, recipes outermost, then layouts. A recipe is the common stem of two twins, a path without `_bf16.toml`,
    or stem:flavor.
    """
    out = []
    for recipe in recipes:
        stem, _, flavor = recipe.partition(":")
        for layout in layouts:
            precisions = {k: v for k, v in PRECISIONS.items() if layout != "single" or "wires" not in k}
            for precision, (twin, args) in precisions.items():
                name = f"{model_name(recipe)} {layout} {precision}"
                home = folder / name.replace(",", "").replace(" ", "_")
                command = (
                    *("torchrun", f"--nproc_per_node={ngpu}", "train.py"),
                    *(f"--job.config_file={stem}_{twin}.toml", f"--job.dump_folder={home}"),
                    *(f"--training.steps={STEPS}", f"--metrics.log_freq={LOG_FREQ}"),
                    "--metrics.enable_tensorboard",
                    *("--profiling.enable_profiling", f"--profiling.profile_freq={PROFILED}"),
                    *([f"--model.flavor={flavor}"] if flavor else []),
                    *(a.format(ngpu=ngpu) for a in LAYOUTS[layout]),
                    *args,
                    *extra,
                )
                out.append(
                    Job(name=name, recipe=recipe, layout=layout, precision=precision, command=command, folder=home)
                )
    return out


def _environment() -> dict[str, str]:
    """This process's, in which `torchrun` is this Python's, activated or not."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return os.environ | {"PATH": os.pathsep.join(path)}


def measure(job: Job, timeout: int) -> dict:
    """Runs one job and reads what it left. A failed run is reported, not hidden."""
    result = {k: getattr(job, k) for k in ("name", "recipe", "layout", "precision")}
    result["command"] = " ".join(job.command)
    job.folder.mkdir(parents=True, exist_ok=True)
    with open(job.folder / "log.txt", "w") as log:
        try:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "timeout": timeout, "env": _environment()}
            code = subprocess.run(job.command, **options).returncode
        except subprocess.TimeoutExpired:
            code = f"no end within {timeout} s"
    if code:
        tail = (job.folder / "log.txt").read_text().splitlines()[-25:]
        return result | {"error": f"exit {code}", "log": tail}
    try:
        return result | _numbers(job.folder)
    except RunError as error:  # it ended well, and left no such data
        return result | {"error": str(error)}


def _numbers(folder: Path) -> dict:
    """What a run in `folder` measured. Raises RunError if it lacks a number."""
    run = read_run(folder)
    series = {
        tag: run.series(tag)
        for tag in ("throughput(tps)", "memory/max_active(GiB)", "loss_metrics/global_avg_loss", "grad_norm")
    }
    speed, memory, loss, norm = series.values()
    missing = [tag for tag, values in series.items() if not values]
    missing += [f"throughput(tps) of step {step}" for step in CLEAN_STEPS if step not in speed]
    if missing:
        raise RunError(f"{folder} lacks {missing[0]}: a run of {STEPS} steps that logs every {LOG_FREQ} has it.")
    numbers = {
        "tokens_per_second_per_gpu": round(statistics.harmonic_mean([speed[s] for s in CLEAN_STEPS])),
        "peak_gib": round(max(memory.values()), 2),
        "final_loss": list(loss.values())[-1],
        "grad_norm": list(norm.values())[-1],
    }
    trace = folder / "profile_traces" / f"iteration_{PROFILED}" / "rank0_trace.json"
    try:
        return numbers | (read_trace(trace) if trace.exists() else {"trace": "none written"})
    except json.JSONDecodeError as error:  # written by half: what the log says holds without it
        return numbers | {"trace": f"no JSON: {error}"}


def environment(ngpu: int, command: list[str]) -> dict:
    """Date, GPU, versions and command of a result file."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": date.today().isoformat(),
        "gpu": gpu,
        "ngpu": ngpu,
        "versions": versions(),
        "command": " ".join(["python -m recipes.bench_e2e", *command]),
    }


def show(results: list[dict]) -> None:
    """The table: the BF16 run of each recipe and layout is 1.00."""
    table = Table(title="End to end, tokens/s a GPU", title_justify="left")
    for column in ("run", "tokens/s", "of BF16", "peak GiB", "all-gather GB", "all-to-all GB", *SHOWN):
        table.add_column(column, justify="left" if column == "run" else "right")
    at = ("recipe", "layout")
    base = {tuple(r[k] for k in at): r.get("tokens_per_second_per_gpu") for r in results if r["precision"] == "bf16"}
    for r in results:
        if "error" in r:
            table.add_row(r["name"], "failed")
            continue
        reference, split = base.get(tuple(r[k] for k in at)), r.get("split_ms", {})
        ratio = f"{r['tokens_per_second_per_gpu'] / reference:.3f}" if reference else ""
        moved = [f"{r.get(k, 0) / 1e9:.2f}" for k in ("all_gather_bytes", "all_to_all_bytes")]
        times = [f"{split.get(k, 0):.0f}" for k in SHOWN]
        table.add_row(r["name"], f"{r['tokens_per_second_per_gpu']:,}", ratio, f"{r['peak_gib']:.1f}", *moved, *times)
    console = Console(width=150)
    console.print(table)
    for r in results:
        if error := r.get("error"):
            console.print(f"{r['name']} failed: {error}", markup=False, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None); returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = {"type": twin_stem, "action": "append", "default": None}
    parser.add_argument("--recipe", **how, help=f"stem of two twins, or stem:flavor; default {DEFAULT}")
    parser.add_argument("--layouts", type=listed, default=None, help=f"comma separated, of {', '.join(LAYOUTS)}")
    parser.add_argument("--ngpu", type=count("is no number of GPUs"), default=max(1, torch.cuda.device_count()))
    parser.add_argument("--out", type=out_file, default=Path("outputs/bench_e2e/e2e.json"))
    parser.add_argument("--timeout", type=count("is no number of seconds"), default=240, help="seconds a run may take")
    parser.add_argument("extra", nargs="*", help="after --: more arguments for every run")
    command = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(command)
    gpus, recipes = torch.cuda.device_count(), args.recipe or [DEFAULT]
    if not gpus:
        parser.error("whole steps are timed on GPUs, and there is none: on a CPU there is `python -m recipes.bench`.")
    if gpus < args.ngpu:
        parser.error(f"--ngpu {args.ngpu}: this machine has {gpus}: give {gpus} or less.")
    layouts = args.layouts or (["single"] if args.ngpu == 1 else ["fsdp", "fsdp_ep"])
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"--layouts {', '.join(sorted(unknown))}: choose of {', '.join(LAYOUTS)}")
    folder = args.out.parent / "runs"
    try:
        check_layouts(layouts, args.ngpu)
        check_names(recipes)
        # of the layouts that add no arguments; how many GPUs share the experts may be given
        own = jobs([f"{DEFAULT}:flavor"], ["fsdp"], args.ngpu, folder, [])
        check_extra(args.extra, [arg for job in own for arg in job.command])
        for recipe in recipes:
            check_flavor(recipe)
    except ValueError as error:
        parser.error(str(error))
    results = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for job in jobs(recipes, layouts, args.ngpu, folder, args.extra):
        results.append(measure(job, args.timeout))
        data = {"environment": environment(args.ngpu, command), "runs": results}
        args.out.write_text(json.dumps(data, indent=2) + "\n")
        show(results)
    return int(any("error" in r for r in results))


if __name__ == "__main__":
    sys.exit(main())
