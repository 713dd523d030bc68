"""Linear layers by an emulated rule: what they compute, the state of delayed scaling, what is refused."""

import pytest
import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.delayed_config import DelayedConfig
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import check_layout, convert_dense
from converters.grouped_mm import grouped_mm
from converters.numerics import Numerics
from converters.rules.attach import end_step
from tests.converters.models import llama4, materialized
from tests.helpers import sqnr_db

TINY = 1e-7  # gradients that E5M2 with scale 1 turns into zeros: they are below 2**-17


def attention(recipe: str, **delayed: object) -> nn.Module:
    model = llama4(n_layers=1)
    config = FP8DenseConfig(recipe=recipe, fqns=["attention"])
    report = convert_dense(model, config, delayed=DelayedConfig(**delayed))
    assert (report.recipe, report.backend, len(report.converted)) == (recipe, "emulated", 4)
    return materialized(model).layers["0"].attention


def run(layer: nn.Linear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of x, gradient of the weight."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_products_are_those_of_the_rule(recipe: str) -> None:
    wq = attention(recipe, warm_start=True).wq
    x, g = torch.randn(2, 24, 64), torch.randn(2, 24, 64)
    y, dx, dw = run(wq, x, g)
    w = wq.weight._data
    exact = x @ w.t(), g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)
    assert all(18 < sqnr_db(a, b) < 40 for a, b in zip(exact, (y, dx, dw), strict=True))
    if recipe != "delayed":
        offs = torch.tensor([48], dtype=torch.int32)
        alone = grouped_mm(x.flatten(0, 1), w.t()[None], offs, Numerics(recipe=recipe, backend="emulated"))
        assert torch.equal(y.flatten(0, 1), alone)


def test_delayed_scales_are_cold_once() -> None:
    wq = attention("delayed").wq
    x, g = torch.randn(48, 64), TINY * torch.randn(48, 64)
    first, second = run(wq, x, g), run(wq, x, g)
    assert not first[1].any()
    assert not first[2].any()
    assert sqnr_db(g @ wq.weight._data, second[1]) > 18
    assert {name for name in wq.state_dict() if name != "weight"} == {
        f"delayed.{slots}.{name}" for slots in ("fwd", "bwd") for name in ("amax_history", "multiplier")
    }


def test_a_step_ends_for_layers_too() -> None:
    """update = "step": nothing is learned before the converter's hook."""
    wo = attention("delayed", update="step").wo
    x, g = torch.randn(48, 64), TINY * torch.randn(48, 64)
    assert not any(run(wo, x, g)[2].any() for _ in range(3))
    end_step([wo])
    assert run(wo, x, g)[2].any()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe = 'delayed' has no backend 'hopper'"):
        FP8DenseConfig(recipe="delayed", backend="hopper")
    with pytest.raises(ValueError, match=r"recipe = 'tokenwise' has no backend 'emulated'"):
        FP8DenseConfig(backend="emulated")
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=2)
    with pytest.raises(ValueError, match=r"'delayed' does not go with parallelism.tensor_parallel_degree = 2"):
        check_layout([], FP8DenseConfig(recipe="delayed"), JobConfig(), dims)
