"""Who computes the FP8 GEMMs? A backend is a module with the functions of reference.py; it is chosen once, by name."""

from types import ModuleType

from converters.backends import reference


def get_backend(name: str) -> ModuleType:
    """The backend called `name`, which `capability.resolve` has chosen.

    Raises:
        ValueError: no such backend.
    """
    if name == "reference":
        return reference
    raise ValueError(f"backend {name!r} is unknown: choose 'reference' or 'hopper'.")
