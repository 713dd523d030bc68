"""Does a recipe say what can be said?  torchtitan ends at a misspelt key with a traceback, and lets a value of another
type pass until something breaks on it. Here both are a sentence, before anything is built.
"""

import difflib
import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan.config import ConfigManager, JobConfig

HELP = "`python train.py --help` has them all"
WORDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def read_recipe(path: str) -> dict[str, Any]:
    """The sections of a recipe file, as they stand there.

    Raises:
        ValueError: there is no such file, or it is no TOML.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no recipe {path}: give the path of a TOML file, recipes/llama4_fp8.toml say.")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML or UTF-8
        raise ValueError(f"{path} is no TOML file: {error}.") from error


def check_arguments(args: list[str]) -> None:
    """Checks the recipe that a command line of train.py names, by the config class that it runs with.

    Raises:
        ValueError: see `read_recipe` and `check_recipe`; there is no such module of config sections.
    """
    given = _values(args)
    path, module = given.get("--job.config-file"), given.get("--job.custom-config-module")
    recipe = {} if path is None else read_recipe(path)
    job = recipe.get("job", {})
    module = module or (job.get("custom_config_module") if isinstance(job, dict) else None)
    check_recipe(path or "", recipe, _config_class(module))


def _values(args: list[str]) -> dict[str, str]:
    """The value of each flag, written --flag=value or --flag value; the last one counts."""
    found = {}
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, equals, value = arg.partition("=")
        if flag.startswith("--"):
            found[flag.replace("_", "-")] = value if equals else following
    return found


def _config_class(module: str | None) -> type:
    if not module:
        return JobConfig
    try:
        sections = getattr(importlib.import_module(module), "JobConfig", None)
    except ModuleNotFoundError as error:
        raise ValueError(f"job.custom_config_module = {module!r} cannot be imported: {error}.") from error
    if sections is None:
        raise ValueError(f"job.custom_config_module = {module!r} has no class JobConfig of sections.")
    return ConfigManager._merge_configs(JobConfig, sections)


def check_recipe(path: str, values: Mapping[str, Any], config: type, section: str = "") -> None:
    """Compares the names and types of `values`, of a section of the recipe at `path`, with those of a config class.

    Raises:
        ValueError: an unknown section or option, or a value of another type, with what it should be.
    """
    known = {f.name: f.type for f in fields(config)}
    for name, value in values.items():
        full = f"{section}.{name}".removeprefix(".")
        if name not in known:
            raise ValueError(f"{path}: {_unknown(section, name, isinstance(value, dict), known)}")
        kind = known[name]
        if not is_dataclass(kind):
            if not _fits(value, kind):
                raise ValueError(f"{path}: [{section}] {name} = {value!r} {_wanted(kind)}.")
        elif isinstance(value, dict):
            check_recipe(path, value, kind, full)
        else:
            raise ValueError(f"{path}: {full} = {value!r} is a section: write its options below a line [{full}].")


def _unknown(section: str, name: str, is_table: bool, known: Mapping[str, Any]) -> str:
    alike = [n for n, kind in known.items() if is_dataclass(kind) == is_table]
    near = difflib.get_close_matches(name, alike, n=1)
    full = f"{section}.{name}".removeprefix(".")
    if is_table:
        meant = f"did you mean [{f'{section}.{near[0]}'.removeprefix('.')}]?" if near else f"{HELP}."
        return f"there is no section [{full}]: {meant}"
    place = f"[{section}]" if section else "A recipe, above its first section,"
    return f"{place} has no option {name!r}: " + (f"did you mean {near[0]!r}?" if near else f"{HELP}.")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of TOML is of a field's type; also where the type is none that TOML has."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, get_args(kind)[0]) for v in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (str, bool, type(None)) else True


def _wanted(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"is unknown: choose one of {', '.join(map(repr, get_args(kind)))}"
    return f"must be {_words(kind)}"


def _words(kind: Any) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_words(k) for k in of if k is not type(None))
    if origin is Literal:
        return f"one of {', '.join(map(repr, of))}"
    return f"a list, each of it {_words(of[0])}" if origin is list else WORDS.get(kind, str(kind))
