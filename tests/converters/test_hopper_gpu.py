"""The hopper backend on a GPU: quantizers bit for bit, GEMMs against float64, at awkward groups."""

import pytest
import torch

from converters.backends import hopper, reference
from converters.kernels import rows
from converters.kernels import swiglu as kernel
from tests.converters.gpu_checks import (
    BF16,
    FP32,
    GROUPS,
    PRODUCTS,
    dequantized,
    exact_rows,
    exact_wgrad,
    offs_of,
    poison,
    rows_of,
    same,
)
from tests.converters.hopper_checks import (
    check_gemm_rows,
    check_gemm_wgrad,
    check_gemm_wgrad_hp,
    check_quantizers,
    check_swiglu,
    check_weights,
)
from tests.helpers import sqnr_db

pytestmark = pytest.mark.gpu(capability=(9, 0))
NK = (352, 208)  # of a GEMM: neither is a multiple of a tile

groups = pytest.mark.parametrize("group", GROUPS)
products = pytest.mark.parametrize(("dtype", "accumulate", "floor"), PRODUCTS)


@pytest.fixture(autouse=True)
def poisoned() -> None:
    poison("cuda")


@groups
def test_quantizers_give_the_bytes_of_their_twins(group: str) -> None:
    check_quantizers("hopper", "cuda", *GROUPS[group])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_weights_give_the_same_bytes_cold_and_carried(dtype: torch.dtype) -> None:
    check_weights("hopper", "cuda", 5, (176, 48), 208, dtype)


# 20480 columns are read in two parts (kernels/rows.py).
@pytest.mark.parametrize("D", [16, 208, 5120, rows.MAX_BLOCK + 4096])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gathered_rows_give_the_bytes_of_their_twin(D: int, index_dtype: torch.dtype) -> None:
    """Repeated, absent and unread rows, no row at all; of a tensor, and of some columns of a wider one."""
    for dtype in (BF16, FP32):
        wide = rows_of(70, D + 32, 69, "cuda", dtype)  # row 69 is nan: it shows where it is read, and nowhere else
        for x in (wide[:, :D].contiguous(), wide[:, 16 : D + 16]):
            for places in ([3, -1, 7, 0, 0, 68, -1, 3], [-1], [69, 1], list(range(69, -1, -1)), []):
                index = torch.tensor(places, dtype=index_dtype, device="cuda")
                gathered = x[index.clamp_min(0).long()].masked_fill((index < 0)[:, None], 0)
                poison("cuda")
                ours = hopper.quantize_rows(x, index)
                assert ours[0].shape == (len(places), D)
                if places:  # the reference finds no amax of nothing
                    assert all(same(a, b) for a, b in zip(ours, reference.quantize_rows(gathered), strict=True))


@pytest.mark.parametrize(("M", "H"), [(300, 336), (64, 8192), (1, 16)])
def test_swiglu_gives_the_bytes_of_its_twin_but_for_the_last_bit_of_its_sigmoid(M: int, H: int) -> None:
    check_swiglu("hopper", "cuda", M, H)


@pytest.mark.parametrize("H", [336, 8192, 14336])
def test_the_gradient_of_swiglu_written_over_dh_is_the_same_bits(H: int) -> None:
    y13, dh = (torch.randn(3000, n, device="cuda").bfloat16() for n in (2 * H, H))
    expected, over = kernel.dswiglu_rows(dh, y13), dh.clone()
    found = hopper.dswiglu_rows(over, y13)
    assert found[0].data_ptr() == over.data_ptr()
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


@products
@groups
def test_gemms_agree_with_float64(group: str, dtype: torch.dtype, accumulate: str, floor: float) -> None:
    check_gemm_rows("hopper", "cuda", *GROUPS[group], NK, dtype, accumulate, floor)
    check_gemm_wgrad("hopper", "cuda", *GROUPS[group], NK, dtype, accumulate, floor)


# a, b and dW; float32 and bfloat16: under autocast x is float32 where dY is bfloat16.
@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (BF16, BF16, FP32), (BF16, FP32, FP32), (FP32, FP32, FP32)])
@groups
def test_gemms_from_high_precision_agree_with_float64(group: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check_gemm_wgrad_hp("hopper", "cuda", *GROUPS[group], NK, dtypes)


def test_precise_accumulation_is_more_precise_over_a_long_contraction() -> None:
    sizes, K = [200, 56], 8192
    g = hopper.groups(offs_of(sizes, "cuda"), 256)
    q, s = hopper.quantize_rows(torch.rand(256, K, device="cuda"))  # one sign: sums grow, and what falls off grows too
    w = hopper.quantize_weight([torch.rand(2, 256, K, device="cuda")])
    expected = exact_rows(q, s, w.q, w.scale, sizes)
    fast, precise = (sqnr_db(expected, hopper.gemm_rows(q, s, w.q, w.scale, g, FP32, a)) for a in ("fast", "precise"))
    assert precise > fast + 6


def test_a_weight_gradient_over_many_tokens_can_be_summed_precisely() -> None:
    """Tokens with a mean, as real ones have: what falls off beyond 14 bits makes the sum of thousands too small."""
    sizes, T = [16000, 384], 16384
    g, rg = (b.groups(offs_of(sizes, "cuda"), T) for b in (hopper, reference))
    sides = [hopper.quantize_rows(torch.randn(T, n, device="cuda").bfloat16() + 1) for n in (128, 256)]
    expected = exact_wgrad(*(dequantized(reference.wgrad_operand(*side, rg), sizes) for side in sides), sizes)
    operands = [hopper.wgrad_operand(*side, g) for side in sides]
    fast, precise = (sqnr_db(expected, hopper.gemm_wgrad(*operands, g, FP32, a)) for a in ("fast", "precise_wgrad"))
    assert precise > 60
    assert precise > fast + 6
