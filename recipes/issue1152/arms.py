"""The runs of the comparison: each a command of train.py, in a folder of its own, skipped when it has been finished."""

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipes.run_info import RUN_FILE

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent.relative_to(ROOT)
COMMAND_FILE = "arm.json"
PUBLISHED_WIDTH, PUBLISHED_LR = 4096, 2e-5

# An exception, with or without its rank before it, or what the parser of the options says.
_ERROR = re.compile(
    r"^(\[rank\d+\]: )?[\w.]*(Error|Exception): |^(Unrecognized options|invalid choice|Error parsing)\b"
)

DELAYED = (
    *("--fp8.grouped_experts.recipe=delayed", "--fp8.dense.recipe=delayed"),
    *("--fp8.delayed.amax_history_len=1024", "--fp8.delayed.amax_compute_algo=max"),
)
SEQUENTIAL = "--fp8.grouped_experts.experts=sequential"

# Sizes of `model.flavor`, and the lengths of its runs: the arms with sequential experts differ from their grouped
# twins in the order of a few sums, so two steps of them are enough.
SIZES: dict[str, tuple[str, ...]] = {
    "full": (),
    "reduced": (
        *("--model.flavor=reduced", "--training.dataset=python_docs", "--training.seq_len=32"),
        *("--validation.dataset=python_docs_validation", "--validation.seq_len=32", "--validation.steps=32"),
    ),
}
STEPS = {"full": 100, "reduced": 10}
WIDTH = {"full": 256, "reduced": 128}
SHORT_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run. twin: the high-precision arm that it is measured against; about: what it is, for the table."""

    name: str
    about: str
    recipe: str = "fp8"
    args: tuple[str, ...] = ()
    twin: str = "bf16"
    short: bool = False


ARMS = (
    Arm(name="bf16", about="high precision, grouped experts", recipe="bf16"),
    Arm(name="tokenwise", about="scale of each token and weight, computed when needed (the default rule)"),
    Arm(
        name="delayed_cold",
        about="delayed scaling from scales of 1, updated after each micro-batch; weights quantized once a step",
        args=(*DELAYED, "--fp8.delayed.weights=cached"),
    ),
    Arm(
        name="delayed_stale",
        about="the same, and cached weights are read with the newer scale (TransformerEngine <= 1.7, #1047)",
        args=(*DELAYED, "--fp8.delayed.weights=cached_stale_scale"),
    ),
    Arm(
        name="delayed_all_cold",
        about="scales of 1 for all micro-batches of the first step: updated once a step",
        args=(*DELAYED, "--fp8.delayed.weights=cached", "--fp8.delayed.update=step"),
    ),
    Arm(
        name="delayed_warm",
        about="delayed scaling that takes its first scales from the tensor itself",
        args=(*DELAYED, "--fp8.delayed.weights=cached", "--fp8.delayed.warm_start"),
    ),
    Arm(
        name="bf16_sequential",
        about="high precision, one expert after the other, as the published run",
        recipe="bf16",
        args=("--model.converters=experts.sequential",),
        short=True,
    ),
    Arm(
        name="tokenwise_sequential",
        about="the default rule, one expert after the other",
        args=(SEQUENTIAL,),
        twin="bf16_sequential",
        short=True,
    ),
    Arm(
        name="delayed_cold_sequential",
        about="delayed_cold, one expert after the other",
        args=(*DELAYED, "--fp8.delayed.weights=cached", SEQUENTIAL),
        twin="bf16_sequential",
        short=True,
    ),
    Arm(
        name="delayed_stale_sequential",
        about="delayed_stale, one expert after the other",
        args=(*DELAYED, "--fp8.delayed.weights=cached_stale_scale", SEQUENTIAL),
        twin="bf16_sequential",
        short=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How all arms run. steps: of an arm that is not short. lr: at the end of the warm-up."""

    size: str
    folder: Path
    steps: int
    lr: float
    precision: str
    extra: tuple[str, ...] = ()

    def steps_of(self, arm: Arm) -> int:
        """How many steps `arm` trains."""
        return min(self.steps, SHORT_STEPS) if arm.short else self.steps

    def command(self, arm: Arm) -> list[str]:
        """The command of `arm`, from the root of the repository."""
        return [
            *(sys.executable, "train.py", f"--job.config_file={HERE / f'mixtral_{arm.recipe}.toml'}"),
            *(f"--job.dump_folder={self.folder / arm.name}", f"--training.steps={self.steps_of(arm)}"),
            *(f"--optimizer.lr={self.lr:g}", f"--training.mixed_precision_param={self.precision}"),
            *SIZES[self.size],
            *arm.args,
            *self.extra,
        ]


def scaled_lr(size: str) -> float:
    """The published rate for this width: a step of Adam moves an output by about rate times width."""
    return PUBLISHED_LR * PUBLISHED_WIDTH / WIDTH[size]


def finished(plan: Plan, arm: Arm) -> bool:
    """Whether this very command has been run to its end before."""
    folder = plan.folder / arm.name
    if not (folder / RUN_FILE).is_file() or not (folder / COMMAND_FILE).is_file():
        return False
    known = json.loads((folder / COMMAND_FILE).read_text())
    results = json.loads((folder / RUN_FILE).read_text()).get("results", {})
    return known == _identity(plan, arm) and results.get("steps") == plan.steps_of(arm)


def _identity(plan: Plan, arm: Arm) -> dict[str, object]:
    toml = (ROOT / HERE / f"mixtral_{arm.recipe}.toml").read_bytes()
    return {"command": plan.command(arm)[1:], "recipe": hashlib.sha256(toml).hexdigest()}


def run_arm(plan: Plan, arm: Arm, threads: int) -> str | None:
    """Trains `arm` unless it is finished. Returns what went wrong, or None."""
    if finished(plan, arm):
        print(f"{arm.name}: finished before", flush=True)
        return None
    folder = plan.folder / arm.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMMAND_FILE).write_text(json.dumps(_identity(plan, arm), indent=2) + "\n")
    print(f"{arm.name}: {plan.steps_of(arm)} steps, log in {folder / 'log.txt'}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(plan.command(arm), cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    if code:
        return f"{arm.name} ended with exit code {code}: {reason((folder / 'log.txt').read_text())}"
    return None if finished(plan, arm) else f"{arm.name} ended early: see {folder / 'log.txt'}"


def reason(log: str) -> str:
    """The line of a log that says why a run failed: its last error, which the tables of its end may follow."""
    lines = [text for line in log.splitlines() if any(map(str.isalnum, text := line.strip(" │")))]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["its log is empty"])[-1][:500]


def run_arms(plan: Plan, arms: list[Arm], jobs: int) -> dict[str, str]:
    """Trains the arms, `jobs` at a time. Returns arm -> what went wrong, for those where something did."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        problems = pool.map(lambda arm: (arm.name, run_arm(plan, arm, threads)), arms)
        return {name: problem for name, problem in problems if problem}
