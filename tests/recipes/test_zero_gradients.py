"""Exact zeros of all gradients: each element of each gradient is counted once, however it is spread over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from recipes.zero_gradients import ZeroCount, count_zeros
from tests.helpers import distributed

GRAD = torch.tensor([[0.0, 1.0, -0.0], [2.0, 0.0, 1e-45], [float("nan"), float("inf"), 0.0], [0.0, 0.0, 3.0]])
ZEROS = 6  # -0.0 is one, a subnormal is none


def test_zeros_and_elements_of_one_process():
    counts = count_zeros([GRAD, torch.ones(5), torch.zeros(2, 2, dtype=torch.bfloat16)], owns_plain=True)
    assert counts.tolist() == [ZEROS + 4, 12 + 5 + 4]
    assert counts.dtype == torch.int64


@pytest.mark.parametrize(("grads", "owns"), [([], True), ([GRAD], False)], ids=["none", "another rank's"])
def test_nothing_to_count(grads, owns):
    assert count_zeros(grads, owns_plain=owns).tolist() == [0, 0]
    assert ZeroCount(0, 0).percent == 0


def test_counts_beyond_float32_are_exact():
    zeros = torch.zeros(1, dtype=torch.bfloat16).expand(3, 2**24 + 1)  # float32 has no 2**24 + 1
    ones = torch.ones(1, dtype=torch.bfloat16).expand(2**12 + 1, 2**12)
    assert count_zeros([zeros, ones], owns_plain=True).tolist() == [zeros.numel(), zeros.numel() + ones.numel()]


def test_nan_is_no_zero_and_a_scalar_and_no_rows_count():
    grads = [torch.tensor([0.0, -0.0, float("nan"), 1e-45]), torch.tensor(0.0), torch.zeros(0, 3), torch.zeros(3, 0)]
    assert count_zeros(grads, owns_plain=True).tolist() == [3, 5]


@distributed(2)
def test_two_ranks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    first = dist.get_rank() == 0
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):  # Shard(1): two columns here, one there
        assert count_zeros([distribute_tensor(GRAD, mesh, placements)], owns_plain=True).tolist() == [ZEROS, 12]
    # DDP: the same plain gradient on both; pipeline: other gradients on each
    assert count_zeros([GRAD], owns_plain=first).tolist() == [ZEROS, 12]
    assert count_zeros([GRAD] if first else [torch.zeros(7)], owns_plain=True).tolist() == [ZEROS + 7, 19]
    # summands (1, 0) and (-1, 0): both sums are zero, one summand each is
    partial = DTensor.from_local(torch.tensor([1.0 if first else -1.0, 0.0]), mesh, [Partial()])
    assert count_zeros([partial], owns_plain=True).tolist() == [2, 2]


@distributed(4)
def test_a_mesh_of_shards_and_copies():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    layouts = ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()])
    grads = [distribute_tensor(GRAD, mesh, placements) for placements in layouts]
    assert count_zeros(grads, owns_plain=True).tolist() == [4 * ZEROS, 48]
