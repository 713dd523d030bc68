"""The emulated rules on a GPU: the CPU's numbers, and nothing waits for the device."""

import pytest
import torch
from torch import Tensor

from converters.capability import resolve
from converters.config import SQNR_FLOOR_DB, FP8GroupedExpertsConfig, Numerics
from converters.delayed_config import DelayedConfig
from converters.expert_mlp import expert_mlp
from converters.rules.state import DelayedState
from tests.helpers import NAMES, Experts, exact_mlp, make_experts, sqnr_db, with_tail

pytestmark = pytest.mark.gpu
RECIPES = ("tokenwise", "rowwise", "tensorwise", "blockwise", "delayed")
SIZES = {"uneven": (190, 0, 131, 127), "no_token": (0, 0, 0)}


def passes(experts: Experts, n: Numerics, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The second of two passes, whose scales delayed has from the first."""
    state = DelayedState(2, len(experts.sizes), n.gradients, DelayedConfig(amax_history_len=4)).to(device)
    offs, upstream = experts.offs.to(device), experts.upstream.to(device, dtype)
    leaves = [t.to(device, dtype).requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            out = expert_mlp(*leaves, offs, n, state if n.recipe == "delayed" else None)
            grads = torch.autograd.grad(out, leaves, upstream)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {name: t.detach().cpu() for name, t in zip(NAMES, (out, *grads), strict=True)}


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_as_on_the_cpu_and_without_waiting(recipe: str, wgrad: str) -> None:
    experts = with_tail(make_experts(SIZES["uneven"], D=128, H=256, tail=5), torch.nan)
    n = Numerics(recipe=recipe, backend="emulated", wgrad=wgrad)
    exact = exact_mlp(experts)
    here, there = (passes(experts, n, device, torch.bfloat16) for device in ("cpu", "cuda"))
    rows = slice(experts.rows)
    for name in NAMES:
        a, b, e = (t[name][rows] if name in ("out", "x") else t[name] for t in (here, there, exact))
        assert sqnr_db(a, b) > 25, name  # their GEMMs round to BF16 at other places, and then another cast goes up
        assert sqnr_db(e, b) > SQNR_FLOOR_DB[recipe] - 0.5, name
    assert not there["out"][experts.rows :].any()
    assert not there["x"][experts.rows :].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_token(recipe: str) -> None:
    out = passes(make_experts(SIZES["no_token"]), Numerics(recipe=recipe, backend="emulated"), "cuda", torch.bfloat16)
    assert not any(t.any() for t in out.values())


def test_auto_is_the_emulated_backend_for_every_rule_without_kernels() -> None:
    backends = {r: resolve(FP8GroupedExpertsConfig(recipe=r)).backend for r in RECIPES if r != "tokenwise"}
    assert set(backends.values()) == {"emulated"}
