"""One grouped product on a GPU, with and without a bias: against float64, and with no wait for the host."""

import pytest
import torch

from converters import weight_cache
from converters.config import Numerics
from tests.converters.gpu_checks import BF16, FP32, GROUPS, WAYS, poison
from tests.converters.hopper_checks import check_grouped_mm

pytestmark = pytest.mark.gpu(capability=(9, 0))

# As many rows as experts: a bias [E, N] would fit them row by row.
AS_MANY_ROWS = {"one_each": ([1, 1, 1, 1], 4), "two_or_none": ([2, 0, 2, 0], 4), "with_a_tail": ([0, 2, 0, 1], 4)}
ALL = GROUPS | AS_MANY_ROWS


@pytest.fixture(autouse=True)
def poisoned() -> None:
    weight_cache.clear()
    poison("cuda")


@pytest.mark.parametrize("weights", [BF16, FP32])
@pytest.mark.parametrize("group", ALL)
def test_grouped_mm_and_bias(group: str, weights: torch.dtype) -> None:
    check_grouped_mm("hopper", "cuda", *ALL[group], Numerics(), weights)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_grouped_mm_in_each_way(way: tuple[str, str]) -> None:
    n = Numerics(wgrad=way[0], accumulate=way[1])
    check_grouped_mm("hopper", "cuda", *GROUPS["unaligned"], n, FP32)
