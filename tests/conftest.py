"""Gating, seeding and threads for every test.

`gpu`, `gpu(capability=(9, 0))`, `gpu(count=2)`: skipped, with the reason, where the machine has no such devices;
under REQUIRE_GPU=1 that is a failure, so a GPU machine cannot pass by skipping.
"""

import os
import random

# Before torch starts its thread pool: xdist runs one worker a core, and a pool in each of them only fights the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

SEED = 1234


def missing_gpu(capability: tuple[int, int], count: int) -> str | None:
    """One sentence when this machine lacks `count` CUDA devices of `capability` or later, else None."""
    wanted = f"needs {count} CUDA device{'s' * (count > 1)} of capability {capability[0]}.{capability[1]} or later"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if len([c for c in found if c >= capability]) >= count:
        return None
    return f"{wanted}, found {', '.join(f'{a}.{b}' for a, b in found) or 'none'}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    reason = missing_gpu(marker.kwargs.get("capability", (9, 0)), marker.kwargs.get("count", 1))
    if reason and os.environ.get("REQUIRE_GPU", "0") == "1":
        pytest.fail(f"REQUIRE_GPU=1 and the test {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for a test alone, in the whole run and on any worker."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
