"""Checkpoints of wrapped weights are plain, open everywhere, and load back into the wrappers."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from converters.expert_weight import FP8ExpertWeight
from parallel.wrapped_weight import plain
from tests.helpers import make_experts
from tests.parallel.modules import Experts


def test_state_dict_is_plain_shares_storage_and_loads_in_place() -> None:
    model = Experts().wrap()
    state = model.state_dict()
    assert all(type(t) is Tensor for t in state.values())
    assert state["w1"].data_ptr() == model.w1._data.data_ptr()
    before = model.w1
    model.load_state_dict({name: t + 1 for name, t in state.items()})
    assert model.w1 is before
    assert torch.equal(model.w1._data, state["w1"])  # in place: what state_dict gave has moved along


def test_torch_save_opens_with_weights_only_and_without_us(tmp_path: Path) -> None:
    """ao#4782, tt#4240: a pickled wrapper is refused by weights_only and by every model without it."""
    model = Experts().wrap()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert b"FP8ExpertWeight" not in (tmp_path / "model.pt").read_bytes()
    for other in (Experts(), Experts().wrap()):
        other.load_state_dict(state)
        assert torch.equal(plain(other.w2.detach()), model.w2._data)


def test_loading_with_assign_keeps_the_wrapper() -> None:
    """What loading into a meta-device model does: the state dict's own tensors become the parameters."""
    state = Experts().state_dict()
    with torch.device("meta"):
        model = Experts().wrap()
    model.load_state_dict(state, assign=True)
    assert type(model.w1) is FP8ExpertWeight
    assert isinstance(model.w1, nn.Parameter)
    assert model.w1._data.data_ptr() == state["w1"].data_ptr()
    assert type(model.bias) is nn.Parameter


def test_a_mixed_state_dict_of_another_dtype_is_cast_in_place() -> None:
    model = Experts().wrap()
    state = {name: t.bfloat16() for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.w1.dtype == torch.float32
    assert torch.equal(model.w1._data, state["w1"].float())


def test_distributed_checkpoint_round_trip_in_place(tmp_path: Path) -> None:
    model, other = Experts().wrap(), Experts().wrap()
    with torch.no_grad():
        model.w1.mul_(3)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    before = other.w1
    dcp.load(other.state_dict(), checkpoint_id=tmp_path)
    assert other.w1 is before
    assert torch.equal(other.w1._data, model.w1._data)


def test_a_wrapped_weight_pickles_by_value() -> None:
    """torch.save of a whole module, and of what multiprocessing sends."""
    buffer = io.BytesIO()
    torch.save(Experts().wrap(), buffer)
    buffer.seek(0)
    model = torch.load(buffer, weights_only=False)
    assert type(model.w1) is FP8ExpertWeight
    assert torch.equal(model.w1._data, make_experts((3, 5), 16, 32).w1)


@pytest.fixture
def one_rank() -> Iterator[object]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_dtensor_is_outermost_and_state_dict_goes_through_it(one_rank: object) -> None:
    model = Experts().wrap()
    whole = model.w1._data.clone()
    model.w1 = nn.Parameter(distribute_tensor(model.w1, one_rank, [Shard(0)]))
    assert type(model.w1._local_tensor) is FP8ExpertWeight
    assert type(model.w1.to_local()) is FP8ExpertWeight
    state = model.state_dict()
    assert isinstance(state["w1"], DTensor)
    assert type(state["w1"]._local_tensor) is Tensor
    assert state["w1"].placements == (Shard(0),)
    assert torch.equal(state["w1"].full_tensor(), whole)
    for assign in (False, True):
        state = {**model.state_dict(), "w1": distribute_tensor(whole * 2, one_rank, [Shard(0)])}
        model.load_state_dict(state, assign=assign)
        assert type(model.w1._local_tensor) is FP8ExpertWeight
        assert torch.equal(model.w1._local_tensor._data, whole * 2)
