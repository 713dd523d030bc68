"""Products with a wrapped weight: each spelling runs in FP8, forward and backward, and none falls back in silence."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from tests.helpers import offsets, poison_freed_memory, sqnr_db

E, M, N, K = 3, 32, 48, 64  # experts, rows of each, and a weight [E, N, K]
OFFS = offsets((M,) * E)
RECIPES = pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])


def make_weight(numerics: Numerics | None = None, shape: tuple[int, ...] = (E, N, K)) -> nn.Parameter:
    return nn.Parameter(FP8ExpertWeight(torch.randn(shape) * 0.02, numerics or Numerics()))


def run(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output and both gradients of product(x, w)."""
    x, w = x.detach().clone().requires_grad_(), w.detach().requires_grad_()
    out = product(x, w)
    out.backward(upstream.reshape(out.shape))
    return [out.detach().reshape(-1, N), x.grad.reshape(-1, K), w.grad]


# product(x [E * M, K], w [E, N, K]); all of them are the same E products.
SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "_grouped_mm_positional_offs": lambda x, w: torch._grouped_mm(x, w.transpose(-2, -1), OFFS),
    "_grouped_mm_keyword_offs": lambda x, w: torch._grouped_mm(x, w.mT, offs=OFFS),
    "_grouped_mm_keywords": lambda x, w: torch._grouped_mm(input=x, mat2=w.transpose(1, 2), offs=OFFS),
    "_grouped_mm_out_dtype": lambda x, w: torch._grouped_mm(x, w.mT, offs=OFFS, out_dtype=torch.float32),
    "F.grouped_mm": lambda x, w: F.grouped_mm(x, w.mT, offs=OFFS),
    "F.grouped_mm_keywords": lambda x, w: F.grouped_mm(mat_a=x, mat_b=w.permute(0, 2, 1), offs=OFFS),
    "_grouped_mm_3d": lambda x, w: torch._grouped_mm(x.view(E, M, K), w.transpose(-2, -1)),
    "F.grouped_mm_3d": lambda x, w: F.grouped_mm(x.view(E, M, K), w.mT),
    "bmm": lambda x, w: torch.bmm(x.view(E, M, K), w.mT),
    "bmm_keywords": lambda x, w: torch.bmm(input=x.view(E, M, K), mat2=w.mT),
    "Tensor.bmm": lambda x, w: x.view(E, M, K).bmm(w.mT),
    "matmul_3d": lambda x, w: torch.matmul(x.view(E, M, K), w.mT),
    "@_3d": lambda x, w: x.view(E, M, K) @ w.mT,
    "@_each": lambda x, w: torch.cat([r @ w[e].t() for e, r in enumerate(x.split(M))]),
    "@_unbind": lambda x, w: torch.cat([r @ we.T for r, we in zip(x.split(M), w.unbind(0), strict=True)]),
    "@_slices": lambda x, w: torch.cat([r @ w[e : e + 1].squeeze(0).mT for e, r in enumerate(x.split(M))]),
    "matmul_each": lambda x, w: torch.cat([torch.matmul(r, w[e].transpose(0, 1)) for e, r in enumerate(x.split(M))]),
    "Tensor.matmul_each": lambda x, w: torch.cat([r.matmul(w[e].mT) for e, r in enumerate(x.split(M))]),
    "mm_each": lambda x, w: torch.cat([torch.mm(r, w[e].t()) for e, r in enumerate(x.split(M))]),
    "Tensor.mm_each": lambda x, w: torch.cat([r.mm(w[e].t()) for e, r in enumerate(x.split(M))]),
    "linear_each": lambda x, w: torch.cat([F.linear(r, w[e]) for e, r in enumerate(x.split(M))]),
    "linear_of_batches": lambda x, w: torch.cat([F.linear(r.view(4, -1, K), w[e]) for e, r in enumerate(x.split(M))]),
    "halves_joined": lambda x, w: torch._grouped_mm(x, torch.cat(w.chunk(2, dim=1), dim=1).mT, OFFS),
    "stacked": lambda x, w: torch._grouped_mm(x, torch.stack([w[e] for e in range(E)]).mT, OFFS),
    "gathered_by_index": lambda x, w: torch.bmm(x.view(E, M, K), w[torch.arange(E)].mT),
    "index_select": lambda x, w: torch.bmm(x.view(E, M, K), w.index_select(0, torch.arange(E)).mT),
    "contiguous": lambda x, w: torch._grouped_mm(x, w.mT.contiguous(), OFFS),
    "reshaped": lambda x, w: torch._grouped_mm(x, w.reshape(E * N, K).view(E, N, K).mT, OFFS),
    "detour_over_float64": lambda x, w: torch._grouped_mm(x, w.double().float().mT, OFFS),
}


