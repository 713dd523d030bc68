"""The storage half of a wrapped weight: it survives whatever a model, an optimizer or a checkpoint does to it."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight
from parallel.wrapped_weight import KEEPS_WRAPPER, PRODUCTS, WrappedWeight, plain
from tests.helpers import DEVICE, poison_freed_memory
from tests.parallel.modules import Experts

aten = torch.ops.aten
CONTEXT = ("any", "hashable", "context")


def wrapped(*shape: int) -> WrappedWeight:
    return WrappedWeight(torch.randn(shape), CONTEXT)


def tensors_in(tree: object) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [t for part in tree for t in tensors_in(part)]


# How each op that keeps the wrapper is called, on a weight [4, 6, 8].
CALLS: dict[object, Callable[[Tensor], object]] = {
    aten.alias.default: lambda w: aten.alias.default(w),
    aten.as_strided.default: lambda w: aten.as_strided.default(w, (2, 8), (48, 1), 3),
    aten.cat.default: lambda w: aten.cat.default([w, w], 1),
    aten.clone.default: lambda w: aten.clone.default(w),
    aten.detach.default: lambda w: aten.detach.default(w),
    aten.empty_like.default: lambda w: aten.empty_like.default(w),
    aten.expand.default: lambda w: aten.expand.default(w[:1], (3, 6, 8)),
    aten.index.Tensor: lambda w: aten.index.Tensor(w, [torch.tensor([2, 0])]),
    aten.index_select.default: lambda w: aten.index_select.default(w, 0, torch.tensor([3, 3, 1])),
    aten.new_empty.default: lambda w: aten.new_empty.default(w, (2, 2)),
    aten.new_zeros.default: lambda w: aten.new_zeros.default(w, (2, 2)),
    aten.permute.default: lambda w: aten.permute.default(w, (2, 0, 1)),
    aten.select.int: lambda w: aten.select.int(w, 0, 1),
    aten.slice.Tensor: lambda w: aten.slice.Tensor(w, 1, 2, 5),
    aten.split.Tensor: lambda w: aten.split.Tensor(w, 3, 1),
    aten.split_with_sizes.default: lambda w: aten.split_with_sizes.default(w, (1, 3)),
    aten.squeeze.dim: lambda w: aten.squeeze.dim(w[:1], 0),
    aten.stack.default: lambda w: aten.stack.default([w[0], w[1]]),
    aten.t.default: lambda w: aten.t.default(w[0]),
    aten.transpose.int: lambda w: aten.transpose.int(w, 1, 2),
    aten.unbind.int: lambda w: aten.unbind.int(w),
    aten.unsqueeze.default: lambda w: aten.unsqueeze.default(w, 0),
    aten.view.default: lambda w: aten.view.default(w, (24, 8)),
    aten._to_copy.default: lambda w: aten._to_copy.default(w, dtype=torch.bfloat16),
    aten._unsafe_view.default: lambda w: aten._unsafe_view.default(w, (4, 48)),
}
NEEDS_MORE = {  # a GPU, or other processes: test_distributed.py
    aten._pin_memory.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.c10d.scatter_.default,
}
UNINITIALIZED = {aten.empty_like.default, aten.new_empty.default}


def test_every_op_that_keeps_the_wrapper_is_called_here() -> None:
    assert set(CALLS) == KEEPS_WRAPPER - NEEDS_MORE
    assert NEEDS_MORE <= KEEPS_WRAPPER


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_op_keeps_the_wrapper_its_context_and_the_values(op: object) -> None:
    weight = wrapped(4, 6, 8)
    kept, wanted = tensors_in(CALLS[op](weight)), tensors_in(CALLS[op](weight._data))
    assert len(kept) == len(wanted)
    for a, b in zip(kept, wanted, strict=True):
        assert type(a) is WrappedWeight
        assert a._context == CONTEXT
        assert (a.shape, a.stride(), a.dtype, a.storage_offset()) == (b.shape, b.stride(), b.dtype, b.storage_offset())
        assert (a._data.shape, a._data.stride(), a._data.dtype) == (b.shape, b.stride(), b.dtype)
        assert op in UNINITIALIZED or torch.equal(a._data, b)


@pytest.mark.parametrize("op", sorted(PRODUCTS, key=str), ids=str)
def test_products_below_autograd_are_refused(op: object) -> None:
    """Called as the dispatcher would call it: nobody has chosen a precision on the way."""
    with pytest.raises(NotImplementedError, match="so that it runs in FP8"):
        WrappedWeight.__torch_dispatch__(op, (WrappedWeight,), (torch.randn(2, 8), wrapped(8, 8)))


@pytest.mark.parametrize("kind", [WrappedWeight, FP8ExpertWeight])
def test_flatten_and_unflatten_are_inverse(kind: type[WrappedWeight]) -> None:
    weight = kind(torch.randn(2, 16, 32).transpose(1, 2), Numerics(recipe="rowwise", wgrad="bf16"))
    names, meta = weight.__tensor_flatten__()
    hash(tuple(meta.values()))  # torch.compile guards on it
    inner = {name: getattr(weight, name) for name in names}
    again = kind.__tensor_unflatten__(inner, meta, weight.shape, weight.stride())
    assert type(again) is kind
    assert again._context == weight._context
    assert (again.shape, again.stride(), again.dtype) == (weight.shape, weight.stride(), weight.dtype)
    assert torch.equal(again._data, weight._data)


def test_arithmetic_is_plain_and_optimizer_states_are_too() -> None:
    weight = wrapped(2, 4, 4)
    assert all(
        type(t) is Tensor for t in (weight * 2, weight + weight, weight.norm(), torch.zeros_like(weight), -weight)
    )


OPTIMIZERS: dict[str, Callable[[Iterator], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_to_wrapped_weights_what_they_do_to_plain_ones(name: str) -> None:
    ours, theirs = Experts().wrap(), Experts()
    theirs.load_state_dict(ours.state_dict())
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (ours, theirs)]
    for _ in range(3):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(b)
            b.grad = a.grad.clone()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (ours, theirs)]
        assert torch.equal(*norms)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(plain(a.detach()), b.detach())
    states = [s for state in optimizers[0].state.values() for s in state.values() if isinstance(s, Tensor)]
    assert states
    assert all(type(s) is Tensor for s in states)
    assert type(ours.w1) is FP8ExpertWeight


def test_meta_then_to_empty_then_init() -> None:
    with torch.device("meta"):
        model = Experts().wrap()
    assert model.w1.device.type == model.w1._data.device.type == "meta"
    poison_freed_memory()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for w in (model.w1, model.w2, model.w3):
            nn.init.trunc_normal_(w, std=0.02)
        model.bias.zero_()
    assert type(model.w1) is FP8ExpertWeight
    assert isinstance(model.w1, nn.Parameter)
    assert 0.019 < model.w1._data.std() < 0.021
    assert not model.w1._context.temporary


def test_moves_and_casts_of_the_module_reach_the_data() -> None:
    model = Experts().wrap()
    for move, dtype in (
        (Experts.bfloat16, torch.bfloat16),
        (Experts.double, torch.float64),
        (Experts.float, torch.float32),
    ):
        move(model)
        assert type(model.w1) is FP8ExpertWeight
        assert isinstance(model.w1, nn.Parameter)
        assert model.w1.dtype == model.w1._data.dtype == dtype
        assert model.w1.requires_grad
    model.to(DEVICE)
    assert model.w1._data.device.type == model.w1.device.type == DEVICE


def test_assigning_data_replaces_what_is_inside() -> None:
    model = Experts().wrap()
    new = torch.randn(2, 8, 8)
    model.w1.data = new
    assert model.w1.shape == model.w1._data.shape == (2, 8, 8)
    assert torch.equal(model.w1._data, new)
    assert isinstance(model.w1, nn.Parameter)


def test_deepcopy_and_requires_grad() -> None:
    model = Experts().wrap()
    model.w3.requires_grad_(False)
    other = copy.deepcopy(model)
    assert type(other.w1) is FP8ExpertWeight
    assert (other.w1.requires_grad, other.w3.requires_grad) == (True, False)
    assert other.w1._context == model.w1._context
    assert other.w1._data.data_ptr() != model.w1._data.data_ptr()
    assert type(other.state_dict()["w1"]) is Tensor  # the hook came along


def test_frozen_parameters_stay_frozen_when_wrapped() -> None:
    model = Experts()
    model.w2.requires_grad_(False)
    model.wrap()
    assert [p.requires_grad for p in (model.w1, model.w2, model.w3)] == [True, False, True]


def test_repr_shows_context_and_values() -> None:
    weight = FP8ExpertWeight(torch.full((1, 1, 2), 2.5), Numerics())
    assert repr(weight) == "FP8ExpertWeight(tokenwise, reference, tensor([[[2.5000, 2.5000]]]))"
