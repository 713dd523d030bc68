"""The hopper backend on a GPU: quantizers bit for bit, GEMMs and MLP against float64, at awkward groups."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from converters.backends import hopper, reference
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.kernels import swiglu as kernel

pytestmark = pytest.mark.gpu(capability=(9, 0))

# Sizes, and rows of the buffer: no alignment, empty groups, one expert, all rows on one, no rows at all, many experts.
GROUPS = [
    ([44, 1, 7, 0, 17], 100),
    ([0, 0, 300, 0], 300),
    ([64, 65, 128, 129, 63, 1], 512),
    ([1000], 1000),
    ([0, 0], 48),
    ([700, 900, 3], 2000),
    ([16, 0] * 96, 1600),
]


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Memory that the caching allocator hands out next is full of nan: an element that nobody wrote shows."""
    blocks = [torch.full((1 << 26,), math.nan, device="cuda") for _ in range(4)]
    del blocks


def _offs(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    bits = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (ours, theirs)]
    return torch.equal(*bits)


def _sqnr(expected: Tensor, found: Tensor) -> float:
    noise = (expected - found.double()).norm()
    return math.inf if noise == 0 else float(20 * torch.log10(expected.norm() / noise))


def _rows(M: int, D: int, live: int) -> Tensor:
    x = torch.randn(M, D, device="cuda") * torch.exp2(torch.randint(-8, 8, (M, 1), device="cuda").float())
    x[live:] = math.nan  # rows of nobody
    return x.bfloat16()


def _untransposed(q: Tensor, g: hopper.Groups, M: int) -> Tensor:
    out = torch.zeros(M, q.shape[0], dtype=torch.uint8, device="cuda")
    for begin, end, tile, _ in g.spans[:-1].tolist():
        out[begin:end] = q.view(torch.uint8).t()[128 * tile :][: end - begin]
    return out.view(torch.float8_e4m3fn)


def _expected_rows(q: Tensor, s: Tensor, w: reference.QuantizedWeight, sizes: list[int]) -> Tensor:
    x = q.double() * s[:, None]
    groups = zip(x.split([*sizes, len(x) - sum(sizes)])[:-1], w.q.double() * w.scale[:, None, None], strict=True)
    y = torch.cat([rows @ weight.t() for rows, weight in groups])
    return torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])


@pytest.mark.parametrize(("sizes", "M"), GROUPS, ids=lambda v: str(v)[:24])
def test_quantizers_give_the_bytes_of_their_twins(sizes: list[int], M: int) -> None:
    x, offs, live = _rows(M, 208, sum(sizes)), _offs(sizes), sum(sizes)
    g, rg = hopper.groups(offs, M), reference.groups(offs, M)
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = hopper.quantize_rows(x.to(dtype)), reference.quantize_rows(x.to(dtype))
        assert _same(ours[0][:live], theirs[0][:live])
        assert _same(ours[1][:live], theirs[1][:live])
    some = torch.tensor(sizes, device="cuda") > 0
    for a, b in (
        (hopper.wgrad_operand(*ours, g), reference.wgrad_operand(*theirs, rg)),
        (hopper.wgrad_operand_hp(x, g), reference.wgrad_operand_hp(x, rg)),
    ):
        assert _same(_untransposed(a.q, g, M)[:live], b.q[:live])
        assert _same(a.scale[some].float(), b.scale[some])
    halves = [hopper.wgrad_operand(half, ours[1], g) for half in ours[0].chunk(2, dim=1)]  # as they lie
    whole = hopper.wgrad_operand(*ours, g)
    assert _same(
        torch.cat([_untransposed(h.q, g, M) for h in halves], dim=1)[:live], _untransposed(whole.q, g, M)[:live]
    )
    assert _same(torch.cat([h.scale for h in halves], dim=1)[some], whole.scale[some])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_give_the_same_bytes_cold_and_carried(dtype: torch.dtype) -> None:
    ws = [(torch.randn(5, n, 208, device="cuda") * 0.02).to(dtype) for n in (176, 48)]
    theirs = reference.quantize_weight(ws)
    wrong = theirs.scale * torch.exp2(torch.tensor([0.0, 1, -2, 5, 0], device="cuda"))
    for previous in (None, theirs, replace(theirs, scale=wrong), replace(theirs, scale=wrong * math.nan)):
        ours = hopper.quantize_weight(ws, previous=previous)
        assert _same(ours.q, theirs.q)
        assert _same(ours.q_t, theirs.q_t)
        assert _same(ours.scale, theirs.scale)


