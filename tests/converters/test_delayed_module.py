"""Delayed scaling in a converted model: what leaves a trace in its state and what must not, and how it is kept."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import FP8GroupedExpertsConfig
from converters.delayed_config import DelayedConfig
from converters.fp8_grouped_experts import convert, is_routed_experts
from converters.rules.attach import end_step, states
from tests.helpers import exact_mlp, make_experts, sqnr_db

SIZES = (40, 0, 17, 7)
SHORT = DelayedConfig(amax_history_len=3)
CONFIG = FP8GroupedExpertsConfig(recipe="delayed")
EXPERTS = make_experts(SIZES, D=64, H=96)


def model(delayed: DelayedConfig = SHORT, config: FP8GroupedExpertsConfig = CONFIG) -> nn.Module:
    module = nn.Module()
    module.experts = GroupedExperts(dim=64, hidden_dim=96, num_experts=4, use_grouped_mm=True)
    with torch.no_grad():
        for name in ("w1", "w2", "w3"):
            getattr(module.experts, name).copy_(getattr(EXPERTS, name))
    convert(module, config, delayed=delayed)
    return module


def memory(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in states([module])[0].state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def forward(module: nn.Module, x: Tensor) -> Tensor:
    return module.experts(x, torch.tensor(SIZES))


def passes(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = forward, count: int = 3) -> list[Tensor]:
    """Output and all gradients of each micro-batch, whose sizes grow."""
    out = []
    for i in range(count):
        x = ((i + 1) * EXPERTS.x).requires_grad_()
        y = run(module, x)
        grads = torch.autograd.grad(y, [x, *module.experts.parameters()], EXPERTS.upstream)
        out += [y.detach(), *grads]
    return out


def followed(module: nn.Module, x: Tensor) -> Tensor:
    """By something that backward needs the output for: else recomputation stops before the state is written."""
    return forward(module, x).relu()


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(followed, module, x, use_reentrant=False)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("weights", ["every_microbatch", "cached", "cached_stale_scale"])
@pytest.mark.parametrize("warm_start", [False, True])
def test_recomputation_sees_the_same_scales_and_records_once(weights: str, warm_start: bool) -> None:
    plain, again = (model(DelayedConfig(3, weights=weights, warm_start=warm_start)) for _ in range(2))
    assert equal(passes(plain, followed), passes(again, recomputed))
    assert same(memory(plain), memory(again))
    end_step([plain, again])
    assert equal(passes(plain, followed, count=1), passes(again, recomputed, count=1))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_and_recomputed_equals_eager(backend: str) -> None:
    plain, compiled = model(), model()
    run = torch.compile(recomputed, fullgraph=True, backend=backend)
    assert equal(passes(plain, followed), passes(compiled, run))
    assert same(memory(plain), memory(compiled))


@pytest.mark.parametrize("warm_start", [False, True])
def test_one_expert_after_the_other_has_the_same_scales_and_state(warm_start: bool) -> None:
    delayed = DelayedConfig(3, weights="cached", warm_start=warm_start)
    loop = FP8GroupedExpertsConfig(recipe="delayed", experts="sequential")
    grouped, sequential = model(delayed), model(delayed, loop)
    for a, b in zip(passes(grouped), passes(sequential), strict=True):
        assert torch.equal(a, b) or sqnr_db(a, b) > 100  # sums in another order
    assert same(memory(grouped), memory(sequential))


def test_validation_leaves_no_trace() -> None:
    module = model()
    passes(module)
    before = memory(module), [t.clone() for t in states([module])[0].tensors()]
    with torch.no_grad():
        first = forward(module, 9 * EXPERTS.x)
    module.eval()
    x = (9 * EXPERTS.x).requires_grad_()
    forward(module, x).backward(EXPERTS.upstream)
    assert torch.equal(first, forward(module, x))
    assert same(memory(module), before[0])
    assert equal(states([module])[0].tensors(), before[1])


def test_a_micro_batch_that_is_cold_and_those_that_are_not() -> None:
    """At scale 1 weights of std 0.02 lose 2 dB, and gradients 2**-17 of their usual size are lost; then all is well."""
    exact = exact_mlp(EXPERTS)
    module, quality = model(), []
    for _ in range(2):
        x = EXPERTS.x.clone().requires_grad_()
        y = forward(module, x)
        (dx,) = torch.autograd.grad(y, [x], EXPERTS.upstream * 2.0**-17)
        quality.append((sqnr_db(exact["out"], y), sqnr_db(exact["x"] * 2.0**-17, dx)))
    (cold, flushed), (warm, kept) = quality
    assert cold < warm - 1.5
    assert flushed < 6
    assert warm > 23
    assert kept > 19


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    module = model()
    passes(module, count=2)
    saved = copy.deepcopy(module.state_dict())
    assert {n for n in saved if "delayed" in n} == {
        f"experts.delayed.{p}.{b}" for p in ("fwd", "bwd") for b in ("amax_history", "multiplier")
    }
    resumed = model()
    resumed.load_state_dict(saved)
    assert equal(passes(module), passes(resumed))
    assert same(memory(module), memory(resumed))


def test_weights_without_a_state_load_and_begin_as_new(caplog: pytest.LogCaptureFixture) -> None:
    module, new = model(), memory(model())
    plain = {name: t.clone() for name, t in module.state_dict().items() if "delayed" not in name}
    module.load_state_dict(plain)
    assert same(memory(module), new)
    assert "experts.delayed.fwd. is not in what is loaded" in caplog.text


def test_from_the_meta_device_and_through_casts() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.experts = GroupedExperts(dim=64, hidden_dim=96, num_experts=4, use_grouped_mm=True)
        convert(module, CONFIG, delayed=SHORT)
    module.to_empty(device="cpu")
    assert same(memory(module), memory(model()))
    module.experts.delayed.fwd.multiplier.fill_(1 / 3)
    module.to(torch.bfloat16)
    assert module.experts.w1.dtype == torch.bfloat16
    assert module.experts.delayed.fwd.multiplier.dtype == torch.float32
    assert (module.experts.delayed.fwd.multiplier == torch.tensor(1 / 3)).all()


def test_quantize_takes_the_defaults_and_other_forwards_are_refused() -> None:
    module = nn.Module()
    module.experts = GroupedExperts(dim=64, hidden_dim=96, num_experts=4, use_grouped_mm=True)
    quantize_(module, CONFIG, filter_fn=is_routed_experts)
    assert module.experts.delayed.config == DelayedConfig()

    class Own(GroupedExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return super().forward(x, counts)

    module.experts = Own(dim=64, hidden_dim=96, num_experts=4, use_grouped_mm=True)
    with pytest.raises(ValueError, match=r"'delayed' needs torchtitan's own forward.*Own has another.*'tensorwise'"):
        convert(module, CONFIG)
