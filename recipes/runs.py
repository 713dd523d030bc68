"""Reads one run from disk: its TensorBoard scalars at full precision, and its run.json.

A run is the dump folder of a job (`job.dump_folder`): `run.json` beside a TensorBoard folder with one sub-folder a
start, `tb/20260131-1530/events.out.tfevents...`. A resumed run has several. TensorBoard stores a scalar as one float32;
every value here is that float32, exactly, in a Python float.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from recipes.run_info import RUN_FILE, SCHEMA

EVENT_FILES = "events.out.tfevents.*"

TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "val_loss": "validation_metrics/loss",
    "test_loss": "test_metrics/loss",
    "grad_norm": "grad_norm",
    "tokens_per_second": "throughput(tps)",
    "memory_gib": "memory/max_reserved(GiB)",
    "mfu_percent": "mfu(%)",
}
"""metric -> torchtitan's TensorBoard tag (the test loss has ours). tokens/s and memory are of one device."""

NAMES = {
    "loss": "training loss",
    "val_loss": "validation loss",
    "test_loss": "test loss",
    "grad_norm": "gradient norm",
}
"""Metrics that must be finite in both runs."""

Series = dict[int, float]
"""step -> value, in the order of the steps"""


class RunError(ValueError):
    """A folder that cannot be read as a run, or two runs that cannot be compared."""


class MismatchError(RunError):
    """Two runs that will not be comparable at a later step either."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. `info` is the content of run.json, None for a run of stock torchtitan, which writes none."""

    label: str
    folder: Path
    event_files: tuple[Path, ...]
    scalars: dict[str, Series]
    info: dict | None

    @property
    def ended(self) -> bool:
        """Has it come to its end? A run that is being written, and one that was killed, have no results yet."""
        return self.info is not None and "results" in self.info

    def series(self, tag: str) -> Series:
        """The scalar `tag`, empty when the run never wrote it."""
        return self.scalars.get(tag, {})


def read_run(folder: str | Path) -> Run:
    """Reads the run in `folder`: a dump folder, or the TensorBoard folder inside one.

    Raises:
        RunError: no such folder, no events in it, several runs in it, or an unreadable run.json.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the job.dump_folder of a run.")
    home, info = _read_info(folder)
    files = _event_files(folder, 0 if info is None else info.get("metrics_rank", 0))
    scalars = _merge(
        [scalars for _, scalars in sorted((_read_events(file) for file in files), key=lambda read: read[0])]
    )
    if not scalars:
        raise RunError(f"{folder} has TensorBoard files but no scalar in them yet: wait for the first logged step.")
    return Run(label=home.resolve().name, folder=folder, event_files=tuple(files), scalars=scalars, info=info)


def _read_info(folder: Path) -> tuple[Path, dict | None]:
    """The dump folder that `folder` is, or lies in, and the content of its run.json."""
    resolved = folder.resolve()
    for home in (resolved, resolved.parent, resolved.parent.parent):
        if (home / RUN_FILE).is_file():
            return home, _parse_info(home / RUN_FILE)
    return resolved, None


def _parse_info(path: Path) -> dict:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}): train again, or delete it.") from error
    if not isinstance(info, dict) or info.get("schema") != SCHEMA:
        raise RunError(f"{path} is not of schema {SCHEMA}, the one this version reads: train again, or delete it.")
    return info


def _event_files(folder: Path, metrics_rank: int) -> list[Path]:
    """The event files of one run below `folder`.

    With metrics.save_for_all_ranks torchtitan writes `rank_N` folders; the losses are global, so one rank's file is
    enough, and with pipeline parallelism it must be the rank that sees the loss.
    """
    found = sorted(folder.rglob(EVENT_FILES))
    if not found:
        raise RunError(f"{folder} holds no TensorBoard events ({EVENT_FILES}): train with metrics.enable_tensorboard.")
    kept = [file for file in found if not _is_rank(file.parent) or file.parent.name == f"rank_{metrics_rank}"]
    if not kept:
        raise RunError(f"{folder} holds TensorBoard events, but none of rank {metrics_rank}, which logs the loss.")
    # <dump folder>/tb/<start>/[rank_N/]events: one run has one tb folder, however often it was started.
    starts = [file.parent.parent if _is_rank(file.parent) else file.parent for file in kept]
    homes = {start.relative_to(folder).parts[:-1] for start in starts}
    if len(homes) > 1:
        names = ", ".join(sorted(str(Path(*home)) for home in homes))
        raise RunError(f"{folder} holds {len(homes)} runs ({names}): name one of them.")
    return kept


def _is_rank(folder: Path) -> bool:
    return folder.name.startswith("rank_")


def _read_events(file: Path) -> tuple[float, dict[str, Series]]:
    """When the file was started (seconds since the epoch) and its scalars, a later event replacing an earlier one."""
    started, scalars = float("inf"), {}
    for event in EventFileLoader(str(file)).Load():
        started = min(started, event.wall_time)
        for value in event.summary.value:
            # the loader has already turned old `simple_value` events into tensors and named their plugin
            if value.metadata.plugin_data.plugin_name == "scalars":
                scalars.setdefault(value.tag, {})[event.step] = float(np.asarray(make_ndarray(value.tensor)).item())
    return started, scalars


def _merge(parts: list[dict[str, Series]]) -> dict[str, Series]:
    """One set of scalars from the starts of a run, oldest first.

    A start that begins at step s replaces everything that earlier starts wrote at s or later: steps after the
    checkpoint it resumed from are of an abandoned branch. A run trained anew in the same folder replaces all of it.
    """
    merged: dict[str, Series] = {}
    for part in parts:
        first = min((step for series in part.values() for step in series), default=None)
        if first is None:
            continue
        merged = {tag: {s: v for s, v in series.items() if s < first} for tag, series in merged.items()}
        for tag, series in part.items():
            merged.setdefault(tag, {}).update(series)
    return {tag: dict(sorted(series.items())) for tag, series in merged.items() if series}
