"""What the start table says that quantized weights take is what they take, to the byte, before and within a step."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts

from converters import weight_cache
from converters.break_even import Workload
from converters.config import FP8GroupedExpertsConfig
from converters.dense_break_even import DenseWork
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from converters.kept_memory import Kept, kept_memory, most
from tests.converters.models import MixtralExperts, llama4, materialized
from tests.helpers import DEVICE

ONCE, TWICE = ({"tokens": 64, "micro_batches": n} for n in (1, 2))
WEIGHTS = {"w1": 4 * 96 * 64, "w2": 4 * 64 * 96, "w3": 4 * 96 * 64}


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    weight_cache.clear()
    yield
    weight_cache.clear()


def converted(work: dict[str, Any], dense: bool = True, **config: Any) -> nn.Module:
    model = llama4(n_layers=2)
    convert(model, FP8GroupedExpertsConfig(backend="reference", **config), Workload(**work))
    if dense:
        shared = {key: config[key] for key in config.keys() & {"cache"}}
        convert_dense(model, FP8DenseConfig(backend="reference", **shared), DenseWork(**work, uses_once=work is ONCE))
    return materialized(model)


def step(model: nn.Module) -> tuple[int, int]:
    """Bytes in the cache between forward and backward, and after both."""
    out = model(torch.randint(128, (2, 32), device=DEVICE))
    within = weight_cache.cached_bytes()
    out.backward(torch.randn_like(out))
    return within, weight_cache.cached_bytes()


def total(model: nn.Module) -> tuple[int, int]:
    kept = kept_memory([model]).values()
    return sum(k.between for k in kept), sum(k.held for k in kept)


def live(model: nn.Module, patch: pytest.MonkeyPatch) -> int:
    """Bytes of quantized weights, without scales, that are there at the same time in a step, at most."""
    made, found, quantize = [], [], weight_cache.quantize

    def seen(*args: Any, **options: Any) -> Any:
        w = quantize(*args, **options)
        made.extend(weakref.ref(t) for t in (w.q, w.q_t))
        found.append(sum(t.numel() for ref in made if (t := ref()) is not None))
        return w

    patch.setattr(weight_cache, "quantize", seen)
    out = model(torch.randint(128, (2, 32), device=DEVICE))
    out.backward(torch.randn_like(out))
    return max(found)


@pytest.mark.parametrize("work", [ONCE, TWICE], ids=["once", "twice"])
@pytest.mark.parametrize(
    "config", [{}, {"cache": False}, {"experts": "sequential"}, {"experts": "sequential", "cache": False}], ids=str
)
@pytest.mark.parametrize("dense", [False, True], ids=["experts", "all"])
def test_what_passes_counts_once(
    config: dict[str, Any], work: dict[str, Any], dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(work, dense, **config)
    kept = kept_memory([model]).values()
    scales = sum(k.held for k in kept) % 1024  # sizes of weights are multiples of it
    said, found = most(kept) - scales, live(model, monkeypatch)
    if work is ONCE and dense and config.get("cache", True):  # the largest weight is not the last one of the forward
        assert found <= said < 1.1 * found
    else:
        assert said == found


def test_sequential_experts_have_one_expert_at_a_time() -> None:
    model = nn.ModuleList(GroupedExperts(32, 48, 3, True) for _ in range(4))
    convert(model, FP8GroupedExpertsConfig(backend="reference", experts="sequential"))
    assert most(kept_memory([model]).values()) == 2 * 48 * 32


def test_a_weight_used_once_has_its_other_layout_meanwhile() -> None:
    model = nn.ModuleList(GroupedExperts(32, 48, 3, True) for _ in range(4))
    convert(model, FP8GroupedExpertsConfig(backend="reference"), Workload(**ONCE))
    size, scales = 3 * 48 * 32, 4 * 2 * 3 * 4
    assert most(kept_memory([model]).values()) == 4 * 3 * size + scales + size == 59_904 + scales


@pytest.mark.parametrize("config", [{}, {"recipe": "rowwise"}, {"wgrad": "bf16"}], ids=str)
def test_both_layouts_stay(config: dict[str, str]) -> None:
    model = converted(TWICE, **config)
    between, peak = total(model)
    assert between == peak > 2 * 2 * sum(WEIGHTS.values())
    _, after = step(model)
    assert between == after
    assert step(model) == (after, after)


def test_one_micro_batch_leaves_the_scales() -> None:
    model = converted(ONCE)
    between, peak = total(model)
    within, after = step(model)
    assert between == after < 1000
    assert peak == within > sum(WEIGHTS.values())


@pytest.mark.parametrize("work", [ONCE, TWICE], ids=["once", "twice"])
def test_without_the_cache_nothing_is_kept(work: dict[str, Any]) -> None:
    model = converted(work, cache=False)
    assert total(model) == (0, 0) == step(model)
    assert {k.why for k in kept_memory([model]).values()} == {"cache = false, quantized at each use"}


def test_by_weight_and_with_the_names_of_the_model() -> None:
    model = converted(TWICE, dense=False)
    scales = {"w1": 4 * 4, "w2": 4 * 4, "w3": 0}
    expected = {f"layers.{n}.moe.experts.{w}": 2 * WEIGHTS[w] + scales[w] for n in (0, 1) for w in WEIGHTS}
    assert {name: k.between for name, k in kept_memory([model]).items()} == expected
    stages = [nn.Sequential(layer) for layer in model.layers.values()]
    assert len(kept_memory(stages[:1])) == 3
    wrapped = nn.ModuleDict({"_checkpoint_wrapped_module": nn.ModuleDict({"_orig_mod": model})})
    assert kept_memory([wrapped]).keys() == expected.keys()


def test_sequential_and_emulated_experts_keep_nothing() -> None:
    model = converted(TWICE, dense=False, experts="sequential")
    kept = kept_memory([model])
    assert {(k.between, "views" in k.why) for k in kept.values()} == {(0, True)}
    assert most(kept.values()) == (WEIGHTS["w1"] + WEIGHTS["w3"]) // 4
    assert step(model) == (0, 0)
    experts = GroupedExperts(32, 16, 2, True)
    convert(experts, FP8GroupedExpertsConfig(backend="emulated"))
    assert set(kept_memory([experts]).values()) == {Kept(0, 0, "emulated, quantized at each use")}


class Direct(nn.Module):
    """A weight [E, in, out], which its forward uses as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 32, 48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.w)


def test_a_module_that_is_not_torchtitans_keeps_no_more_than_its_peak() -> None:
    model = nn.ModuleDict({"views": MixtralExperts(), "direct": Direct()})
    convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["views", "direct"]))
    kept = kept_memory([model])
    assert [k.between for k in kept.values()] == [0, 0, 0]
    model["views"](torch.randn(8, 32), [2, 2, 4, 0])
    assert weight_cache.cached_bytes() == 0
    model["direct"](torch.randn(3, 4, 32))
    assert weight_cache.cached_bytes() == kept["direct.w"].held
