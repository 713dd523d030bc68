"""What a number or a file on a command line has to be: types for argparse, with errors of value, rule and remedy."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

MADE_HERE = Path("outputs")  # git ignores it, and every run writes there: what lies in it is made without a question


def number(noun: str, remedy: str, *, least: float = -math.inf, above: float = -math.inf) -> Callable[[str], float]:
    """A finite number, `least` or more and more than `above`. Errors say "TEXT is no NOUN: give REMEDY"."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least and value > above):
            raise argparse.ArgumentTypeError(f"{text} is no {noun}: give {remedy}")
        return value

    return parse


SECONDS = number("number of seconds", "0 or more", least=0)  # 0: one call


def count(problem: str, *, least: int = 1) -> Callable[[str], int]:
    """A whole number, `least` or more. Errors say "TEXT PROBLEM: give a whole number, 1 or more"."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} {problem}: give a whole number, {least} or more")
        return value

    return parse


def one_of(option: Any) -> Callable[[str], str]:
    """A value of a typing.Literal, an option of a recipe's."""

    def parse(text: str) -> str:
        if text not in get_args(option):
            raise argparse.ArgumentTypeError(f"{text} is unknown: choose one of {', '.join(get_args(option))}")
        return text

    return parse


def listed(text: str) -> list[str]:
    """Names with commas between them; spaces around a name are not of it."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} lacks a name: give one or more, with a comma between two")
    return names


def out_file(text: str) -> Path:
    """A file to be written. Refused before anything is trained or measured: a folder, a path through a file, or a
    folder that is not there (a misspelt one would get the results of hours).
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give the name of a file in it")
    _check_parents(path)
    return path


def out_folder(text: str) -> Path:
    """A folder that may not be there yet, in one that is."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file: give a folder")
    _check_parents(path)
    return path


def _check_parents(path: Path) -> None:
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be made, since {above} is a file: give another path")
    if above != path.absolute().parent and MADE_HERE.absolute() not in path.absolute().parents:
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} for {path.name}: make it, or mend its name")
