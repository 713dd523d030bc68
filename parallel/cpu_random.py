"""Random numbers of DTensors on a CPU.

DTensor draws each shard's numbers from its place in a GPU generator's sequence. A CPU's generator has no places, so
there torch lets every rank draw the same ones: on two ranks the second half of a router's experts, or of the
vocabulary, starts as a copy of the first. Here each shard has a seed of its own, and replicas share theirs. The numbers
are not those of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from parallel.fsdp import sharded_dim

SEEDS = 2**48  # drawn below it: a shard's number is added to it


def shard_number(spec: DTensorSpec) -> int:
    """Which shard of a tensor this rank holds, counted over the mesh axes that cut it."""
    number = 0
    for axis, placement in enumerate(spec.placements):
        if sharded_dim(placement) is not None:
            number = number * spec.mesh.size(axis) + spec.mesh.get_local_rank(axis)
    return number


class ShardSeeds(dtensor_random._RNGStateTracker):
    """What DTensor wraps around an op that draws. Every rank's generator goes on alike: by one number an op."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @contextmanager
    def _distribute_region(self, spec: DTensorSpec, generator: torch.Generator | None = None) -> Iterator[None]:
        seed = int(torch.randint(SEEDS, (), generator=generator)) + shard_number(spec)
        used = torch.default_generator  # the op does not get the caller's
        state = used.get_state()
        used.manual_seed(seed)
        try:
            yield
        finally:
            used.set_state(state)


def let_shards_differ() -> None:
    """Installs `ShardSeeds` for this process."""
    dtensor_random._rng_tracker = ShardSeeds()
