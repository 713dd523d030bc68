"""Who computes the FP8 GEMMs? A backend is a module with the functions of reference.py; it is chosen once, by name."""

from functools import cache
from importlib import import_module
from types import ModuleType

from converters.capability import hopper_problem

BACKENDS = ("reference", "hopper")


@cache
def get_backend(name: str) -> ModuleType:
    """The backend called `name`, which `capability.resolve` has chosen; loaded when first used (hopper's kernels).

    Raises:
        ValueError: no such backend, or no GPU for it.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown: choose {' or '.join(map(repr, BACKENDS))}.")
    if name == "hopper" and (problem := hopper_problem()):
        raise ValueError(f"{problem} Use backend = 'reference' (plain torch, any device).")
    return import_module(f"converters.backends.{name}")
