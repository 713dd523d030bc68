"""The expert MLP on a GPU: at every awkward group against float64, step by step against its twin, with no wait."""

from dataclasses import replace

import pytest
import torch

from converters import weight_cache
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from tests.converters.followed import following
from tests.converters.gpu_checks import BF16, FP32, GROUPS, WAYS, experts_on, mlp_figures, poison, run_mlp
from tests.converters.hopper_checks import check_changed_weights, check_mlp
from tests.helpers import NAMES, sqnr_db

pytestmark = pytest.mark.gpu(capability=(9, 0))
HOPPER = Numerics(backend="hopper")

groups = pytest.mark.parametrize("group", GROUPS)
ways = pytest.mark.parametrize("way", WAYS, ids="-".join)
weight_dtypes = pytest.mark.parametrize("weights", [BF16, FP32])


@pytest.fixture(autouse=True)
def poisoned() -> None:
    weight_cache.clear()
    poison("cuda")


@weight_dtypes
@ways
@groups
def test_mlp_agrees_with_float64_and_the_reference(group: str, way: tuple[str, str], weights: torch.dtype) -> None:
    check_mlp("hopper", "cuda", *GROUPS[group], way, weights)


@ways
@groups
def test_each_step_of_the_mlp_is_its_twins(group: str, way: tuple[str, str]) -> None:
    """From the same inputs by bits, and each GEMM to far more dB than FP8 leaves at the end."""
    n = replace(HOPPER, wgrad=way[0], accumulate=way[1])
    for weights in (BF16, FP32):
        e = experts_on("cuda", *GROUPS[group], weights)
        poison("cuda")
        with following("hopper") as steps:
            mlp_figures(e, run_mlp(e, n))
        rows = {"quantize_rows", "quantize_weight", "gemm_rows", "swiglu_rows", "dswiglu_rows"}
        assert (
            set(steps) - rows
            == {
                "fp8": {"wgrad_operand", "gemm_wgrad"},
                "fp8_columns": {"wgrad_operand_hp", "gemm_wgrad"},
                "bf16": {"gemm_wgrad_hp"},
            }[way[0]]
        )
        assert rows <= set(steps)


def test_compiled_mlp_agrees_with_the_reference() -> None:
    e, found = experts_on("cuda", [130, 0, 77, 300], 520, FP32, 256, 384), []
    for backend, run in (("reference", expert_mlp), ("hopper", torch.compile(expert_mlp, fullgraph=True))):
        leaves = [t.clone().requires_grad_() for t in (e.x, e.w1, e.w2, e.w3)]
        out = run(*leaves, e.offs.cuda(), Numerics(backend=backend))
        grads = torch.autograd.grad(out, leaves, e.upstream)
        found.append(dict(zip(NAMES, (out.detach(), *grads), strict=True)))
    assert all(sqnr_db(found[0][name], found[1][name]) > 30 for name in NAMES)
    assert min(mlp_figures(e, found[1]).values()) > 22.5


KEPT = {"cached": {}, "used_once": {"used_once": True}, "no_cache": {"cache": False}, "temporary": {"temporary": True}}


@weight_dtypes
@pytest.mark.parametrize("kept", KEPT)
@ways
def test_nothing_waits_for_the_host_when_weights_have_changed(
    way: tuple[str, str], kept: str, weights: torch.dtype
) -> None:
    n = replace(HOPPER, wgrad=way[0], accumulate=way[1], **KEPT[kept])
    check_changed_weights("hopper", "cuda", n, weights)
