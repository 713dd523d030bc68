"""Which keys of `[fp8]` does a run set and never read?  Said at start: a recipe with them looks like one in FP8."""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torchtitan.config import JobConfig

READERS = {
    "grouped_experts": "fp8.grouped_experts",
    "token_path": "fp8.grouped_experts",
    "dense": "fp8.dense",
}
logger = logging.getLogger(__name__)


def _changed(section: Any) -> str:
    """The keys of a section that have other values than without it."""
    default = type(section)()
    keys = [f.name for f in fields(section) if getattr(section, f.name) != getattr(default, f.name)]
    return ", ".join(f"{key} = {getattr(section, key)!r}" for key in keys)


def check_sections(job_config: JobConfig) -> None:
    """Warns about sections of `[fp8]` whose converter is not in `model.converters`.

    Raises:
        ValueError: `[fp8.token_path] fused = "on"` is among them, which is "on or an error".
    """
    fp8, converters = getattr(job_config, "fp8", None), job_config.model.converters
    if fp8 is None:
        return
    for name, reader in READERS.items():
        if reader in converters or not (keys := _changed(getattr(fp8, name))):
            continue
        problem = (
            f"[fp8.{name}] {keys} is read by the converter '{reader}' only, which model.converters = "
            f"{list(converters)!r} does not name: add it there, or drop what [fp8.{name}] sets."
        )
        if name == "token_path" and fp8.token_path.fused == "on":
            raise ValueError(problem)
        logger.warning(problem)
    if (keys := _changed(fp8.delayed)) and not _delays(fp8, converters):
        logger.warning(
            f"[fp8.delayed] {keys} is read with recipe = 'delayed' only, which no converter of this run has: set it in "
            "[fp8.grouped_experts] or [fp8.dense], or drop what [fp8.delayed] sets."
        )


def _delays(fp8: Any, converters: Sequence[str]) -> bool:
    """Whether a converter of the run has delayed scales."""
    ruled = {READERS[name]: getattr(fp8, name).recipe for name in ("grouped_experts", "dense")}
    return any(ruled.get(name) == "delayed" for name in converters)
