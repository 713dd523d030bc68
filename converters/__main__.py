"""Which model converters does this Python have, and can this machine run them?  python -m converters [--json]

Imports every plug-in, so it shows here why one is broken instead of in a run; a broken one stops neither the table nor
its neighbours.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torchtitan.protocols.model_converter as protocol
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import ModelConverter

from converters import registry

ONE_PROCESS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One converter. `runs` is None where its class does not say; `reason` says why it is not True."""

    name: str
    package: str
    version: str
    class_name: str | None = None
    purpose: str = ""
    runs: bool | None = None
    reason: str = ""


def describe() -> list[Row]:
    """A row for every name in torchtitan's registry, sorted by name. After `registry.install`."""
    return [_row(name, held) for name, held in sorted(protocol._registry_model_converter_cls.items())]


def _row(name: str, held: type[ModelConverter] | registry.Plugin) -> Row:
    if isinstance(held, registry.Plugin):
        known = {"name": name, "package": held.package, "version": held.version}
    else:
        package = held.__module__.split(".")[0]
        known = {"name": name, "package": package, "version": _version(package)}
    try:
        cls = held.load() if isinstance(held, registry.Plugin) else held
        runs, reason = _runs_here(cls)
    except (Exception, SystemExit) as error:  # whatever a plug-in does, the others are shown
        return Row(**known, runs=False, reason=str(error) or type(error).__name__)
    name_of_class = f"{cls.__module__}.{cls.__qualname__}"
    return Row(**known, class_name=name_of_class, purpose=_first_sentence(cls.__doc__), runs=runs, reason=reason)


def _first_sentence(docstring: str | None) -> str:
    paragraph = (docstring or "").strip().split("\n\n")[0]
    return " ".join(paragraph.split()).partition(". ")[0].rstrip(".")


def _runs_here(cls: type[ModelConverter]) -> tuple[bool | None, str]:
    """Whether this machine can run a converter, and why not, from the class itself."""
    if hasattr(cls, "unavailable_reason"):
        reason = cls.unavailable_reason()
        return reason is None, reason or ""
    if cls.__module__.startswith("torchtitan."):
        problems = dict.fromkeys([*_construction_problem(cls), *_missing_imports(cls)])
        return not problems, "; ".join(problems)
    return None, "the class has no unavailable_reason()"


def _construction_problem(cls: type[ModelConverter]) -> Iterator[str]:
    """torchtitan's own converters check the device and its capability when they are built, so build one."""
    try:
        cls(JobConfig(), ONE_PROCESS)
    except Exception as error:
        yield str(error).rstrip(".")


def _missing_imports(cls: type[ModelConverter]) -> Iterator[str]:
    """Names that torchtitan's own converters import inside __init__ and convert, and that are not installed.

    torchtitan 0.2.2 imports MoETrainingConfig in `convert`; torchao 0.17 dropped it (torchtitan#2460).
    """
    for function in ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body:
        if not isinstance(function, ast.FunctionDef) or function.name not in ("__init__", "convert"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (missing := _missing_names(node)):
                root = node.module.split(".")[0]
                yield f"{root} {_version(root)} has no {' and no '.join(missing)} in {node.module}"


def _missing_names(node: ast.ImportFrom) -> list[str]:
    try:
        module = importlib.import_module(node.module)
    except ImportError:
        return [alias.name for alias in node.names]
    return [alias.name for alias in node.names if not hasattr(module, alias.name)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(rows: list[Row]) -> Table:
    table = Table(title="Model converters (names for model.converters)", show_lines=True)
    table.add_column("name and package", no_wrap=True)
    table.add_column("class and purpose", overflow="fold")
    table.add_column("runs on this machine", overflow="fold")
    verdicts = {True: ("yes", "green"), False: ("no", "red"), None: ("unknown", "yellow")}
    for row in rows:
        word, color = verdicts[row.runs]
        who = Text(row.name, style="bold").append(f"\n{row.package} {row.version}", style="not bold")
        what = "\n".join(filter(None, ((row.class_name or "").rpartition(".")[2], row.purpose)))
        verdict = Text(word, style=color).append(f": {row.reason}" if row.reason else "", style="default")
        table.add_row(who, what and Text(what), verdict)
    return table


def main(args: list[str] | None = None) -> None:
    """Prints the table, or with --json a list of objects with the fields of `Row`."""
    parser = argparse.ArgumentParser(prog="python -m converters", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args(args)
    with contextlib.redirect_stdout(sys.stderr):  # what a plug-in prints while it is imported
        registry.install()
        rows = describe()
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console().print(_table(rows))


if __name__ == "__main__":
    main()