def test_swiglu_is_within_a_rounding_of_its_twin() -> None:
    y13, dh = (torch.randn(300, n, device="cuda").bfloat16() for n in (672, 336))
    over = dh.clone()
    for ours, theirs in (
        (hopper.swiglu_rows(y13), reference.swiglu_rows(y13)),
        (hopper.dswiglu_rows(over, y13), reference.dswiglu_rows(dh, y13)),
    ):
        found, expected = (q.float() * s[:, None] for q, s in (ours, theirs))
        assert _sqnr(expected.double(), found) > 50


@pytest.mark.parametrize("H", [336, 8192, 14336])
def test_the_gradient_of_swiglu_written_over_dh_is_the_same_bits(H: int) -> None:
    y13, dh = (torch.randn(3000, n, device="cuda").bfloat16() for n in (2 * H, H))
    expected, over = kernel.dswiglu_rows(dh, y13), dh.clone()
    found = hopper.dswiglu_rows(over, y13)
    assert found[0].data_ptr() == over.data_ptr()
    assert all(_same(a, b) for a, b in zip(expected, found, strict=True))


# The tensor core sums to about 14 bits, over all of the contraction or (precise) 128 of it: 73 to 79 dB. BF16: 50.
@pytest.mark.parametrize(("dtype", "accumulate", "floor"), [
    (torch.bfloat16, "fast", 48), (torch.float32, "fast", 60), (torch.float32, "precise", 70),
])  # fmt: skip
@pytest.mark.parametrize(("sizes", "M"), GROUPS, ids=lambda v: str(v)[:24])
def test_gemms_agree_with_float64(sizes: list[int], M: int, dtype: torch.dtype, accumulate: str, floor: float) -> None:
    K, N, live, offs = 208, 352, sum(sizes), _offs(sizes)
    g, rg = hopper.groups(offs, M), reference.groups(offs, M)
    q, s = hopper.quantize_rows(_rows(M, K, live))
    w = hopper.quantize_weight([torch.randn(len(sizes), N, K, device="cuda") * 0.02])
    y = hopper.gemm_rows(q, s, w.q, w.scale, g, dtype, accumulate)
    assert not y[live:].any()
    clean = s.nan_to_num(), q.float().nan_to_num()
    assert _sqnr(_expected_rows(clean[1], clean[0], w, sizes)[:live], y[:live]) > floor
    dq, ds = hopper.quantize_rows(_rows(M, N, live))
    dw = hopper.gemm_wgrad(hopper.wgrad_operand(dq, ds, g), hopper.wgrad_operand(q, s, g), g, dtype, accumulate)
    a, b = reference.wgrad_operand(dq[:live], ds[:live], rg), reference.wgrad_operand(q[:live], s[:live], rg)
    expected = torch.zeros(len(sizes), N, K, dtype=torch.float64, device="cuda")
    begin = 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        expected[e] = (a.q[rows].double() * a.scale[e]).t() @ (b.q[rows].double() * b.scale[e]) if size else 0
        assert size or not dw[e].any()
        begin += size
    assert _sqnr(expected, dw) > floor


def test_precise_accumulation_is_more_precise_over_a_long_contraction() -> None:
    sizes, K = [200, 56], 8192
    g = hopper.groups(_offs(sizes), 256)
    q, s = hopper.quantize_rows(torch.rand(256, K, device="cuda"))  # one sign: sums grow, and what falls off grows too
    w = hopper.quantize_weight([torch.rand(2, 256, K, device="cuda")])
    expected = _expected_rows(q, s, w, sizes)
    fast, precise = (
        _sqnr(expected, hopper.gemm_rows(q, s, w.q, w.scale, g, torch.float32, a)) for a in ("fast", "precise")
    )
    assert precise > fast + 6


