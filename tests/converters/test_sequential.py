"""Experts one after the other: the same numbers as grouped ones, in FP8 and without."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import SQNR_FLOOR_DB, FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from converters.sequential_experts import SequentialExpertsConverter
from tests.helpers import sqnr_db

COUNTS = torch.tensor([7, 0, 30, 11])


def experts() -> nn.Module:
    model = nn.Module()
    model.experts = GroupedExperts(dim=64, hidden_dim=96, num_experts=4, use_grouped_mm=True)
    with torch.no_grad():
        model.experts.init_weights(init_std=0.02)
    return model


def run(model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = model.experts(x, COUNTS)
    grads = torch.autograd.grad(out, [x, *model.parameters()], g)
    return [out.detach(), *grads]


def test_fp8_sequential_equals_fp8_grouped() -> None:
    grouped = experts()
    sequential = copy.deepcopy(grouped)
    convert(grouped, FP8GroupedExpertsConfig(backend="reference"))
    convert(sequential, FP8GroupedExpertsConfig(backend="reference", experts="sequential"))
    x, g = torch.randn(48, 64), torch.randn(48, 64)
    for a, b in zip(run(grouped, x, g), run(sequential, x, g), strict=True):
        assert sqnr_db(a, b) > SQNR_FLOOR_DB["tokenwise"]  # w1 and w3 have a scale of their own here, dy1 and dy3 too
    assert all(w.grad is None or w.grad[1].abs().max() == 0 for w in sequential.experts.parameters())


def test_the_converter_alone_changes_no_precision() -> None:
    model = experts()
    other = copy.deepcopy(model)
    SequentialExpertsConverter(SimpleNamespace(), SimpleNamespace()).convert(other)
    x, g = torch.randn(48, 64), torch.randn(48, 64)
    for a, b in zip(run(model, x, g), run(other, x, g), strict=True):
        assert sqnr_db(b, a) > 40  # grouped experts are BF16 in torchtitan, the loop is float32 here


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="finds no GroupedExperts"):
        SequentialExpertsConverter(SimpleNamespace(), SimpleNamespace()).convert(nn.Linear(2, 2))
