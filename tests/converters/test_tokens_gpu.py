"""Kernels of the token path on a GPU: bytes of their torch twins, no host sync, rows past 2**31 elements."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from converters.backends import reference_tokens
from converters.backends.reference_tokens import slots_of
from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from converters.kernels import tokens
from converters.token_path import switch_token_path
from tests.converters.gpu_checks import poison
from tests.converters.test_moe_layer import BATCH, LENGTH, D, moe_layer, run
from tests.helpers import sqnr_db

pytestmark = pytest.mark.gpu(capability=(9, 0))

SHAPES = [(1000, 1, 5120, 0), (777, 2, 4096, 0), (333, 8, 48, 0), (500, 3, 20480, 700), (1, 1, 16, 0), (0, 2, 64, 0)]


@pytest.fixture(autouse=True)
def poisoned() -> None:
    poison("cuda")


def _routed(T: int, k: int, D: int, absent: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    M = T * k - absent
    slots = slots_of(torch.randperm(T * k, device="cuda")[:M], T, k)
    x, base = (torch.randn(T, D, device="cuda", dtype=dtype) for _ in range(2))
    return x, base, slots, torch.randn(M, device="cuda"), torch.randn(M, D, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_to_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, _, slots, scores, rows = _routed(*shape, dtype)
    for weighted in (None, scores):
        for other in (None, rows):
            args = x, slots, len(rows), weighted, other
            ours, theirs = tokens.to_rows(*args), reference_tokens.to_rows(*args)
            assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
            assert torch.equal(ours[1], theirs[1])
            torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-2)
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(ours, tokens.to_rows(*args), strict=True)
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_to_tokens(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, base, slots, scores, rows = _routed(*shape, dtype)
    for weighted in (None, scores):
        for added, other in ((None, None), (base, None), (None, x)):
            args = rows, slots, torch.float32, weighted, added, other
            ours, theirs = tokens.to_tokens(*args), reference_tokens.to_tokens(*args)
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-2)
            assert all(torch.equal(a, b) for a, b in zip(ours, tokens.to_tokens(*args), strict=True))


def test_more_than_2_31_elements() -> None:
    T, D = 140_000, 16_384
    slots = torch.arange(T - 1, -1, -1, device="cuda", dtype=torch.int32).view(T, 1)
    x = torch.zeros(T, D, device="cuda", dtype=torch.bfloat16)
    x[-1], x[0] = 3, 5
    q, scale, _ = tokens.to_rows(x, slots, T)
    assert (q[0].float() * scale[0] == 3).all()
    assert (q[-1].float() * scale[-1] == 5).all()
    out, dots = tokens.to_tokens(x, slots, torch.bfloat16, None, None, x)
    assert (out[0] == 3).all()
    assert (out[-1] == 5).all()
    assert dots[0].item() == dots[-1].item() == 15 * D


@pytest.mark.parametrize("before", [True, False], ids=["score_before", "score_after"])
def test_layer_on_the_hopper_backend(before: bool) -> None:
    layer = moe_layer(score_before_experts=before).bfloat16()
    layer.expert_bias = layer.expert_bias.float()
    results = []
    x, upstream = (torch.randn(BATCH, LENGTH, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for fused in ("off", "auto"):
        model = nn.ModuleDict({"moe": copy.deepcopy(layer)})
        report = convert(
            model,
            FP8GroupedExpertsConfig(backend="hopper"),
            fuse=partial(switch_token_path, fused=fused),
        )
        assert ("fused in 1" in report.notes[0]) == (fused == "auto")
        results.append(run(model["moe"], x, upstream))
    figures = {name: sqnr_db(t, results[1][name]) for name, t in results[0].items()}
    assert all(db > 24 for db in figures.values()), figures


def test_nothing_waits_for_the_host() -> None:
    model = nn.ModuleDict({"moe": moe_layer().bfloat16()})
    model["moe"].expert_bias = model["moe"].expert_bias.float()
    convert(model, FP8GroupedExpertsConfig(backend="hopper"), fuse=partial(switch_token_path, fused="on"))
    x, upstream = (torch.randn(BATCH, LENGTH, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    run(model["moe"], x, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(model["moe"], x, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
