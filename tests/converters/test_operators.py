"""An operator is one node for whoever traces, a plain call for everybody else; its gradient is the same either way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from converters.config import Numerics
from converters.dense_linear import dense_linear
from converters.differentiable import differentiable, unwrapped
from converters.kernels.ops import operator
from converters.linear_weight import FP8LinearWeight
from parallel.wrapped_weight import WrappedWeight

calls: list[str] = []


def _empty(x: Tensor, ws: list[Tensor], factor: float) -> tuple[list[Tensor], Tensor]:
    return [x.new_empty(len(x), len(w)) for w in ws], x.new_empty(x.shape)


@operator(_empty, name="products_for_a_test")
def _products(x: Tensor, ws: list[Tensor], factor: float) -> tuple[list[Tensor], Tensor]:
    calls.append("forward")
    assert not any(isinstance(w, WrappedWeight) for w in ws)
    return [x @ w.t() * factor for w in ws], x * 2


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, ws, ctx.factor = inputs
    ctx.save_for_backward(output[1], *ws)


def _gradients(ctx: Any, gs: list[Tensor], *others: None) -> tuple[Tensor | list[Tensor] | None, ...]:
    x2, *ws = map(unwrapped, ctx.saved_tensors)
    dx = sum(g @ w for g, w in zip(gs, ws, strict=True)) * ctx.factor
    return dx, [g.t() @ x2 * (ctx.factor / 2) for g in gs], None


products = differentiable(_products, _save, _gradients)


class Seen(TorchDispatchMode):
    """Notes each of our operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "titan_moe_fp8":
            calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, *ws = (torch.randn(n, 5, generator=generator) for n in (4, 3, 2))
    return [x.requires_grad_(), *(nn.Parameter(WrappedWeight(w)) for w in ws)]


def gradients(outs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.autograd.grad(outs, inputs, [torch.randn(o.shape, generator=generator) for o in outs]))


def run(inputs: list[Tensor]) -> list[Tensor]:
    return products(inputs[0], inputs[1:], 3.0)


def expected() -> list[Tensor]:
    x, *ws = (unwrapped(t.detach()).requires_grad_() for t in leaves())
    outs = [x @ w.t() * 3 for w in ws]
    return [*outs, *gradients(outs, [x, *ws])]


def test_wrapped_weights_have_gradients_and_the_operator_their_plain_tensors() -> None:
    inputs = leaves()
    outs = run(inputs)
    for actual, wanted in zip([*outs, *gradients(outs, inputs)], expected(), strict=True):
        torch.testing.assert_close(actual, wanted)
    assert calls == ["forward"]


def test_the_dispatcher_is_left_out_unless_somebody_looks() -> None:
    overrides: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            overrides.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = leaves()
    with Functions():
        run(inputs)
    assert not [name for name in overrides if "products_for_a_test" in name]
    calls.clear()
    with Seen():
        outs = run(inputs)
    assert calls == ["titan_moe_fp8.products_for_a_test.default", "forward"]
    for actual, wanted in zip([*outs, *gradients(outs, inputs)], expected(), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_tensor_that_is_still_on_its_way_arrives_before_the_operator() -> None:
    """ColwiseParallel gives such inputs and RowwiseParallel such gradients. They have no address."""
    kinds = []

    @operator(lambda x, others, last=None: x.new_empty(x.shape), name="double_for_a_test")
    def double(x: Tensor, others: list[Tensor], last: Tensor | None = None) -> Tensor:
        kinds.extend([type(x), *map(type, others), type(last)])
        return x * 2

    plain, coming = torch.randn(3), AsyncCollectiveTensor(torch.randn(3))
    assert coming.data_ptr() == 0
    given = [
        (coming, [plain], None),
        (plain, [plain, coming], None),
        (plain, [], coming),
        (nn.Parameter(plain), [], None),
    ]
    for x, others, last in given:
        with torch.no_grad():
            assert torch.equal(double(x, others, last=last), x * 2)
    assert set(kinds) == {Tensor, nn.Parameter, type(None)}
    w = nn.Parameter(FP8LinearWeight(torch.randn(16, 16), Numerics(recipe="rowwise")))
    x, g = torch.randn(8, 16), torch.randn(8, 16)
    results = []
    for arrived in (True, False):
        inputs = [(x if arrived else AsyncCollectiveTensor(x)).requires_grad_(), w]
        out = dense_linear(inputs[0], [w], w._context)[0]
        results.append([out, *torch.autograd.grad(out, inputs, g if arrived else AsyncCollectiveTensor(g))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_selective_recomputation_keeps_what_the_operator_returned() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.titan_moe_fp8.products_for_a_test.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = leaves()
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    outs = checkpoint(lambda *ts: run(list(ts)), *inputs, use_reentrant=False, context_fn=contexts)
    for actual, wanted in zip([*outs, *gradients(outs, inputs)], expected(), strict=True):
        torch.testing.assert_close(actual, wanted)
    assert calls == ["forward"]


def test_an_output_that_nobody_used_has_a_gradient_of_zeros() -> None:
    inputs = leaves()
    outs = run(inputs)
    *others, unused = torch.autograd.grad(outs[0], inputs, torch.randn(outs[0].shape))
    assert all(g.any() for g in others)
    assert not unused.any()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    inputs = leaves()
    outs = run(inputs)
    (dx,) = torch.autograd.grad(outs[0], inputs[:1], torch.randn_like(outs[0]).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.backward(torch.randn_like(dx))


def test_a_weight_written_between_forward_and_backward_is_refused() -> None:
    inputs = leaves()
    outs = run(inputs)
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(outs, inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_is_one_node_with_the_same_gradient(backend: str) -> None:
    torch._dynamo.reset()
    inputs = leaves()
    outs = torch.compile(lambda *ts: run(list(ts)), fullgraph=True, backend=backend)(*inputs)
    for actual, wanted in zip([*outs, *gradients(outs, inputs)], expected(), strict=True):
        torch.testing.assert_close(actual, wanted)


@operator(lambda x: x.new_empty(()), name="sum_for_a_test")
def _sum(x: Tensor) -> Tensor:
    return torch.tensor(sum(x.tolist()))


def test_a_compiled_operator_without_a_gradient_is_not_looked_into() -> None:
    torch._dynamo.reset()
    x = torch.arange(4.0)
    assert torch.compile(lambda x: _sum(x) * 2, fullgraph=True, backend="aot_eager")(x) == 12
    with FakeTensorMode() as mode:
        assert _sum(mode.from_tensor(x)).shape == ()


def test_a_profile_names_the_operator_and_its_backward() -> None:
    w = nn.Parameter(FP8LinearWeight(torch.randn(16, 16), Numerics()))
    x = torch.randn(8, 16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dense_linear(x, [w], Numerics())[0].backward(torch.randn(8, 16))
    names = {event.key for event in profile.key_averages()}
    assert {"dense_linear", "dense_linearBackward"} <= names
