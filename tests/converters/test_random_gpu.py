"""Random groups and shapes on a GPU. Memory is poisoned before each example, and a seed makes its numbers its own.

What a kernel compiles for stays few: widths of a GEMM are no constants of its kernel, those of a quantizer are, as the
next power of two, so they come from short lists.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from converters import weight_cache
from converters.config import Numerics
from tests.conftest import SEED
from tests.converters.followed import following
from tests.converters.gpu_checks import BF16, FP32, PRODUCTS, WAYS, Sizes, experts_on, mlp_figures, poison, run_mlp
from tests.converters.hopper_checks import (
    check_gemm_rows,
    check_gemm_wgrad,
    check_gemm_wgrad_hp,
    check_quantizers,
    check_weights,
)

pytestmark = pytest.mark.gpu(capability=(9, 0))

SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=12)
SPARE = st.integers(0, 200)
WIDTHS = st.tuples(*[st.integers(1, 40).map(lambda n: 16 * n)] * 2)
# A tiny tensor's dB scatter: those of its few values. Into bfloat16 one row of 16 has given 46.
RELAXED = [(dtype, accumulate, floor - 3) for dtype, accumulate, floor in PRODUCTS]


def examples(most: int) -> settings:
    return settings(max_examples=most, deadline=None, derandomize=True)


@examples(40)
@given(sizes=SIZES, spare=SPARE, width=WIDTHS, product=st.sampled_from(RELAXED))
def test_random_gemms_of_rows(sizes: Sizes, spare: int, width: tuple[int, int], product: tuple) -> None:
    torch.manual_seed(SEED)
    check_gemm_rows("hopper", "cuda", sizes, sum(sizes) + spare, width, *product)


@examples(40)
@given(sizes=SIZES, spare=SPARE, width=WIDTHS, product=st.sampled_from(RELAXED))
def test_random_weight_gradients(sizes: Sizes, spare: int, width: tuple[int, int], product: tuple) -> None:
    torch.manual_seed(SEED)
    check_gemm_wgrad("hopper", "cuda", sizes, sum(sizes) + spare, width, *product)


@examples(20)
@given(sizes=SIZES, spare=SPARE, width=WIDTHS, out=st.sampled_from([BF16, FP32]))
def test_random_weight_gradients_from_high_precision(
    sizes: Sizes, spare: int, width: tuple[int, int], out: torch.dtype
) -> None:
    torch.manual_seed(SEED)
    check_gemm_wgrad_hp("hopper", "cuda", sizes, sum(sizes) + spare, width, (BF16, BF16, out))


@examples(20)
@given(sizes=SIZES, spare=SPARE, D=st.sampled_from((16, 208, 640, 1040)))
def test_random_quantizers(sizes: Sizes, spare: int, D: int) -> None:
    torch.manual_seed(SEED)
    check_quantizers("hopper", "cuda", sizes, sum(sizes) + spare, D)


@examples(15)
@given(E=st.integers(1, 12), width=WIDTHS, second=st.integers(0, 9), dtype=st.sampled_from([BF16, FP32]))
def test_random_weights(E: int, width: tuple[int, int], second: int, dtype: torch.dtype) -> None:
    torch.manual_seed(SEED)
    Ns = (width[0], 16 * second) if second else (width[0],)
    check_weights("hopper", "cuda", E, Ns, width[1], dtype)


@examples(25)
@given(
    sizes=SIZES,
    spare=SPARE,
    way=st.sampled_from(WAYS),
    weights=st.sampled_from([BF16, FP32]),
    D=st.sampled_from((16, 208, 384)),
    H=st.sampled_from((16, 176, 336)),
)
@example(sizes=[1], spare=0, way=WAYS[0], weights=BF16, D=16, H=16)
def test_random_mlps(sizes: Sizes, spare: int, way: tuple[str, str], weights: torch.dtype, D: int, H: int) -> None:
    """Each step is held against its twin; the whole against float64 where there are enough numbers to average."""
    weight_cache.clear()
    n = replace(Numerics(backend="hopper"), wgrad=way[0], accumulate=way[1])
    e = experts_on("cuda", sizes, sum(sizes) + spare, weights, D, H)
    poison("cuda")
    with following("hopper"):
        db = mlp_figures(e, run_mlp(e, n))
    if sum(sizes) >= 32:
        assert min(db.values()) > 20, db
