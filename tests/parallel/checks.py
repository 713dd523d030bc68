"""Many checks in one start of the processes: imports take longer than any of them."""

import importlib
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import distributed
from tests.parallel.matrix import make_seed_checkpoint

Check = Callable[[Path], None]


def checks_of(module: dict[str, object], prefix: str = "check_") -> dict[str, Check]:
    """The functions of a test module whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): f for name, f in module.items() if name.startswith(prefix)}


def run_checks(checks: Mapping[str, Check], folder: Path) -> None:
    """Runs them in order on this rank; each leaves a file, empty or with what went wrong. Errors end nothing else."""
    for name, check in checks.items():
        error = ""
        try:
            check(folder)
        except Exception:
            error = traceback.format_exc()
        (folder / f"{name}.{dist.get_rank()}").write_text(error)


def expect_no_error(name: str, folder: Path, ranks: int) -> None:
    """Fails the test with the first rank's error, or if the check did not end there."""
    for rank in range(ranks):
        file = folder / f"{name}.{rank}"
        error = file.read_text() if file.exists() else "did not run, or did not end"
        if error:
            pytest.fail(f"rank {rank}: {error}", pytrace=False)


@distributed(1)
def _seed(model: str, folder: str) -> None:
    make_seed_checkpoint(model, Path(folder) / "seed")


@distributed(2, timeout_s=240)
def _all_checks(module: str, folder: str) -> None:
    run_checks(checks_of(vars(importlib.import_module(module))), Path(folder))


def run_on_two_ranks(module: str, model: str, folder: Path) -> Path:
    """Every check of a test module, on a seed checkpoint of `model` in folder / "seed". Returns the folder."""
    _seed(model, str(folder))
    _all_checks(module, str(folder))
    return folder
