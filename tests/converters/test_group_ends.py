"""Group ends that do not fit the rows: an error on a CPU, in every way in. Slicing alone would leave rows out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from converters.sequential_experts import sequential_mlp

E, M, D, H = 3, 12, 32, 48
NUMERICS = {
    "tokenwise": Numerics(),
    "rowwise": Numerics(recipe="rowwise"),
    "emulated": Numerics(recipe="tensorwise", backend="emulated"),
}
Product = Callable[[Tensor, Tensor, Numerics], Tensor]


def one_gemm(x: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    return grouped_mm(x, (torch.randn(E, H, D) * 0.02).transpose(1, 2), offs, numerics)


def in_a_module(x: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    w = nn.Parameter(FP8ExpertWeight(torch.randn(E, H, D) * 0.02, numerics))
    return torch._grouped_mm(x, w.mT, offs, bias=torch.randn(E, H))


def mlp(x: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    return expert_mlp(x, torch.randn(E, H, D), torch.randn(E, D, H), torch.randn(E, H, D), offs, numerics)


def one_by_one(x: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    return sequential_mlp(x, torch.randn(E, H, D), torch.randn(E, D, H), torch.randn(E, H, D), offs, numerics)


def compiled(x: Tensor, offs: Tensor, numerics: Numerics) -> Tensor:
    return torch.compile(one_gemm, backend="aot_eager")(x, offs, numerics)


WAYS = {f.__name__: f for f in (one_gemm, in_a_module, mlp, one_by_one, compiled)}


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("product", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ends", [(4, 8, 13), (8, 4, 12), (-1, 4, 12), (4, 12, 8), (0, 0, 1000)], ids=str)
def test_ends_that_are_none(ends: tuple[int, ...], product: Product, numerics: Numerics) -> None:
    with pytest.raises(ValueError, match=rf"ends of groups in 12 rows.* to 12 at most; got \[{ends[0]}, {ends[1]}"):
        product(torch.randn(M, D), torch.tensor(ends, dtype=torch.int32), numerics)


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("product", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    "ends", [(2**32 + 4, 8, 12), (4, 2**32 + 8, 12), (4, 8, 2**32 + 12), (-(2**32), 4, 12), (4, 8, 2**62)], ids=str
)
def test_ends_beyond_int32_do_not_wrap(ends: tuple[int, ...], product: Product, numerics: Numerics) -> None:
    with pytest.raises(ValueError, match=r"ends of groups in 12 rows.*; got \["):
        product(torch.randn(M, D), torch.tensor(ends), numerics)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64], ids=str)
def test_unsigned_ends(dtype: torch.dtype) -> None:
    x, ends = torch.randn(M, D), torch.tensor((4, 8, 12))
    torch.manual_seed(0)
    wanted = mlp(x, ends, Numerics())
    torch.manual_seed(0)
    assert torch.equal(mlp(x, ends.to(dtype), Numerics()), wanted)
    with pytest.raises(ValueError, match="ends of groups in 12 rows"):
        mlp(x, torch.tensor((2**31 + 4, 8, 12)).to(dtype), Numerics())


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("product", [one_gemm, mlp])
def test_no_rows_and_groups_of_some(product: Product, numerics: Numerics) -> None:
    with pytest.raises(ValueError, match=r"groups in 0 rows.*got \[0, 0, 1\]"):
        product(torch.randn(0, D), torch.tensor([0, 0, 1]), numerics)


@pytest.mark.parametrize("product", [one_gemm, in_a_module, mlp, one_by_one])
def test_ends_that_are_no_numbers_of_rows(product: Product) -> None:
    for offs in (torch.tensor([4.0, 8.0, 12.5]), torch.tensor([False, True, True])):
        with pytest.raises(ValueError, match=r"offs are whole numbers on the rows' device, cpu; got (float32|bool) on"):
            product(torch.randn(M, D), offs, Numerics())
    with pytest.raises(ValueError, match="cpu; got int32 on meta"):
        product(torch.randn(M, D), torch.zeros(E, dtype=torch.int32, device="meta"), Numerics())


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("product", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ends", [(4, 8, 12), (0, 0, 0), (4, 4, 7), (12, 12, 12)], ids=str)
def test_ends_that_leave_rows_to_nobody_are_fine(ends: tuple[int, ...], product: Product, numerics: Numerics) -> None:
    out = product(torch.randn(M, D), torch.tensor(ends), numerics)
    assert out.isfinite().all()
    assert not out[ends[-1] :].any()
