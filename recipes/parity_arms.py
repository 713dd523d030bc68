"""The arms of a parity test: which runs they are, the command of each, and what is refused before one starts."""

import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from converters.numerics import Recipe

DONE = "done.json"
# The arm "whole": tokenwise in the experts and in the dense layers, small as these are here.
WHOLE = ("--model.converters=fp8.grouped_experts,fp8.dense", "--fp8.dense.below_break_even=warn")
RULES = ("bf16", *get_args(Recipe), "whole")
# What makes an arm the one that its name says (underscores as in tyro's names).
OWN = ("__debug.seed", "__data.shuffle_seed", "__job.dump_folder", "__job.config_file", "__fp8.grouped_experts.recipe")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run: a model (stem of two twin recipes); bf16, a scale rule or whole; a seed of weights and data order."""

    model: str
    recipe: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """As in `mixtral_300m tokenwise:1`."""
        return f"{self.model} {self.recipe}:{self.seed}"

    def home(self, folder: Path) -> Path:
        """Its dump folder."""
        return folder / f"{self.model}_{self.recipe}_{self.seed}"

    def command(self, folder: Path, extra: Sequence[str]) -> list[str]:
        """What a user would type to make this run alone."""
        bf16, rule = self.recipe == "bf16", [f"--fp8.grouped_experts.recipe={self.recipe}"]
        return [
            *("python", "train.py", f"--job.config_file=recipes/{self.model}_{'bf16' if bf16 else 'fp8'}.toml"),
            *([] if bf16 else WHOLE if self.recipe == "whole" else rule),
            *(f"--debug.seed={self.seed}", f"--data.shuffle_seed={self.seed}"),
            f"--job.dump_folder={self.home(folder)}",
            # Saved when asked to (see recipes/trainer.py) and at the end, never in between.
            *("--checkpoint.enable", "--checkpoint.interval=1000000", "--metrics.disable_color_printing"),
            *extra,
        ]

    def is_done(self, folder: Path) -> bool:
        """Whether an earlier call finished it."""
        return (self.home(folder) / DONE).is_file()


def parse_arms(models: str, arms: str, extra: Sequence[str]) -> list[Arm]:
    """`mixtral_300m,llama4_300m` and `bf16:1,tokenwise:1` -> every arm of every model, in this order of arms.

    `extra`: the further arguments of every run, which may change its number of steps.

    Raises:
        ValueError: a model without twin recipes, an arm that is not RULE:SEED, one given twice, or an option in `extra`
            that makes an arm what it is.
    """
    check_extra(extra)
    named, given = ([name.strip() for name in text.split(",")] for text in (models, arms))
    for model in named:
        if missing := [p for t in ("bf16", "fp8") if not (p := Path(f"recipes/{model}_{t}.toml")).is_file()]:
            raise ValueError(f"Model {model!r} has no {missing[0]} (from {Path.cwd()}): give the stem of two twins.")
    if wrong := [arm for arm in given if not re.fullmatch(r"\w+:\d+", arm)]:
        raise ValueError(f"Arm {wrong[0]!r} is not RULE:SEED, such as bf16:1 or tokenwise:1.")
    pairs = [arm.split(":") for arm in given]
    if unknown := [rule for rule, _ in pairs if rule not in RULES]:
        raise ValueError(f"Arm {unknown[0]!r} is of no scale rule: choose one of {', '.join(RULES)}.")
    for what, names in (("Model", named), ("Arm", [f"{rule}:{int(seed)}" for rule, seed in pairs])):
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{what} {twice[0]} is named twice, and both would write into one folder: name it once.")
    steps = {model: steps_of(model, extra) for model in named}
    return [Arm(model=m, recipe=rule, seed=int(seed), steps=n) for rule, seed in pairs for m, n in steps.items()]


def check_extra(extra: Sequence[str]) -> None:
    """Refuses what an arm sets itself; argparse takes all of it, also words that were meant for this command.

    Raises:
        ValueError: naming the argument.
    """
    if extra and not extra[0].startswith("--"):
        raise ValueError(f"{extra[0]!r} is no option of the runs: give those after --, as --training.steps=100.")
    if own := [arg for arg in extra if arg.split("=")[0].replace("-", "_") in OWN]:
        raise ValueError(f"{own[0]!r} is set for each arm by this command: leave it out, and use --arms and --folder.")


def steps_of(model: str, extra: Sequence[str]) -> int:
    """Training steps of a model's runs: the recipe's, or what `--training.steps` in `extra` says instead.

    Raises:
        ValueError: no whole number above 0 stands there.
    """
    words = [word for arg in extra for word in arg.split("=", 1)]  # --name=value and --name value
    given = [value for name, value in itertools.pairwise([*words, ""]) if name == "--training.steps"]
    if given:
        if not (given[-1].isdecimal() and int(given[-1]) > 0):
            raise ValueError(f"--training.steps={given[-1]} must be a whole number, 1 or more.")
        return int(given[-1])
    return tomllib.loads(Path(f"recipes/{model}_bf16.toml").read_text())["training"]["steps"]
