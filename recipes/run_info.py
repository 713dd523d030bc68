"""run.json: what a run was, written beside its TensorBoard folder, so that two runs can be compared knowingly.

reporting.py writes it when a run starts, and adds the results when it ends; compare.py reads it back.
"""

import json
import math
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
SCHEMA = 1

PACKAGES = ("torch", "torchtitan", "torchao", "triton", "titan-moe-fp8")

# Sections that change where a run writes and what it shows or measures, never what it computes.
_PRESENTATION = ("job.", "metrics.", "profiling.", "fp8.telemetry.")


@dataclass(frozen=True)
class Point:
    """A loss after training step `step`."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        """See `perplexity`."""
        return perplexity(self.loss)

    def as_dict(self) -> dict[str, float]:
        """step, loss and perplexity."""
        return {"step": self.step, "loss": self.loss, "perplexity": self.perplexity}


def perplexity(loss: float) -> float:
    """exp(loss), the loss in nats a token; inf where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def versions() -> dict[str, str]:
    """Installed version of each package that decides a run's numbers, and of Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe_run(
    config: dict[str, Any],
    *,
    device: str,
    world_size: int,
    batch_degree: int,
    metrics_rank: int,
    mfu_peak: tuple[float, str] | None,
) -> dict[str, Any]:
    """The content of run.json.

    Args:
        config: the whole job config as nested dicts (`JobConfig.to_dict()`).
        device: name of the device, as torchtitan logs it.
        batch_degree: number of ranks that read different data (data_parallel_replicate x data_parallel_shard).
        metrics_rank: the rank whose log holds the loss.
        mfu_peak: FLOP/s that torchtitan divides by for its MFU and what they are; None when there is no such peak.
    """
    return {
        "schema": SCHEMA,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": config["job"].get("config_file"),
        "model": f"{config['model']['name']} {config['model']['flavor']}",
        "converters": list(config["model"]["converters"]),
        "seed": config["debug"]["seed"],
        "data": _data(config, batch_degree),
        "validation": _validation(config, batch_degree),
        "device": device,
        "world_size": world_size,
        "metrics_rank": metrics_rank,
        "mfu_peak": None if mfu_peak is None else {"flops": mfu_peak[0], "of": mfu_peak[1]},
        "versions": versions(),
        "config": config,
    }


def sequences_per_step(global_batch_size: int, local_batch_size: int, batch_degree: int) -> int:
    """The global batch size; a configured one below 0 means one micro-batch a rank."""
    return local_batch_size * batch_degree if global_batch_size < 0 else global_batch_size


def _data(config: dict[str, Any], batch_degree: int) -> dict[str, Any]:
    """What decides which tokens the model sees at a step. How ranks and micro-batches split the batch is not in it."""
    training = config["training"]
    batch = sequences_per_step(training["global_batch_size"], training["local_batch_size"], batch_degree)
    return {
        "dataset": training["dataset"],
        "dataset_path": training["dataset_path"],
        "global_batch_size": batch,
        "seq_len": training["seq_len"],
        "tokenizer": config["model"].get("hf_assets_path"),
        "options": config.get("data"),
    }


def _validation(config: dict[str, Any], batch_degree: int) -> dict[str, Any] | None:
    validation = config["validation"]
    if not validation["enable"]:
        return None
    kept = {key: validation[key] for key in ("dataset", "dataset_path", "seq_len", "steps")}
    return kept | {"global_batch_size": validation["local_batch_size"] * batch_degree}


def write_run_info(folder: str | Path, info: dict[str, Any]) -> Path:
    """Writes run.json into the dump folder, whole or not at all, and returns its path."""
    return _write(Path(folder) / RUN_FILE, info)


def add_results(folder: str | Path, results: dict[str, Any]) -> None:
    """Adds `results`, what came of the run, to the run.json in `folder`."""
    path = Path(folder) / RUN_FILE
    _write(path, json.loads(path.read_text(encoding="utf-8")) | {"results": jsonable(results)})


def _write(path: Path, info: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".json.part")
    draft.write_text(json.dumps(info, indent=2, default=str) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def jsonable(value: Any) -> Any:
    """`value` with paths as text and non-finite numbers, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def config_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted config keys whose values differ and which may change numbers: key -> (value in a, value in b)."""
    a, b = flatten(a), flatten(b)
    keys = [key for key in sorted(a.keys() | b.keys()) if not key.startswith(_PRESENTATION)]
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}
