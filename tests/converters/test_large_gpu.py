"""More than 2**31 elements on a GPU: rows, a stack of weights, weight gradients. 20 GB at most, and few rows."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from converters.backends import get_backend, hopper, reference
from tests.converters.gpu_checks import BF16, FP32, dequantized, exact_rows, exact_wgrad, offs_of, same
from tests.helpers import sqnr_db

pytestmark = pytest.mark.gpu(capability=(9, 0))
# Expert 32 begins at element 2**31: it has no rows, 33 has 100, and those before it 16 each.
E, N, K = 34, 8192, 8192
SIZES = [16] * (E - 2) + [0, 100]


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """Other processes test on the same GPU."""
    yield
    torch.cuda.empty_cache()


def check_large_weight(backend: str, device: str, sizes: list[int], N: int, K: int) -> None:
    """Bytes of some experts and products with the last one; then all are repaired from a wrong scale."""
    b, E, M = get_backend(backend), len(sizes), sum(sizes)
    w = torch.randn(E, N, K, device=device, dtype=BF16)
    w[-1] *= 3
    cold = b.quantize_weight([w])
    for quantized in (cold, b.quantize_weight([w], previous=replace(cold, scale=cold.scale * 4))):
        assert same(quantized.scale, cold.scale)
        for e in (0, E - 3, E - 2, E - 1):
            alone = reference.quantize_weight([w[e : e + 1]])
            assert same(quantized.scale[e : e + 1], alone.scale)
            assert same(quantized.q[e : e + 1], alone.q)
            assert same(quantized.q_t[e : e + 1], alone.q_t)
    g, last = b.groups(offs_of(sizes, device), M), sizes[-1]
    for weight, width in ((cold.q, K), (cold.q_t, N)):
        q, s = b.quantize_rows(torch.randn(M, width, device=device).bfloat16())
        y = b.gemm_rows(q, s, weight, cold.scale, g, BF16, "fast")
        expected = exact_rows(q[-last:], s[-last:], weight[-1:], cold.scale[-1:], [last])
        assert sqnr_db(expected, y[-last:]) > 48


def check_large_gradient(backend: str, device: str, sizes: list[int], N: int, K: int, dtype: torch.dtype) -> None:
    """From FP8, fast and precise, and from high precision: the last expert's, and zeros for the one before."""
    b, E, M, last = get_backend(backend), len(sizes), sum(sizes), sizes[-1]
    g, rg = (module.groups(offs_of(sizes, device), M) for module in (b, reference))
    hp = [torch.randn(M, D, device=device).bfloat16() for D in (N, K)]
    rows = [b.quantize_rows(x) for x in hp]
    operands = [b.wgrad_operand(*r, g) for r in rows]
    alone = [dequantized(reference.wgrad_operand(*r, rg), sizes)[-last:] for r in rows]
    wanted, wanted_hp = exact_wgrad(*alone, [last]), exact_wgrad(hp[0][-last:], hp[1][-last:], [last])
    floor = 48 if dtype == BF16 else 60
    for way in ("fast", "precise", "high precision"):
        block = torch.full((E, N, K), math.nan, device=device, dtype=dtype)  # what dW is written over
        del block
        if way == "high precision":
            dw = b.gemm_wgrad_hp(*hp, g, dtype)
        else:
            dw = b.gemm_wgrad(*operands, g, dtype, way)
        assert not dw[-2].any()
        assert dw[:-2].any(dim=2).all()
        assert sqnr_db(wanted_hp if way == "high precision" else wanted, dw[-1:]) > floor
        del dw


def test_a_stack_of_weights_of_more_than_2_to_the_31_elements() -> None:
    assert (E - 2) * N * K == 2**31
    check_large_weight("hopper", "cuda", SIZES, N, K)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_weight_gradients_of_more_than_2_to_the_31_elements(dtype: torch.dtype) -> None:
    check_large_gradient("hopper", "cuda", SIZES, N, K, dtype)


def test_rows_of_more_than_2_to_the_31_elements() -> None:
    M, K, N = 300_000, 256, 8192
    sizes, tail_sizes = [M - 1000, 0, 700], [0, 0, 700]
    x = torch.randn(M, K, device="cuda").bfloat16()
    q, s = hopper.quantize_rows(x)
    w = hopper.quantize_weight([torch.randn(3, N, K, device="cuda") * 0.02])
    g, tail_g = hopper.groups(offs_of(sizes, "cuda"), M), hopper.groups(offs_of(tail_sizes, "cuda"), 1000)
    y = hopper.gemm_rows(q, s, w.q, w.scale, g, BF16)
    assert y.numel() > 2**31
    tail = hopper.gemm_rows(q[-1000:], s[-1000:], w.q, w.scale, tail_g, BF16)
    assert torch.equal(y[-1000:], tail)
    h, sh = hopper.swiglu_rows(y)
    expected, scale = hopper.swiglu_rows(y[-1000:])
    assert same(h[-1000:], expected)
    assert same(sh[-1000:], scale)
    column = hopper.wgrad_operand(h, sh, g)
    assert column.q.numel() > 2**30
    alone = hopper.wgrad_operand(h[-1000:], sh[-1000:], tail_g)
    first = 128 * int(g.spans[2, 2])
    assert same(column.q[:, first : first + 700], alone.q[:, :700])
