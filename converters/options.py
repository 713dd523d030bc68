"""Checks that the sections of `[fp8]` share: each names the section, the option, its value and what would be right."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin


def check_choices(section: str, options: Any) -> None:
    """Raises ValueError where an option whose type is a Literal has another value."""
    for f in fields(options):
        value, choices = getattr(options, f.name), get_args(f.type)
        if get_origin(f.type) is Literal and value not in choices:
            allowed = ", ".join(map(repr, choices))
            raise ValueError(f"[{section}] {f.name} = {value!r} is unknown: choose one of {allowed}.")


def check_whole(section: str, options: Any, names: Iterable[str], wanted: str, least: int = 0) -> None:
    """Raises ValueError where one of `names` is no whole number from `least` on; wanted: what it must be, in words."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"[{section}] {name} = {value!r} must be a whole number{wanted}.")


def check_switches(section: str, options: Any) -> None:
    """Raises ValueError where an option whose type is bool is none."""
    for f in fields(options):
        value = getattr(options, f.name)
        if f.type is bool and not isinstance(value, bool):
            raise ValueError(f"[{section}] {f.name} = {value!r} must be true or false.")


def check_patterns(section: str, options: Any, names: Iterable[str]) -> None:
    """Raises ValueError where one of `names` is no list of patterns."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, list) or not all(isinstance(p, str) and p for p in value):
            raise ValueError(f"[{section}] {name} = {value!r} must be a list of non-empty patterns.")
