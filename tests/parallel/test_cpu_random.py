"""Initial weights on two CPU ranks: shards differ, replicas and generators do not."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from converters.expert_weight import FP8ExpertWeight
from converters.numerics import Numerics
from parallel.cpu_random import let_shards_differ
from tests.helpers import distributed


def gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def drawn(placement: Placement, weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    w: DTensor = distribute_tensor(weight, mesh, [placement])
    nn.init.trunc_normal_(w, std=0.02, generator=generator)
    local = w.to_local()
    return local._data if isinstance(local, FP8ExpertWeight) else local


@distributed(2)
def test_shards_differ_and_replicas_do_not() -> None:
    let_shards_differ()
    torch.manual_seed(3)
    for dim in (0, 1):
        first, second = gathered(drawn(Shard(dim), torch.zeros(8, 16)))
        assert not torch.isclose(first, second).any()
        assert 0.01 < first.std() < 0.03
    for wrapped in gathered(drawn(Shard(0), FP8ExpertWeight(torch.zeros(4, 16, 16), Numerics()))):
        assert len(wrapped.unique()) > 500
    assert torch.equal(*gathered(drawn(Replicate(), torch.zeros(8, 16))))
    assert torch.equal(*gathered(torch.rand(4)))  # what a plain tensor gets next


@distributed(2)
def test_a_seed_gives_the_same_numbers_again_and_others_next() -> None:
    let_shards_differ()
    for own in (False, True):
        torch.manual_seed(3)
        draws = []
        generator = torch.Generator().manual_seed(4) if own else None
        before = torch.get_rng_state()
        for seed in (None, None, 4):
            if seed is not None:
                torch.manual_seed(3)
                generator = torch.Generator().manual_seed(4) if own else None
            draws.append(drawn(Shard(0), torch.zeros(8, 16), generator))
        assert torch.equal(draws[0], draws[2])
        assert not torch.isclose(draws[0], draws[1]).any()
        assert not own or torch.equal(before, torch.get_rng_state())