def test_a_weight_gradient_over_many_tokens_can_be_summed_precisely() -> None:
    """Tokens with a mean, as real ones have: what falls off beyond 14 bits makes the sum of thousands too small."""
    sizes, T = [16000, 384], 16384
    g, rg = hopper.groups(_offs(sizes), T), reference.groups(_offs(sizes), T)
    sides = [hopper.quantize_rows(torch.randn(T, n, device="cuda").bfloat16() + 1) for n in (128, 256)]
    a, b = (reference.wgrad_operand(*side, rg) for side in sides)
    expected = torch.stack([
        (a.q[rows].double() * a.scale[e]).t() @ (b.q[rows].double() * b.scale[e])
        for e, rows in enumerate((slice(0, 16000), slice(16000, T)))
    ])  # fmt: skip
    operands = [hopper.wgrad_operand(*side, g) for side in sides]
    fast, precise = (
        _sqnr(expected, hopper.gemm_wgrad(*operands, g, torch.float32, a)) for a in ("fast", "precise_wgrad")
    )
    assert precise > 60
    assert precise > fast + 6


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=12),
    spare=st.integers(0, 200),
    K=st.integers(1, 40),
    N=st.integers(1, 40),
)
def test_random_shapes(sizes: list[int], spare: int, K: int, N: int) -> None:
    M, K, N, live = sum(sizes) + spare, 16 * K, 16 * N, sum(sizes)
    g = hopper.groups(_offs(sizes), M)
    q, s = hopper.quantize_rows(_rows(M, K, live))
    w = hopper.quantize_weight([torch.randn(len(sizes), N, K, device="cuda")])
    y = hopper.gemm_rows(q, s, w.q, w.scale, g, torch.bfloat16)
    assert not y[live:].any()
    if live:
        expected = _expected_rows(q.float().nan_to_num(), s.nan_to_num(), w, sizes)
        assert _sqnr(expected[:live], y[:live]) > 45


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_mlp_agrees_with_the_reference_backend(compiled: bool) -> None:
    sizes, M, D, H = [130, 0, 77, 300], 520, 256, 384
    ws = [torch.randn(4, *s, device="cuda") * 0.05 for s in ((H, D), (D, H), (H, D))]
    x, g = torch.randn(M, D, device="cuda").bfloat16(), torch.randn(M, D, device="cuda").bfloat16()
    found = []
    for backend in ("reference", "hopper"):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *ws)]
        run = torch.compile(expert_mlp, fullgraph=True) if compiled and backend == "hopper" else expert_mlp
        out = run(*leaves, _offs(sizes), Numerics(backend=backend))
        out.backward(g)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, ours in zip(*found, strict=True):
        assert _sqnr(expected.double(), ours) > 30
    assert not found[1][0][507:].any()
    assert not found[1][2][1].any()


def test_nothing_waits_for_the_host() -> None:
    ws = [(torch.randn(3, *s, device="cuda") * 0.05).requires_grad_() for s in ((64, 128), (128, 64), (64, 128))]
    x, offs = torch.randn(200, 128, device="cuda").bfloat16().requires_grad_(), _offs([100, 0, 77])
    for sync in ("default", "error"):  # the first run compiles, and may wait
        torch.cuda.set_sync_debug_mode(sync)
        try:
            expert_mlp(x, *ws, offs, Numerics(backend="hopper")).backward(torch.ones_like(x))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_to_the_31_elements() -> None:
    M, K, N = 300_000, 256, 8192
    sizes = [M - 1000, 0, 700]
    x = torch.randn(M, K, device="cuda").bfloat16()
    q, s = hopper.quantize_rows(x)
    w = hopper.quantize_weight([torch.randn(3, N, K, device="cuda") * 0.02])
    y = hopper.gemm_rows(q, s, w.q, w.scale, hopper.groups(_offs(sizes), M), torch.bfloat16)
    assert y.numel() > 2**31
    tail = hopper.gemm_rows(q[-1000:], s[-1000:], w.q, w.scale, hopper.groups(_offs([0, 0, 700]), 1000), torch.bfloat16)
    assert torch.equal(y[-1000:], tail)
    h, sh = hopper.swiglu_rows(y)
    expected, scale = hopper.swiglu_rows(y[-1000:])
    assert _same(h[-1000:], expected)
    assert _same(sh[-1000:], scale)
    g = hopper.groups(_offs(sizes), M)
    column = hopper.wgrad_operand(h, sh, g)
    assert column.q.numel() > 2**30
    alone = hopper.wgrad_operand(h[-1000:], sh[-1000:], hopper.groups(_offs([0, 0, 700]), 1000))
    first = 128 * int(g.spans[2, 2])
    assert _same(column.q[:, first : first + 700], alone.q[:, :700])
