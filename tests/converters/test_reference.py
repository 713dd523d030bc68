"""The reference backend against bytes and scales worked out by hand.

E4M3: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7e = 1.75 * 2**8 = 448 is the largest, 0x7f is nan, no inf; the
smallest normal is 2**-6 (0x08), the smallest subnormal 2**-9 (0x01).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from converters.backends import get_backend, reference
from tests.helpers import offsets, sqnr_db

NAN = 0x7F


def bytes_of(q: Tensor) -> list:
    """The bytes of an E4M3 tensor, nan of either sign as 0x7f."""
    return torch.where(q.float().isnan(), NAN, q.view(torch.uint8)).tolist()


@pytest.mark.parametrize(
    ("row", "scale", "expected"),
    [
        # amax 448: scale 1. 1 = 2**0 -> exponent 7, 0b0111000; -2 -> exponent 8 and the sign bit.
        pytest.param([448.0, 1.0, -2.0, 0.0], 1.0, [0x7E, 0x38, 0xC0, 0x00], id="scale_one"),
        # 465 / 448 > 1: scale 2. 232.5 lies between 224 and 240 (spacing 16 in [128, 256)): 240 = 1.875 * 2**7.
        pytest.param([465.0, 2.0, 896.0 / 2, -465.0], 2.0, [0x77, 0x38, 0x76, 0xF7], id="above_448"),
        # 449 is the first that does not fit: 224.5 -> 224 = 1.75 * 2**7 -> 14, 6.
        pytest.param([449.0, 0.0], 2.0, [0x76, 0x00], id="just_above_448"),
        # amax 7 = 1.75 * 2**2 = 448 * 2**-6. 1 / 2**-6 = 64 -> exponent 13.
        pytest.param([7.0, 1.0, -0.5], 2.0**-6, [0x7E, 0x68, 0xE0], id="small"),
        # Ties go to even: 0.5 of the smallest subnormal is 0, 1.5 of it is 2 of it; 0.75 of it is 1 of it.
        pytest.param([448.0, 2.0**-10, 3 * 2.0**-10, 1.5 * 2.0**-10], 1.0, [0x7E, 0x00, 0x02, 0x01], id="subnormals"),
        # The mantissa too: 17 lies between 16 and 18 -> 16 (even), 19 between 18 and 20 -> 20.
        pytest.param([448.0, 17.0, 19.0, 2.0**-6], 1.0, [0x7E, 0x58, 0x5A, 0x08], id="ties"),
    ],
)
def test_row_of_known_bytes(row: list[float], scale: float, expected: list[int]) -> None:
    q, got = reference.quantize_rows(torch.tensor([row]))
    assert got.tolist() == [scale]
    assert bytes_of(q) == [expected]


@pytest.mark.parametrize("exponent", range(-100, 119, 7))
def test_scale_is_the_smallest_power_of_two_that_fits(exponent: int) -> None:
    fits = torch.tensor(448.0 * 2.0**exponent)
    amax = torch.stack([fits, torch.nextafter(fits, torch.tensor(math.inf)), fits / 2, fits * 0.51])
    assert (reference.pow2_scale(amax) / 2.0**exponent).tolist() == [1.0, 2.0, 0.5, 1.0]


def test_case_15_padding_is_outside_every_amax() -> None:
    """A huge row of nobody, and zero rows inside a group, change no scale and no byte of the real rows."""
    x = torch.randn(9, 32)
    buffer = torch.cat([x[:4], torch.zeros(12, 32), x[4:], torch.full((7, 32), 1e30)])
    padded = reference.groups(torch.tensor([16, 21], dtype=torch.int32), len(buffer))
    tight = reference.groups(torch.tensor([4, 9], dtype=torch.int32), 9)
    real = [*range(4), *range(16, 21)]
    (q, scale), (q_buffer, scale_buffer) = reference.quantize_rows(x), reference.quantize_rows(buffer)
    assert torch.equal(scale_buffer[real], scale)
    assert bytes_of(q_buffer[real]) == bytes_of(q)
    for operand in (reference.wgrad_operand_hp, lambda t, g: reference.wgrad_operand(*reference.quantize_rows(t), g)):
        wanted, got = operand(x, tight), operand(buffer, padded)
        assert torch.equal(wanted.scale, got.scale)
        assert bytes_of(got.q[real]) == bytes_of(wanted.q)
        assert bytes_of(got.q[4:16]) == [[0] * 32] * 12


def test_case_15_gradient_columns_are_scaled_by_their_own_group() -> None:
    """One group 2**20 above the other: with one scale for both, the small one would be zero."""
    x = torch.cat([torch.randn(5, 16), torch.randn(6, 16) * 2.0**20])
    operand = reference.wgrad_operand_hp(x, reference.groups(offsets((5, 6)), 11))
    restored = operand.q.float() * operand.scale.repeat_interleave(torch.tensor([5, 6]), dim=0)
    assert min(sqnr_db(x[:5], restored[:5]), sqnr_db(x[5:], restored[5:])) > 28


@pytest.mark.parametrize(
    ("value", "scale", "byte"),
    [
        pytest.param(0.0, 2.0**-108, 0x00, id="zeros"),  # the floor, 1e-30 / 448 = 2**-108.48: no 0 / 0
        pytest.param(1e-38, 2.0**-108, 0x00, id="tiny"),  # below what a float32 scale can lift: 0, not nan
        pytest.param(3e38, 2.0**120, 0x76, id="huge"),  # 3e38 / 2**120 = 225.7 -> 224
    ],
)
def test_case_16_extreme_rows_get_a_finite_scale(value: float, scale: float, byte: int) -> None:
    q, got = reference.quantize_rows(torch.tensor([[value, 0.0], [1.0, 2.0]]))
    assert got.tolist() == [scale, 2.0**-7]  # 2 = 448 * 2**-7.8; the neighbour is not touched
    assert bytes_of(q) == [[byte, 0x00], [0x70, 0x78]]


def test_case_16_the_cast_saturates_instead_of_making_nan() -> None:
    """What does not fit its scale (464 rounds up to 480, which E4M3 has no code for) is 448, with either sign."""
    q = reference.cast(torch.tensor([448.0, 463.9, 464.0, 465.0, 1e30, -465.0]), torch.tensor(1.0))
    assert bytes_of(q) == [0x7E] * 5 + [0xFE]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_case_16_inf_and_nan_stay_visible(bad: float) -> None:
    x = torch.tensor([[1.0, bad], [1.0, 2.0]])
    q, scale = reference.quantize_rows(x)
    assert (q.float() * scale[:, None]).isnan().any(1).tolist() == [True, False]
    columns = reference.wgrad_operand_hp(x, reference.groups(offsets((2,)), 2))
    assert columns.scale.isnan().tolist() == [[False, True]]
    y13 = torch.tensor([[1.0, bad, 1.0, 1.0], [1.0] * 4])
    for q, scale in (reference.swiglu_rows(y13), reference.dswiglu_rows(torch.ones(2, 2), y13)):
        if bad != -math.inf:  # silu(-inf) = nan in float32 as well, but its gradient may be finite
            assert (q.float() * scale[:, None]).isnan().any(1).tolist() == [True, False]
    weights = reference.quantize_weight([x.reshape(2, 1, 2)])
    assert weights.scale.isnan().tolist() == [True, False]


@pytest.mark.parametrize("amax", [1e-29, 1e-20, 1e-12, 1e-5])
def test_small_gradients_keep_their_precision(amax: float) -> None:
    """Floors of 1e-12 and 1e-4, in use elsewhere, flush them to zero."""
    x = torch.randn(4, 256) * amax
    q, scale = reference.quantize_rows(x)
    assert sqnr_db(x, q.double() * scale[:, None].double()) > 30


def test_rescaling_for_the_weight_gradient_is_exact_but_for_new_subnormals() -> None:
    rows = torch.randn(60, 48) * torch.logspace(-3, 3, 60, base=2)[:, None]
    q, scale = reference.quantize_rows(rows)
    exact = q.double() * scale[:, None].double()
    operand = reference.wgrad_operand(q, scale, reference.groups(offsets((23, 0, 37)), 60))
    per_row = operand.scale.double().repeat_interleave(torch.tensor([23, 0, 37]), dim=0)
    error = (operand.q.double() * per_row - exact).abs()
    normal = (exact / per_row).abs() >= 2.0**-6
    assert normal.sum() > 2000
    assert error[normal].max() == 0
    assert (error[~normal] <= 2.0**-10 * per_row[~normal]).all()


def test_one_weight_scale_serves_both_directions_with_the_same_bytes() -> None:
    w1, w3 = torch.randn(3, 32, 16) * 0.02, torch.randn(3, 16, 16)
    both = reference.quantize_weight([w1, w3])
    assert both.q.shape == (3, 48, 16)
    assert both.q_t.shape == (3, 16, 48)
    assert both.scale.shape == (3,)
    assert torch.equal(both.scale, both.scale_t)
    assert bytes_of(both.q.transpose(1, 2)) == bytes_of(both.q_t)
    assert both.scale.tolist() == reference.pow2_scale(torch.cat([w1, w3], 1).abs().amax((1, 2))).tolist()


def test_rowwise_weight_scales_follow_each_contraction() -> None:
    w = torch.tensor([[[448.0, 7.0], [7.0, 3.5]]])
    quantized = reference.quantize_weight([w], per_row=True)
    assert quantized.scale.tolist() == [[1.0, 2.0**-6]]  # rows of W: the forward contracts K
    assert quantized.scale_t.tolist() == [[1.0, 2.0**-6]]  # columns of W: dgrad contracts N
    assert bytes_of(quantized.q) == [[[0x7E, 0x4E], [0x7E, 0x76]]]  # 7 = 1.75 * 2**2; 3.5 / 2**-6 = 224
    assert bytes_of(quantized.q_t) == [[[0x7E, 0x4E], [0x7E, 0x76]]]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
    tail=st.integers(0, 5),
    K=st.sampled_from([16, 48]),
    N=st.sampled_from([16, 32]),
    per_row=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_gemms_equal_dequantized_float64(sizes: tuple[int, ...], tail: int, K: int, N: int, per_row: bool) -> None:
    """Scales, groups and shapes: a grouped GEMM is the float64 product of what its operands stand for."""
    M, E = sum(sizes) + tail, len(sizes)
    groups = reference.groups(offsets(sizes), M)
    q, scale = reference.quantize_rows(torch.randn(M, K))
    w = reference.quantize_weight([torch.randn(E, N, K)], per_row=per_row)
    y = reference.gemm_rows(q, scale, w.q, w.scale, groups, torch.float64)
    dw = reference.gemm_wgrad(*(reference.wgrad_operand(q, scale, groups) for _ in range(2)), groups, torch.float64)
    x = q.double() * scale[:, None].double()
    weights = w.q.double() * w.scale.double().view(E, -1, 1)
    begin = 0
    for e, size in enumerate(sizes):
        rows = x[begin : begin + size]
        torch.testing.assert_close(y[begin : begin + size], rows @ weights[e].t(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dw[e], rows.t() @ rows, rtol=1e-2, atol=1e-1)  # loose: new subnormals
        begin += size
    assert not y[begin:].any()


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y13: Tensor) -> Tensor:
        ctx.save_for_backward(y13)
        return reference.swiglu(y13)

    @staticmethod
    def backward(ctx, dh: Tensor) -> Tensor:
        return reference.dswiglu(dh, *ctx.saved_tensors)


def test_swiglu_gradient_passes_gradcheck() -> None:
    y13 = (torch.randn(5, 12, dtype=torch.float64) * 3).requires_grad_()
    assert torch.autograd.gradcheck(_SwiGLU.apply, (y13,))


def test_swiglu_is_torch_silu_times_the_right_half_in_float32() -> None:
    y13 = torch.randn(7, 32).bfloat16()
    left, right = y13.float().chunk(2, dim=1)
    assert torch.equal(reference.swiglu(y13), torch.nn.functional.silu(left) * right)
    assert reference.dswiglu(torch.randn(7, 16).bfloat16(), y13).dtype == torch.float32


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend 'cutlass' is unknown: choose 'reference' or 'hopper'"):
        get_backend("cutlass")