@RECIPES
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_case_05_every_spelling_gives_the_same_fp8_result(spelling: str, recipe: str) -> None:
    numerics = Numerics(recipe=recipe)
    x, w, upstream = torch.randn(E * M, K), make_weight(numerics), torch.randn(E * M, N)
    wanted = run(lambda x, w: grouped_mm(x, w.transpose(1, 2), OFFS, numerics), x, w, upstream)
    actual = run(SPELLINGS[spelling], x, w, upstream)
    for name, a, b in zip(("out", "dx", "dw"), wanted, actual, strict=True):
        assert type(b) is Tensor
        assert torch.equal(a, b), f"{name}: {sqnr_db(a, b):.1f} dB"


@RECIPES
def test_case_05_the_result_is_fp8_and_not_bf16_in_silence(recipe: str) -> None:
    x, upstream, w = torch.randn(E * M, K), torch.randn(E * M, N), make_weight(Numerics(recipe=recipe))
    spelled = lambda x, w: torch._grouped_mm(x, w.mT, OFFS)  # noqa: E731
    exact = run(lambda x, w: (x.view(E, M, K) @ w.mT).view(-1, N), x.double(), w._data.double(), upstream.double())
    for a, b in zip(exact, run(spelled, x, w, upstream), strict=True):
        assert 27 < sqnr_db(a, b) < 30  # two E4M3 operands of 31.5 dB each: 28.5


@RECIPES
@pytest.mark.parametrize("function", [torch._grouped_mm, F.grouped_mm], ids=["_grouped_mm", "F.grouped_mm"])
def test_case_04_grouped_mm_of_three_dims_without_offs(function: Callable, recipe: str) -> None:
    x, w, upstream = torch.randn(E, M, K), make_weight(Numerics(recipe=recipe)), torch.randn(E, M, N)
    fp8 = run(lambda x, w: function(x, w.mT), x, w, upstream)
    plain = run(lambda x, w: function(x, w.mT), x.bfloat16(), w._data.bfloat16(), upstream.bfloat16())
    for a, b in zip(plain, fp8, strict=True):
        assert isinstance(b, Tensor)
        assert 27 < sqnr_db(a, b) < 30


@RECIPES
def test_case_05_weights_stored_the_other_way_round(recipe: str) -> None:
    """[E, in, out], as transformers' Llama4 has it: x @ w without a transpose. Square, so that shapes cannot tell."""
    numerics = Numerics(recipe=recipe)
    w, x, upstream = torch.randn(E, K, K) * 0.02, torch.randn(E, M, K), torch.randn(E, M, K)
    stored = nn.Parameter(FP8ExpertWeight(w.clone(), numerics))
    usual = nn.Parameter(FP8ExpertWeight(w.transpose(1, 2).contiguous(), numerics))
    for _ in range(2):  # the second time from what the first has cached
        a, b, other = torch.bmm(x, stored), torch.bmm(x, usual.mT), torch.bmm(x, stored.mT)
        assert torch.equal(a, b)
        assert sqnr_db(x @ w.mT, other) > 27
    (da,), (db,) = (torch.autograd.grad(y, p, upstream) for y, p in ((a, stored), (b, usual)))
    assert torch.equal(da, db.mT)


def test_bias_and_out_dtype() -> None:
    x, w, bias = torch.randn(M, K), make_weight(), torch.randn(N)
    assert torch.equal(F.linear(x, w[0], bias), F.linear(x, w[0]) + bias)
    assert torch._grouped_mm(x.bfloat16(), w.mT, offsets((8, 8, 16)), out_dtype=torch.float32).dtype == torch.float32


