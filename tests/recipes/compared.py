"""Runs in memory for the tests of recipes.compare: no event files, so that a rule is tested in microseconds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torchtitan.config import JobConfig

from recipes.run_info import describe_run
from recipes.runs import TAGS, Run

Curve = Callable[[int], float]


def falling(step: int) -> float:
    """A loss that falls from 10.4 to 4."""
    return 4.0 + 6.4 * float(np.exp(-step / 30))


def run(label: str, steps=range(1, 101), loss: Curve = falling, noise=0.0, seed=0, info=None, **metrics: dict) -> Run:
    """A run with `loss` and independent noise at each step, and other metrics as they are."""
    random = np.random.default_rng(seed)
    losses = {step: loss(step) + noise * float(random.standard_normal()) for step in steps}
    scalars = {TAGS["loss"]: losses, **{TAGS.get(name, name): series for name, series in metrics.items()}}
    return Run(label=label, folder=Path("runs") / label, event_files=(), scalars=scalars, info=info)


def shifted(by: float, of: Curve = falling) -> Curve:
    """`of`, higher by `by` from step 50 on, growing until there."""
    return lambda step: of(step) + by * min(1.0, step / 50)


def info(seed: int = 1, converters: tuple[str, ...] = (), **changes: object) -> dict:
    """A run.json."""
    config = JobConfig().to_dict()
    config["debug"]["seed"] = seed
    config["model"]["converters"] = list(converters)
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        config[section][key] = value
    return describe_run(config, device="CPU", world_size=1, batch_degree=1, metrics_rank=0, mfu_peak=None)
