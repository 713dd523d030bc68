"""Parameters that a model has in two places: converting one by one would untie them, so it is refused, by name."""

from collections.abc import Callable
from functools import partial

import pytest
from torch import nn
from torchao.quantization import quantize_
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import FP8GroupedExpertsConfig
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from tests.converters.models import in_fp8, llama4

WAYS = [convert, quantize_, partial(quantize_, filter_fn=lambda m, fqn: isinstance(m, GroupedExperts))]


@pytest.mark.parametrize("recipe", ["tokenwise", "tensorwise"])
@pytest.mark.parametrize("exclude", [[], ["b"]], ids=["both chosen", "one chosen"])
def test_tied_weights_are_refused(recipe: str, exclude: list[str]) -> None:
    model = nn.ModuleDict({name: nn.ModuleDict({"w1": nn.Linear(32, 32)}) for name in "ab"})
    model["b"]["w1"].weight = model["a"]["w1"].weight
    config = FP8DenseConfig(fqns=["w1"], exclude=exclude, recipe=recipe)
    with pytest.raises(ValueError, match=r"^a\.w1\.weight and b\.w1\.weight are one parameter.*\[fp8\.dense\] exclude"):
        convert_dense(model, config)
    assert not in_fp8(model)


def test_a_layer_with_two_names_is_converted_once() -> None:
    layer = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": layer, "b": layer})
    assert len(convert_dense(model, FP8DenseConfig(backend="reference", fqns=["*"])).converted) == 1
    assert model["b"].weight is model["a"].weight


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", ["layers.0.moe.experts.w3", "layers.1.moe.experts.w1"])
def test_tied_experts_are_refused(way: Callable, other: str) -> None:
    model = llama4()
    owner, _, name = other.rpartition(".")
    setattr(model.get_submodule(owner), name, model.layers["0"].moe.experts.w1)
    with pytest.raises(ValueError, match=rf"^layers\.0\.moe\.experts\.w1 and {other} are one parameter"):
        way(model, FP8GroupedExpertsConfig(backend="reference"))
    assert not in_fp8(model)
