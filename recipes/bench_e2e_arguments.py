"""Which command lines of recipes.bench_e2e could not end in a table, or in a wrong one?  Found before anything runs."""

import argparse
import importlib
from collections.abc import Iterable
from pathlib import Path

from torchtitan.protocols.train_spec import get_train_spec

from recipes.recipe_file import check_arguments, read_recipe

TWINS = "bf16", "fp8"
READ = "--profiling."  # the trace of one step is read, so this whole section is the measurement's


def twin_stem(text: str) -> str:
    """The common stem of two twins, with `:flavor` behind it or not; of a twin's file name the stem of both."""
    stem, colon, flavor = text.partition(":")
    for twin in TWINS:
        stem = stem.removesuffix(f"_{twin}.toml")
    if colon and not flavor:
        raise argparse.ArgumentTypeError(f"{text} lacks a flavor behind its colon: name one, or leave the colon out")
    if missing := [file for file in files(stem) if not Path(file).is_file()]:
        raise argparse.ArgumentTypeError(f"there is no {missing[0]}: give the stem of two twins, or the path of one")
    return stem + colon + flavor


def files(recipe: str) -> list[str]:
    """The paths of both twins of stem or stem:flavor."""
    return [f"{recipe.partition(':')[0]}_{twin}.toml" for twin in TWINS]


def check_flavor(recipe: str) -> None:
    """Checks both twins of stem or stem:flavor, and that the models that they name have the flavor.

    Raises:
        ValueError: a recipe that does not read, an unknown model, module or flavor.
    """
    given = recipe.partition(":")[2]
    for file in files(recipe):
        check_arguments([f"--job.config_file={file}"])
        sections = read_recipe(file)
        model = sections.get("model", {})
        if module := sections.get("experimental", {}).get("custom_import"):
            try:
                importlib.import_module(module)  # as the trainer does before it looks the model up
            except ModuleNotFoundError as error:
                raise ValueError(f"{file}: custom_import = {module!r} cannot be imported: {error}.") from error
        name, flavor = model.get("name", ""), given or model.get("flavor", "")
        try:
            known = get_train_spec(name).model_args
        except ValueError as error:
            raise ValueError(f"{file}: there is no model {name!r}: {error}") from error
        if flavor not in known:
            raise ValueError(f"{file}: {name} has no flavor {flavor!r}: choose one of {', '.join(known)}.")


def check_layouts(layouts: list[str], ngpu: int) -> None:
    """Raises ValueError for a layout that is there twice, or is none of `ngpu` GPUs."""
    if twice := [name for i, name in enumerate(layouts) if name in layouts[:i]]:
        raise ValueError(
            f"--layouts: {twice[0]} is there twice, and would run twice in the same folders: name it once."
        )
    for name in layouts:
        if (name == "single") != (ngpu == 1):
            least = "of one GPU: give --ngpu 1" if name == "single" else "of several GPUs: give --ngpu 2 or more"
            raise ValueError(f"--layouts {name} with --ngpu {ngpu}: it is a layout {least}, or another layout.")


def check_names(recipes: list[str]) -> None:
    """Raises ValueError for two recipes whose runs would have the same names and folders."""
    seen: dict[str, str] = {}
    for recipe in recipes:
        name = model_name(recipe)
        if name in seen:
            raise ValueError(
                f"--recipe: {seen[name]} and {recipe} would both run in the folders of {name}: name one of them, and "
                "measure another with an --out in another folder."
            )
        seen[name] = recipe


def model_name(recipe: str) -> str:
    """What the runs of stem or stem:flavor are called."""
    stem, _, flavor = recipe.partition(":")
    return flavor or Path(stem).name


def check_extra(extra: list[str], command: Iterable[str]) -> None:
    """Raises ValueError for an argument that would replace one of `command`, which the measurement itself sets."""
    own = {_option(arg) for arg in command if arg.startswith("--")}
    for arg in extra:
        if arg.startswith(READ) or (arg.startswith("--") and _option(arg) in own):
            raise ValueError(f"{arg.partition('=')[0]} after --: the measurement sets it itself: leave it out.")


def _option(arg: str) -> str:
    """As torchtitan reads it: - for _, and no- before the name of a switch turns it off."""
    section, dot, name = arg.partition("=")[0].replace("_", "-").rpartition(".")
    return section + dot + name.removeprefix("no-")
