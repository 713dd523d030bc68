"""The tokens of all ranks reach the loss without the host reading them, and only they do."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.train import Trainer as TorchTitanTrainer

from recipes.token_count import first_sum_on_device
from tests.helpers import distributed

ORIGINAL = dist_utils.dist_sum


class Begun(Exception):
    """The forward pass would come now."""


def begin_step(dp_enabled: bool, masked: int) -> Tensor:
    """`global_valid_tokens` as torchtitan's own train_step hands it to a forward pass, of labels [2, 16]."""
    seen = []

    def forward_backward_step(**given: object) -> Tensor:
        seen.append(given["global_valid_tokens"])
        raise Begun("forward")

    labels = torch.zeros(2, 16, dtype=torch.int64)
    labels[:, :masked] = IGNORE_INDEX
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dp_enabled else None
    trainer = SimpleNamespace(
        optimizers=SimpleNamespace(zero_grad=lambda: None),
        lr_schedulers=SimpleNamespace(schedulers=[SimpleNamespace(get_last_lr=lambda: [0.1])]),
        parallel_dims=SimpleNamespace(dp_enabled=dp_enabled, get_mesh=lambda name: mesh),
        gradient_accumulation_steps=1,
        device=torch.device("cpu"),
        forward_backward_step=forward_backward_step,
    )
    reads = mock.patch.object(Tensor, "item", side_effect=AssertionError("the host waits"))
    with pytest.raises(Begun, match="forward"), first_sum_on_device(dp_enabled), reads:
        TorchTitanTrainer.train_step(trainer, iter([({"input": labels}, labels)]))
    return seen[0]


@distributed(2)
def test_the_tokens_of_all_ranks_stay_on_the_device() -> None:
    count = begin_step(dp_enabled=True, masked=1 + 4 * dist.get_rank())
    assert type(count) is Tensor, "torch.compile must see no subclass"
    assert (count.dtype, count.shape, float(count)) == (torch.float32, (), 2 * (15 + 11))
    loss = torch.tensor(123.456)
    assert torch.equal(loss / count, loss / 52.0)


@distributed(2)
def test_sums_after_the_first_are_numbers() -> None:
    mesh, one = init_device_mesh("cpu", (2,)), torch.tensor(dist.get_rank() + 1)
    with first_sum_on_device(True):
        assert isinstance(dist_utils.dist_sum(one, mesh), Tensor)
        assert dist_utils.dist_sum(one, mesh) == 3
        assert isinstance(dist_utils.dist_sum(one, mesh), int)


def test_one_rank_has_nothing_to_sum() -> None:
    assert float(begin_step(dp_enabled=False, masked=2)) == 28
    with first_sum_on_device(False):
        assert dist_utils.dist_sum is ORIGINAL


def test_a_step_that_fails_leaves_torchtitan_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="data"), first_sum_on_device(True):
        raise RuntimeError("no data")
    assert dist_utils.dist_sum is ORIGINAL