def test_bf16_activations_and_weights_as_torchtitan_casts_them() -> None:
    """x.bfloat16(), w.bfloat16(): the wrapper survives the cast, and the parameter's gradient is its own dtype."""
    x, w, upstream = torch.randn(E * M, K), make_weight(), torch.randn(E * M, N).bfloat16()
    out, dx, dw = run(lambda x, w: torch._grouped_mm(x.bfloat16(), w.bfloat16().mT, OFFS), x, w, upstream)
    assert (out.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert 27 < sqnr_db((x.view(E, M, K).double() @ w._data.mT.double()).view(-1, N), out) < 30


def test_one_row_without_a_batch_dim() -> None:
    x, w = torch.randn(K), make_weight()
    assert torch.equal(x @ w[1].t(), (x[None] @ w[1].t())[0])
    assert torch.equal(F.linear(x, w[1]), F.linear(x[None], w[1])[0])


@RECIPES
@given(sizes=st.lists(st.integers(0, 19), min_size=1, max_size=5).map(tuple), tail=st.integers(0, 5))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_groups(recipe: str, sizes: tuple[int, ...], tail: int) -> None:
    """Against float64; rows of nobody (nan) and empty experts give exact zeros."""
    rows, numerics = sum(sizes), Numerics(recipe=recipe)
    x, upstream = torch.randn(rows + tail, K), torch.randn(rows + tail, N)
    x[rows:] = upstream[rows:] = torch.nan
    w = make_weight(numerics, (len(sizes), N, K))
    poison_freed_memory()
    out, dx, dw = run(lambda x, w: torch._grouped_mm(x, w.mT, offsets(sizes)), x, w, upstream)
    assert not out[rows:].any()
    assert not dx[rows:].any()
    groups = zip(*(t[:rows].double().split(sizes) for t in (x, upstream, out, dx)), strict=True)
    for e, (xe, ge, ye, dxe) in enumerate(groups):
        if sizes[e] == 0:
            assert not dw[e].any()
            continue
        weight = w._data[e].double()
        for wanted, got in ((xe @ weight.t(), ye), (ge @ weight, dxe), (ge.t() @ xe, dw[e])):
            assert sqnr_db(wanted, got) > 25


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "weight_left": (lambda x, w: w[0] @ x.t(), "must be the right operand"),
    "weight_left_grouped": (lambda x, w: torch._grouped_mm(w, x.view(E, M, K).mT), "must be the right operand"),
    "weight_left_linear": (lambda x, w: F.linear(w[0], x), "must be the right operand"),
    "two_weights": (lambda x, w: w @ w.mT, "must be the right operand"),
    "einsum": (lambda x, w: torch.einsum("emk,enk->emn", x.view(E, M, K), w), "so that it runs in FP8"),
    "tensordot": (lambda x, w: torch.tensordot(x, w[0], dims=([1], [1])), "so that it runs in FP8"),
    "inner": (lambda x, w: torch.inner(x, w[0]), "so that it runs in FP8"),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(N), x, w[0].t()), "so that it runs in FP8"),
    "baddbmm": (lambda x, w: torch.baddbmm(torch.zeros(E, 1, N), x.view(E, M, K), w.mT), "so that it runs in FP8"),
    "addbmm": (lambda x, w: torch.addbmm(torch.zeros(M, N), x.view(E, M, K), w.mT), "so that it runs in FP8"),
    "mv": (lambda x, w: torch.mv(w[0], x[0]), "so that it runs in FP8"),
    "addmv": (lambda x, w: torch.addmv(torch.zeros(N), w[0], x[0]), "so that it runs in FP8"),
    "dot": (lambda x, w: torch.dot(x[0], w[0, 0]), "so that it runs in FP8"),
    "conv1d": (lambda x, w: F.conv1d(torch.zeros(1, N, K), w), "so that it runs in FP8"),
    "aten_op": (lambda x, w: torch.ops.aten.mm.default(x, w[0].t()), "so that it runs in FP8"),
    "matmul_broadcast": (lambda x, w: x.view(1, E, M, K) @ w.mT, "matmul with an FP8 weight takes"),
    "grouped_2d_2d": (lambda x, w: torch._grouped_mm(x.t(), w[0], OFFS), "takes A"),
    "grouped_wrong_experts": (
        lambda x, w: torch._grouped_mm(x, w.mT, OFFS[:2]),
        r"got \(96, 64\), \(3, 64, 48\) and \(2,\)",
    ),
    "bmm_wrong_experts": (lambda x, w: torch.bmm(x.view(1, -1, K), w.mT), r"got \(1, 96, 64\) and \(3, 64, 48\)"),
}


@pytest.mark.parametrize("spelling", REFUSED)
def test_what_cannot_run_in_fp8_is_refused_and_never_computed_otherwise(spelling: str) -> None:
    product, message = REFUSED[spelling]
    with pytest.raises((NotImplementedError, ValueError), match=message):
        product(torch.randn(E * M, K), make_weight())
