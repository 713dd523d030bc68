"""torchtitan's whole Llama4 MoE layer (router, shared and routed experts), FP8 against BF16: output and gradients."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, MoEArgs

from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from tests.converters.models import in_fp8
from tests.helpers import DEVICE, sqnr_db

BATCH, LENGTH, D, H = 4, 96, 128, 192


def moe_layer(**args: object) -> MoE:
    defaults = {"num_experts": 8, "num_shared_experts": 1, "top_k": 2, "use_grouped_mm": True}
    layer = MoE(MoEArgs(**{**defaults, **args}), dim=D, hidden_dim=H)
    with torch.no_grad():
        layer.init_weights(0.02, buffer_device=torch.device("cpu"))
    nn.init.normal_(layer.router.gate.weight, std=0.1)
    layer.expert_bias += torch.linspace(0, 0.4, layer.experts.num_experts)  # uneven shares
    return layer.to(DEVICE)


def in_fp8_too(layer: MoE, **config: object) -> MoE:
    model = nn.ModuleDict({"moe": copy.deepcopy(layer)})
    convert(model, FP8GroupedExpertsConfig(backend="reference", **config))
    assert in_fp8(model) == {f"moe.experts.{w}" for w in ("w1", "w2", "w3")}
    return model["moe"]


def run(layer: MoE, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(upstream)
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


# dB. Routed experts: the recipe's floor. The output and the input gradient contain the shared expert, which is exact,
# so they are better; the gate's gradient is one dot product a token of output and upstream: it has the routed noise.
FLOOR = {"out": 25.0, "x": 25.0, "router.gate.weight": 23.0, "shared_experts": 100.0, "experts": 23.0}


def floor(name: str) -> float:
    return next(db for key, db in FLOOR.items() if name == key or name.startswith(f"{key}."))


@pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])
@pytest.mark.parametrize("score_before_experts", [True, False], ids=["score_before", "score_after"])
@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
def test_fp8_against_bf16(recipe: str, score_before_experts: bool, score_func: str) -> None:
    layer = moe_layer(score_before_experts=score_before_experts, score_func=score_func)
    fp8 = in_fp8_too(layer, recipe=recipe)
    x, upstream = (torch.randn(BATCH, LENGTH, D, device=DEVICE) for _ in range(2))
    wanted, actual = run(layer, x, upstream), run(fp8, x, upstream)
    assert torch.equal(layer.tokens_per_expert, fp8.tokens_per_expert)
    assert layer.tokens_per_expert.max() > 3 * layer.tokens_per_expert.min() > 0
    assert wanted.keys() == actual.keys()
    figures = {name: sqnr_db(wanted[name], actual[name]) for name in wanted}
    assert all(db >= floor(name) for name, db in figures.items()), figures
    assert max(db for name, db in figures.items() if name.startswith("experts.")) < 28.5, "not in FP8"


def test_top_1_without_a_shared_expert() -> None:
    """Llama4 Maverick's routing; nothing exact is mixed in, so the output is the routed experts'."""
    layer = moe_layer(num_shared_experts=0, top_k=1, num_experts=16)
    x, upstream = (torch.randn(BATCH, LENGTH, D, device=DEVICE) for _ in range(2))
    wanted, actual = run(layer, x, upstream), run(in_fp8_too(layer), x, upstream)
    figures = {name: sqnr_db(wanted[name], actual[name]) for name in wanted}
    assert all(22.5 < db < 28.5 for name, db in figures.items() if name != "router.gate.weight"), figures


def test_bfloat16_layer() -> None:
    layer = moe_layer().bfloat16()
    layer.expert_bias = layer.expert_bias.float()
    x, upstream = (torch.randn(BATCH, LENGTH, D, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    wanted, actual = run(layer, x, upstream), run(in_fp8_too(layer), x, upstream)
    assert {t.dtype for t in actual.values()} == {torch.bfloat16}
    figures = {name: sqnr_db(wanted[name], actual[name]) for name in wanted}
    assert all(db >= floor(name) - 1 for name, db in figures.items() if "shared" not in name), figures


def test_all_tokens_on_two_experts_and_none_on_the_rest() -> None:
    """Cases 12 and 13 through the router: a bias sends every token to the same experts."""
    layer = moe_layer()
    layer.expert_bias[:] = torch.tensor([9.0, 0, 0, 9, 0, 0, 0, 0])
    x, upstream = (torch.randn(BATCH, LENGTH, D, device=DEVICE) for _ in range(2))
    wanted, actual = run(layer, x, upstream), run(in_fp8_too(layer), x, upstream)
    idle = [1, 2, 4, 5, 6, 7]
    for name in ("experts.w1", "experts.w2", "experts.w3"):
        assert not actual[name][idle].any()
    figures = {name: sqnr_db(wanted[name], actual[name]) for name in wanted}
    assert all(db >= floor(name) for name, db in figures.items()), figures
