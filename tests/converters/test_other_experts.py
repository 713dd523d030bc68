"""Experts that are not torchtitan's GroupedExperts as they stand: subclasses, other projects' modules, patched ones."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from tests.converters.models import MixtralExperts, expert_names, in_fp8, llama4, materialized
from tests.helpers import DEVICE, sqnr_db

REFERENCE = FP8GroupedExpertsConfig(backend="reference")


def test_other_modules_are_converted_only_by_name() -> None:
    model = nn.ModuleDict({"experts": MixtralExperts(), "lm_head": nn.Linear(32, 64)})
    with pytest.raises(
        ValueError, match=r"converts nothing: experts: MixtralExperts, not torchtitan's.*name it in fqns"
    ):
        convert(model, REFERENCE)
    plain = copy.deepcopy(model["experts"])
    report = convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["experts"]))
    assert in_fp8(model) == {"experts.gate_up", "experts.down"}
    assert "MixtralExperts.forward as it is, its products in FP8" in report.converted[0].note
    x, upstream = torch.randn(60, 32), torch.randn(60, 32)
    outs = [experts(x, [30, 0, 7, 23]) for experts in (plain, model["experts"])]
    for out in outs:
        out.backward(upstream)
    for a, b in (
        (outs[0], outs[1]),
        *((getattr(plain, n).grad, getattr(model["experts"], n).grad) for n in ("gate_up", "down")),
    ):
        assert 21 < sqnr_db(a, b) < 28.5


def test_a_layer_pattern_does_not_take_other_three_dim_weights() -> None:
    """A convolution's weight has three dims as well: to be converted, such a module must be named itself."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.ModuleDict({"conv": nn.Conv1d(16, 16, 16)})})})
    model["layers"]["0"]["experts"] = GroupedExperts(16, 16, 2, True)
    convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["layers.0"]))
    assert in_fp8(model) == expert_names(0, of="layers.{}.experts")


class TwiceExperts(GroupedExperts):
    """A subclass that builds on its parent's forward."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return 2 * super().forward(x, num_tokens_per_expert)


class GeluExperts(GroupedExperts):
    """A subclass with mathematics of its own, that never looks at w3."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        sizes = num_tokens_per_expert.tolist()
        return torch.cat(
            [nn.functional.gelu(r @ self.w1[e].t()) @ self.w2[e].t() for e, r in enumerate(x.split(sizes))]
        )


class QuietExperts(GroupedExperts):
    """A subclass that only initializes in its own way."""

    def init_weights(self, init_std: float) -> None:
        nn.init.constant_(self.w1, init_std)


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped_mm", "for_loop"])
@pytest.mark.parametrize("kind", [GroupedExperts, TwiceExperts, GeluExperts, QuietExperts])
def test_subclasses_keep_their_own_behaviour_in_fp8(kind: type[GroupedExperts], grouped: bool) -> None:
    plain = kind(64, 96, 4, grouped).to(DEVICE)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.05)
    model = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    convert(model, REFERENCE)
    assert type(model["experts"]) is kind
    x, counts = torch.randn(90, 64, device=DEVICE), torch.tensor([41, 0, 9, 40], device=DEVICE)
    upstream, results = torch.randn(90, 64, device=DEVICE), []
    for experts in (plain, model["experts"]):
        leaf = x.clone().requires_grad_()
        out = experts(leaf, counts)
        out.backward(upstream)
        results.append([out.detach(), leaf.grad, experts.w1.grad, experts.w2.grad])
    for a, b in zip(*results, strict=True):
        assert 21 < sqnr_db(a, b) < 29, "not FP8, or not the same function"


def test_a_forward_set_on_one_module_stays() -> None:
    model = nn.ModuleDict({"experts": GroupedExperts(16, 16, 2, True)})
    model["experts"].forward = lambda x, counts: x * 3
    convert(model, REFERENCE)
    assert torch.equal(model["experts"](torch.ones(2, 16), torch.tensor([1, 1])), torch.full((2, 16), 3.0))


def test_hooks_of_the_experts_still_run() -> None:
    model = llama4(n_layers=1)
    seen = []
    model.layers["0"].moe.experts.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    convert(model, REFERENCE)
    materialized(model)(torch.randint(0, 128, (2, 16), device=DEVICE))
    assert seen == [torch.Size([64, 64])]  # 2 * 16 tokens, top_k 2


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped_mm", "for_loop"])
def test_gpt_oss_experts_with_biases_and_a_clamped_swiglu(grouped: bool) -> None:
    """torchtitan's own other experts: three-dim weights become FP8, biases stay, the mathematics is theirs."""
    plain = GptOssGroupedExperts(64, 96, 4, swiglu_limit=7.0, use_grouped_mm=grouped).to(DEVICE)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.05)
    model = nn.ModuleDict({"experts": copy.deepcopy(plain)})
    convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["experts"]))
    assert in_fp8(model) == {"experts.mlp1_weight", "experts.mlp2_weight"}
    x, counts = torch.randn(90, 64, device=DEVICE), torch.tensor([41, 0, 9, 40], device=DEVICE)
    upstream, results = torch.randn(90, 64, device=DEVICE), []
    for experts in (plain, model["experts"]):
        leaf = x.clone().requires_grad_()
        out = experts(leaf, counts)
        out.backward(upstream)
        results.append([out.detach(), leaf.grad, *(p.grad for p in experts.parameters())])
    for name, a, b in zip(("out", "x", *(n for n, _ in plain.named_parameters())), *results, strict=True):
        assert sqnr_db(a, b) > 23, name
