"""The arms in numbers: what each left in TensorBoard, against its high-precision twin, as JSON and Markdown."""

import json
import platform
import re
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from recipes.issue1152.arms import ARMS, Arm, Plan, finished
from recipes.run_info import RUN_FILE, jsonable, versions
from recipes.runs import TAGS, Run, read_run
from recipes.telemetry_tags import GRAD_NORM, GRADIENTS, parse

GROUPS = ("embedding", "attention", "experts", "router", "head")
LOSS_STEPS = (1, 10, 100)
README = Path(__file__).with_name("README.md")
PUBLISHED = {"bf16": 1.664, "fp8": 0.534, "val_loss_gap": 0.455}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One arm. norms: "total" or group -> gradient norm of step 1. losses: step -> training loss.

    lost: step -> share of the gradients' values that FP8 has turned into zeros in the step's first micro-batch, mean
    over converted modules and operands; a gradient that arrives as zeros, since those before it were lost, is lost.
    """

    arm: Arm
    norms: dict[str, float]
    losses: dict[int, float]
    val_loss: float | None
    test_loss: float | None
    lost: dict[int, float] = field(default_factory=dict)


def read_results(plan: Plan, arms: tuple[Arm, ...] = ARMS) -> dict[str, Result]:
    """The finished arms of `plan`, by name, in the order of ARMS."""
    return {arm.name: _read(plan, arm) for arm in arms if finished(plan, arm)}


def _read(plan: Plan, arm: Arm) -> Result:
    run = read_run(plan.folder / arm.name)
    results = json.loads((plan.folder / arm.name / RUN_FILE).read_text())["results"]
    norms = {"total": run.series(TAGS["grad_norm"])[1]}
    norms |= {group: run.series(GRAD_NORM + group).get(1, 0.0) for group in GROUPS}  # zeros are not recorded
    return Result(
        arm=arm,
        norms=norms,
        losses={step: loss for step, loss in run.series(TAGS["loss"]).items() if step in (*LOSS_STEPS, plan.steps)},
        val_loss=_last(results["validation"]),
        test_loss=_last(results["test"]),
        lost=_lost(run),
    )


def _last(point: dict[str, float] | None) -> float | None:
    return None if point is None else point["loss"]


def _lost(run: Run) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for tag, series in run.scalars.items():
        part = parse(tag)
        if part and part[1] in GRADIENTS and part[2] == "flushed":
            amax = run.series(tag.removesuffix("flushed") + "amax")
            for step, share in series.items():
                found.setdefault(step, []).append(1.0 if amax.get(step) == 0 else share)
    return {step: sum(shares) / len(shares) for step, shares in sorted(found.items())}


def markdown(plan: Plan, results: dict[str, Result], problems: dict[str, str]) -> str:
    """Three tables and their conditions."""
    steps = plan.steps
    parts = [
        "Gradient norm of step 1: in high precision, and as a share of the twin's. Lost: values of gradients that FP8 "
        "turns into zeros in the step's first micro-batch.",
        _table(["arm", "total", "of twin", *GROUPS, "lost"], [_norm_row(r, results) for r in results.values()]),
        f"Losses; gap to the twin after {steps} steps.",
        _table(
            ["arm", *(f"step {s}" for s in _loss_steps(steps)), "validation", "test", "gap", "validation gap"],
            [_loss_row(r, results, steps) for r in results.values() if not r.arm.short],
        ),
        _table(["arm", "what it is"], [[f"`{r.arm.name}`", r.arm.about] for r in results.values()]),
        "; ".join(f"{name}: {problem}" for name, problem in problems.items()),
        _conditions(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loss_steps(steps: int) -> list[int]:
    return sorted({s for s in LOSS_STEPS if s <= steps} | {steps})


def _norm_row(result: Result, results: dict[str, Result]) -> list[str]:
    twin = results.get(result.arm.twin)
    cells = [f"`{result.arm.name}`", _number(result.norms.get("total"), 4), _share(result, twin, "total")]
    for group in GROUPS:
        is_twin = twin is None or result is twin
        cells.append(_number(result.norms.get(group), 4) if is_twin else _share(result, twin, group))
    lost = result.lost.get(1)
    return [*cells, "-" if lost is None else f"{100 * lost:.1f} %"]


def _share(result: Result, twin: Result | None, group: str) -> str:
    if twin is None or result is twin or not twin.norms.get(group) or group not in result.norms:
        return "-"
    return f"{result.norms[group] / twin.norms[group]:.3f}"


def _loss_row(result: Result, results: dict[str, Result], steps: int) -> list[str]:
    twin = results.get(result.arm.twin)
    losses = [_number(result.losses.get(s), 4) for s in _loss_steps(steps)]
    gaps = ["-", "-"]
    if twin is not None and twin is not result:
        pairs = ((result.losses.get(steps), twin.losses.get(steps)), (result.val_loss, twin.val_loss))
        gaps = ["-" if a is None or b is None else f"{a - b:+.4f}" for a, b in pairs]
    return [f"`{result.arm.name}`", *losses, _number(result.val_loss, 4), _number(result.test_loss, 4), *gaps]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    align = ["---", *("--:" if len(header) > 2 else "---" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, align, *rows))


def device() -> str:
    """The device's name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def _conditions(plan: Plan) -> str:
    known = versions()
    return (
        f"{plan.size} size, {plan.steps} steps of a warm-up to {plan.lr:g}, high precision is {plan.precision}; "
        f"{device()}, {date.today().isoformat()}, torch {known['torch']}, torchtitan {known['torchtitan']}."
    )


def write(plan: Plan, results: dict[str, Result], problems: dict[str, str]) -> tuple[Path, Path]:
    """table.json and table.md in the plan's folder."""
    content: dict[str, Any] = {
        "schema": 1,
        "environment": {
            "date": date.today().isoformat(),
            "gpu": device(),
            "versions": versions(),
            "command": "python -m recipes.issue1152 " + " ".join(sys.argv[1:]),
        },
        "plan": {"size": plan.size, "steps": plan.steps, "lr": plan.lr, "precision": plan.precision},
        "published": PUBLISHED,
        "arms": {
            name: {
                "about": r.arm.about,
                "twin": r.arm.twin,
                "steps": plan.steps_of(r.arm),
                "command": plan.command(r.arm)[1:],
                "grad_norm_step_1": r.norms,
                "loss": r.losses,
                "val_loss": r.val_loss,
                "test_loss": r.test_loss,
                "lost": r.lost,
            }
            for name, r in results.items()
        },
        "problems": problems,
    }
    numbers, text = plan.folder / "table.json", plan.folder / "table.md"
    plan.folder.mkdir(parents=True, exist_ok=True)
    numbers.write_text(json.dumps(jsonable(content), indent=2, allow_nan=False) + "\n")
    text.write_text(markdown(plan, results, problems))
    return numbers, text


def fill_readme(folder: Path, readme: Path = README) -> None:
    """Puts the table.md of a folder that `write` has filled between the marks of its size in README.md."""
    size = json.loads((folder / "table.json").read_text())["plan"]["size"]
    marks = f"<!-- table:{size} -->", f"<!-- end:{size} -->"
    filled = f"{marks[0]}\n{(folder / 'table.md').read_text()}{marks[1]}"
    body = re.compile(f"{marks[0]}.*?{marks[1]}", re.DOTALL)
    readme.write_text(body.sub(lambda _: filled, readme.read_text(), count=1))
