"""A bias of grouped products: added to the rows of its expert, in every spelling, with its gradient."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight
from converters.group_bias import add_group_bias
from tests.helpers import GROUPS, offsets, poison_freed_memory, sqnr_db

N, K = 48, 64


def make_weight(experts: int) -> nn.Parameter:
    return nn.Parameter(FP8ExpertWeight(torch.randn(experts, N, K) * 0.02, Numerics()))


def expected(out: Tensor, bias: Tensor, sizes: tuple[int, ...], upstream: Tensor) -> tuple[Tensor, Tensor]:
    """A loop in float64: out with the bias of each group, and the gradient of bias [E, N] or [N]."""
    out, grad, begin = out.detach().double().clone(), torch.zeros(bias.shape, dtype=torch.float64), 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        out[rows] += (bias if bias.dim() == 1 else bias[e]).detach().double()
        (grad if bias.dim() == 1 else grad[e]).add_(upstream[rows].double().sum(0))
        begin += size
    return out, grad


@pytest.mark.parametrize("shared", [False, True], ids=["E_N", "N"])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("sizes", [*GROUPS.values(), (1, 1, 1, 1), (2, 0, 2, 0)], ids=str)
@pytest.mark.parametrize("function", [torch._grouped_mm, F.grouped_mm], ids=["_grouped_mm", "F.grouped_mm"])
def test_each_group_gets_its_own_row(function: Callable, sizes: tuple[int, ...], tail: int, shared: bool) -> None:
    """(1, 1, 1, 1) and (2, 0, 2, 0): as many rows as experts, so that a bias [E, N] would fit them row by row."""
    experts, rows = len(sizes), sum(sizes)
    x, upstream = torch.randn(rows + tail, K), torch.randn(rows + tail, N)
    x[rows:] = upstream[rows:] = torch.nan
    w, bias = make_weight(experts), nn.Parameter(torch.randn(N) if shared else torch.randn(experts, N))
    poison_freed_memory()
    plain = function(x, w.mT, offs=offsets(sizes))
    out = function(x, w.mT, offs=offsets(sizes), bias=bias)
    wanted, grad = expected(plain, bias, sizes, upstream)
    out.backward(upstream)
    torch.testing.assert_close(out.detach().double(), wanted, rtol=1e-6, atol=1e-6)
    assert not out[rows:].any()
    torch.testing.assert_close(bias.grad.double(), grad, rtol=1e-5, atol=1e-5)
    dw, w.grad = w.grad, None
    plain.backward(upstream)
    assert torch.equal(dw, w.grad)


@pytest.mark.parametrize("shape", [(3, N), (N,)])
@pytest.mark.parametrize("function", [torch._grouped_mm, F.grouped_mm], ids=["_grouped_mm", "F.grouped_mm"])
def test_three_dims_without_offs(function: Callable, shape: tuple[int, ...]) -> None:
    """As many rows of each expert as experts: a bias [E, N] would fit within each of them."""
    x, w, upstream = torch.randn(3, 3, K), make_weight(3), torch.randn(3, 3, N)
    bias = nn.Parameter(torch.randn(shape))
    out = function(x, w.mT, bias=bias)
    wanted = function(x, w.mT) + bias.expand(3, N)[:, None]
    out.backward(upstream)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(bias.grad, upstream.sum(1) if len(shape) == 2 else upstream.sum((0, 1)))


def test_bf16_rows_keep_their_dtype_and_the_gradient_is_summed_in_float32() -> None:
    """8192 rows of about one sign: a sum in bfloat16 stands still at 256."""
    sizes = (8000, 0, 192)
    x, w, upstream = torch.randn(8192, K).bfloat16(), make_weight(3), torch.rand(8192, N).bfloat16()
    bias = nn.Parameter(torch.randn(3, N))
    out = torch._grouped_mm(x, w.mT, offsets(sizes), bias=bias)
    out.backward(upstream)
    assert (out.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)
    assert sqnr_db(expected(out, bias, sizes, upstream)[1], bias.grad) > 100
    with torch.autocast("cpu", torch.bfloat16):
        assert torch._grouped_mm(x.float(), w.mT, offsets(sizes), bias=bias).dtype == torch.bfloat16
        assert F.linear(x.float(), w[0], bias[0]).dtype == torch.bfloat16
    asked = torch._grouped_mm(x, w.mT, offsets(sizes), bias=bias, out_dtype=torch.float32)
    plain = torch._grouped_mm(x, w.mT, offsets(sizes), out_dtype=torch.float32)
    assert torch.equal(asked, plain + bias.repeat_interleave(torch.tensor(sizes), 0))


@pytest.mark.parametrize("shape", [(12, N), (1, N), (12, 1), (N, 1), (), (1,), (3, N - 1), (1, 3, N)], ids=str)
@pytest.mark.parametrize("grouped", [True, False], ids=["offs", "3d"])
def test_any_other_bias_is_refused(shape: tuple[int, ...], grouped: bool) -> None:
    x, w = torch.randn(12, K), make_weight(3)
    rows, offs = (x, offsets((4, 4, 4))) if grouped else (x.view(3, 4, K), None)
    with pytest.raises(ValueError, match=r"takes a bias \[3, 48\], one row an expert, or \[48\]; got "):
        torch._grouped_mm(rows, w.mT, offs, bias=torch.randn(shape))
    with pytest.raises(ValueError, match=r"linear with an FP8 weight takes a bias \[48\]; got "):
        F.linear(x, w[0], torch.randn(shape))


def test_compiled_it_is_one_graph_for_any_groups() -> None:
    compiled = torch.compile(add_group_bias, fullgraph=True, backend="aot_eager", dynamic=False)
    for sizes in ((5, 0, 7), (0, 12, 0), (4, 4, 3)):
        out, upstream = torch.randn(12, N), torch.randn(12, N)
        bias = nn.Parameter(torch.randn(3, N))
        with torch._dynamo.config.patch(error_on_recompile=sizes != (5, 0, 7)):
            actual = compiled(out, bias, offsets(sizes), 3)
        wanted, grad = expected(out, bias, sizes, upstream)
        actual.backward(upstream)
        torch.testing.assert_close(actual.detach().double(), wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(bias.grad.double(), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_host() -> None:
    sizes = (4000, 0, 96, 1)
    out, upstream = (torch.randn(4100, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias, offs = nn.Parameter(torch.randn(4, N, device="cuda")), offsets(sizes).cuda()
    add_group_bias(out, bias, offs, 4).backward(upstream)  # what loads now waits
    bias.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = add_group_bias(out, bias, offs, 4)
        actual.backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted, grad = expected(out.cpu(), bias.cpu(), sizes, upstream.cpu())
    assert sqnr_db(wanted, actual.cpu()) > 45
    assert sqnr_db(grad, bias.grad.cpu()) > 100
