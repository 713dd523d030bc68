"""From a name in `model.converters` to a class: ours and every other package's, one way.

A package declares its converters in its own metadata, as pyproject.toml of this repository does:

    [project.entry-points."torchtitan.model_converters"]
    "acme.sparse_experts" = "acme.sparse:SparseExpertsConverter"

`install` puts each name into torchtitan's registry as a `Plugin`, a small callable that imports its package when a run
builds that converter. torchtitan only calls what it finds there (`_registry[name](job_config, parallel_dims)`), so a
broken plug-in hurts no run but those that name it.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torchtitan.protocols.model_converter as protocol
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import ModelConverter, register_model_converter
from torchtitan.tools.logging import logger

GROUP = "torchtitan.model_converters"
DISTRIBUTION = "titan-moe-fp8"
PROTOCOL_METHODS = ("convert", "post_optimizer_hook")


@dataclass(frozen=True)
class Plugin:
    """A converter as its package declares it; nothing of the package is imported before `load`."""

    name: str
    entry_point: EntryPoint
    package: str
    version: str
    rivals: tuple["Plugin", ...] = ()  # the same name in other packages

    def __str__(self) -> str:
        return f"{self.package} {self.version} ({self.entry_point.value})"

    def load(self) -> type[ModelConverter]:
        """The converter class.

        Raises:
            ValueError: another package declares the same name.
            ImportError: the entry point cannot be imported; the cause is chained.
            TypeError: what it names is no converter class.
        """
        if self.rivals:
            claims = " and ".join(map(str, (self, *self.rivals)))
            raise ValueError(f"Converter '{self.name}' is declared by {claims}: uninstall all but one of them.")
        try:
            found = self.entry_point.load()
        except (Exception, SystemExit) as error:  # a plug-in may fail in any way while it is imported
            raise ImportError(
                f"Converter '{self.name}' of {self} cannot be imported: {type(error).__name__}: {error}. "
                f"Repair or update {self.package}, or take '{self.name}' out of model.converters."
            ) from error
        lacks = [m for m in PROTOCOL_METHODS if not callable(getattr(found, m, None))]
        if lacks or not isinstance(found, type):
            what = f"has no method {' and no '.join(lacks)}" if lacks else "is not a class"
            raise TypeError(
                f"Converter '{self.name}' of {self} {what}: a model converter is a class built from (job_config, "
                f"parallel_dims) with the methods {' and '.join(PROTOCOL_METHODS)} (torchtitan's ModelConverter)."
            )
        return found

    def __call__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> ModelConverter:
        """What torchtitan calls when a run names this converter."""
        return self.load()(job_config, parallel_dims)


class _Registry(dict):
    """torchtitan's registry, whose lookup of an unknown name says what is known instead of `KeyError`."""

    def __missing__(self, name: str) -> None:
        raise _unknown(name, self)


def discover() -> dict[str, Plugin]:
    """Every converter that an installed package declares, by name; imports none of them."""
    found: dict[str, list[Plugin]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, str(e.dist.name))):
        package, version = entry.dist.name, entry.dist.version  # None where an install was cut short
        plugin = Plugin(entry.name, entry, package or "unnamed package", version or "without version")
        found.setdefault(entry.name, []).append(plugin)
    return {
        name: Plugin(name, first.entry_point, first.package, first.version, tuple(others))
        for name, (first, *others) in found.items()
    }


def install() -> None:
    """Puts every discovered converter into torchtitan's registry; what already stands there stays. Idempotent.

    The registry is a module global of torchtitan: this is the one place that changes it.
    """
    if not isinstance(protocol._registry_model_converter_cls, _Registry):
        protocol._registry_model_converter_cls = _Registry(protocol._registry_model_converter_cls)
    registry = protocol._registry_model_converter_cls
    for name, plugin in discover().items():
        held = registry.get(name)
        if held is None:
            register_model_converter(plugin, name)
        elif not isinstance(held, Plugin):
            logger.warning(f"Converter '{name}' of {plugin} is ignored: {held.__module__} registered that name itself.")


def check_names(names: Iterable[str]) -> None:
    """Refuses a run's `model.converters` before anything is built; imports the plug-ins among them. After `install`.

    Raises:
        ValueError: a name is unknown or declared twice.
        ImportError, TypeError: from `Plugin.load`.
    """
    for name in names:
        converter = protocol._registry_model_converter_cls[name]
        if isinstance(converter, Plugin):
            converter.load()


def _unknown(name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that nothing registered, with near names and what to do."""
    known = sorted(known)
    if name in _declared_in_checkout():
        root = Path(__file__).parents[1]
        remedy = f"this checkout declares it, but is not installed in this Python: run `pip install -e {root}`"
    elif not name.strip():
        remedy = "an empty name: for no converter, write `converters = []` in the recipe"
    elif near := get_close_matches(name.strip().lower(), known, n=3, cutoff=0.5):
        spaces = " without spaces" if name != name.strip() else ""
        remedy = f"did you mean {' or '.join(map(repr, near))}{spaces}?"
    else:
        remedy = "is its package installed?"
    return ValueError(
        f"Unknown converter {name!r} in model.converters: {remedy} (known: {', '.join(known)}; "
        "`python -m converters` tells more)"
    )


def _declared_in_checkout() -> dict[str, str]:
    """Entry points in the pyproject.toml beside this folder; none where this package is installed without it."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    if not path.exists():
        return {}
    project = tomllib.loads(path.read_text()).get("project", {})
    if project.get("name") != DISTRIBUTION:
        return {}
    return project.get("entry-points", {}).get(GROUP, {})
