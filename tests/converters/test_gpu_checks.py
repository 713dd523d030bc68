"""The checks of the GPU tests, run on a CPU with the reference backend: they pass what is right and see what is not."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from converters.backends import reference
from converters.config import Numerics
from tests.converters import gpu_checks, hopper_checks, test_large_gpu
from tests.converters.followed import following
from tests.converters.gpu_checks import BF16, FP32, GROUPS, PRODUCTS, WAYS, experts_on, mlp_figures, run_mlp

CPU = ("reference", "cpu")
SMALL = {name: GROUPS[name] for name in ("unaligned", "all_on_one", "no_token")}
groups = pytest.mark.parametrize("group", SMALL)


@groups
def test_quantizers_and_products(group: str) -> None:
    hopper_checks.check_quantizers(*CPU, *SMALL[group], 48)
    for product in PRODUCTS:
        hopper_checks.check_gemm_rows(*CPU, *SMALL[group], (48, 32), *product)
        hopper_checks.check_gemm_wgrad(*CPU, *SMALL[group], (48, 32), *product)
    for dtypes in ((BF16, BF16, BF16), (BF16, FP32, FP32), (FP32, FP32, FP32)):
        hopper_checks.check_gemm_wgrad_hp(*CPU, *SMALL[group], (48, 32), dtypes)


def test_weights_and_swiglu() -> None:
    hopper_checks.check_weights(*CPU, 5, (48, 16), 32, BF16)
    hopper_checks.check_swiglu(*CPU, 20, 48)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_mlp_and_grouped_mm(way: tuple[str, str]) -> None:
    n = Numerics(wgrad=way[0], accumulate=way[1])
    hopper_checks.check_mlp(*CPU, *SMALL["unaligned"], way, FP32)
    hopper_checks.check_changed_weights(*CPU, n, BF16)
    hopper_checks.check_grouped_mm(*CPU, *SMALL["unaligned"], n, FP32)


@pytest.mark.parametrize("group", [([0, 0], 48), ([2, 0, 2, 0], 4), ([0, 2, 0, 1], 4)], ids=str)
def test_grouped_mm_of_few_rows(group: tuple[list[int], int]) -> None:
    hopper_checks.check_grouped_mm(*CPU, *group, Numerics(), BF16)


def test_large() -> None:
    test_large_gpu.check_large_weight(*CPU, [16, 16, 0, 20], 48, 32)
    for dtype in (BF16, FP32):
        test_large_gpu.check_large_gradient(*CPU, [16, 16, 0, 20], 48, 32, dtype)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5), spare=st.integers(0, 20), way=st.sampled_from(WAYS))
def test_every_step_is_followed(sizes: list[int], spare: int, way: tuple[str, str]) -> None:
    e = experts_on("cpu", sizes, sum(sizes) + spare, FP32, 32, 48)
    with following("reference") as steps:
        mlp_figures(e, run_mlp(e, Numerics(wgrad=way[0], accumulate=way[1], cache=False)))
    assert steps["gemm_rows"] == 4
    assert steps["gemm_wgrad_hp" if way[0] == "bf16" else "gemm_wgrad"] == 3


def _noisy(name: str, db: float) -> SimpleNamespace:
    """The reference with noise in what `name` gives first, or gives."""

    def wrong(*args: object, **kwargs: object) -> object:
        found = getattr(reference, name)(*args, **kwargs)
        t = found[0].float() if isinstance(found, tuple) else found
        t = (t + torch.randn_like(t) * t.norm() / math.sqrt(t.numel()) * 10 ** (-db / 20)).to(
            found[0].dtype if isinstance(found, tuple) else t.dtype
        )
        return (t, *found[1:]) if isinstance(found, tuple) else t

    return SimpleNamespace(**(vars(reference) | {name: wrong}))


@pytest.mark.parametrize(
    ("name", "db"),
    [("quantize_rows", 40), ("swiglu_rows", 40), ("dswiglu_rows", 40), ("gemm_rows", 40), ("gemm_wgrad", 50)],
)
def test_a_wrong_step_is_seen_where_the_whole_passes(name: str, db: float) -> None:
    e, n = experts_on("cpu", *SMALL["unaligned"], FP32, 32, 48), Numerics(cache=False)
    with pytest.raises(AssertionError, match=name if "swiglu" not in name else "cast"), following(_noisy(name, db)):
        run_mlp(e, n)


def test_wrong_bytes_are_seen() -> None:
    y13 = torch.randn(20, 96).bfloat16()
    q, s = reference.swiglu_rows(y13)
    for wrong in ((q.view(torch.uint8) ^ 1).view(q.dtype), q.roll(1, 1)):
        with pytest.raises(AssertionError, match="cast"):
            gpu_checks.swiglu_undecided((wrong, s), y13)
    with pytest.raises(AssertionError, match="scale"):
        gpu_checks.swiglu_undecided((q, s * 2), y13)
    assert gpu_checks.same(torch.tensor([math.nan, 1]), torch.tensor([math.nan, 1]))
    assert not gpu_checks.same(torch.tensor([math.nan, 1]), torch.tensor([1, math.nan]))


def test_rows_of_nobody_are_seen() -> None:
    e = experts_on("cpu", *SMALL["unaligned"], FP32, 32, 48)
    found = run_mlp(e, Numerics())
    mlp_figures(e, found)
    for name, row, why in (("out", 99, "rows of nobody"), ("x", 70, "rows of nobody"), ("w2", 3, "without a token")):
        wrong = found[name].clone()
        wrong[row] = 1
        with pytest.raises(AssertionError, match=why):
            mlp_figures(e, found | {name: wrong})
    with pytest.raises(AssertionError, match="not finite"):
        mlp_figures(e, found | {"out": found["out"] * math.nan})
    assert min(mlp_figures(replace(e, w1=-e.w1), found).values()) < 10


def test_zeros_past_the_end_are_bits_of_the_operand() -> None:
    """hopper's layout by hand: two groups of 1 and 2 rows, tiles 0 and 1."""
    q = torch.zeros(16, 256, dtype=torch.uint8)
    q[:, 0], q[:, 128], q[:, 129] = 1, 2, 3
    spans = torch.tensor([[0, 1, 0, 0], [1, 3, 1, 0], [3, 3, 2, 0]], dtype=torch.int32)
    made = SimpleNamespace(q=q.view(torch.float8_e4m3fn), scale=torch.ones(2, 16, dtype=BF16))
    found: Tensor = gpu_checks.operand_rows(made, SimpleNamespace(M=4, spans=spans)).q.view(torch.uint8)
    assert found[:, 5].tolist() == [1, 2, 3, 0]
    q[3, 130] = 1
    with pytest.raises(AssertionError, match="padding"):
        gpu_checks.operand_rows(made, SimpleNamespace(M=4, spans=spans))
