"""Linear layers and dense SwiGLU MLPs in FP8: against float64, against experts of one group, and what they keep."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters import weight_cache
from converters.dense_linear import dense_linear
from converters.dense_mlp import dense_mlp
from converters.expert_mlp import expert_mlp
from converters.linear_weight import FP8LinearWeight
from converters.numerics import Numerics
from parallel.wrapped_weight import plain
from tests.converters.test_weight_cache import optimizer_step
from tests.helpers import exact_mlp, make_experts, sqnr_db

K, NS = 64, (64, 32, 32)  # wq, wk, wv of an attention with half as many heads of keys and values
NUMERICS = Numerics()
# One GEMM of two E4M3 operands of 31.5 dB: 28.5 dB.
GEMM_DB, MLP_DB = 28.0, 23.0


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    weight_cache.clear()
    yield
    weight_cache.clear()


def weights(wrapped: bool = True, **numerics: Any) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.randn(N, K) * 0.02 for N in NS]
    return [nn.Parameter(FP8LinearWeight(w, Numerics(**numerics)) if wrapped else w) for w in made]


def run(x: Tensor, ws: list[Tensor], upstreams: list[Tensor], numerics: Numerics = NUMERICS) -> list[Tensor]:
    """Outputs, gradient of x, gradients of the weights."""
    leaf = x.clone().requires_grad_()
    outs = dense_linear(leaf, ws, numerics)
    grads = torch.autograd.grad(outs, [leaf, *ws], upstreams)
    return [*(o.detach() for o in outs), *grads]


def exact(x: Tensor, ws: list[Tensor], upstreams: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, *map(plain, ws))]
    outs = [leaves[0] @ w.t() for w in leaves[1:]]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, [u.double() for u in upstreams])]


def case(*shape: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    return torch.randn(*shape, K), [torch.randn(*shape, N) for N in NS]


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns", "bf16"])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("shape", [(60,), (3, 20), (2, 3, 10)], ids=["2d", "3d", "4d"])
def test_joined_projections_against_float64(shape: tuple[int, ...], wrapped: bool, wgrad: str) -> None:
    x, upstreams = case(*shape)
    ws = weights(wrapped, wgrad=wgrad)
    results = run(x, ws, upstreams, Numerics(wgrad=wgrad))
    for wanted, got in zip(exact(x, ws, upstreams), results, strict=True):
        assert got.shape == wanted.shape
        assert sqnr_db(wanted, got) > GEMM_DB


def test_joined_equals_one_by_one_but_for_the_sum_of_input_gradients() -> None:
    """With one scale over all weights; weights of one size have that anyway."""
    x, upstreams = case(3, 20)
    ws = weights()
    for w in ws:
        with torch.no_grad():
            w[0, 0] = 0.1  # one amax
    together = run(x, ws, upstreams)
    alone = [run(x, [w], [u]) for w, u in zip(ws, upstreams, strict=True)]
    for i, (out, _, dw) in enumerate(alone):
        assert torch.equal(together[i], out)
        assert sqnr_db(dw, together[len(ws) + 1 + i]) > 35  # the joined gradient has one scale a row
    assert sqnr_db(sum(a[1] for a in alone), together[len(ws)]) > GEMM_DB


def test_gradients_of_joined_weights_are_contiguous_views_of_one_tensor() -> None:
    """Anything else autograd would copy before it accumulates."""
    x, upstreams = case(60)
    ws = weights()
    torch.autograd.backward(dense_linear(x, ws, NUMERICS), upstreams)
    assert all(w.grad.is_contiguous() and w.grad.shape == w.shape for w in ws)
    assert len({w.grad.untyped_storage().data_ptr() for w in ws}) == 1


def test_outputs_are_not_views_of_one_tensor() -> None:
    """Attention saves v for its backward: a view would keep the space of q and k too."""
    x, _ = case(60)
    outs = dense_linear(x, weights(), NUMERICS)
    assert [o.untyped_storage().nbytes() for o in outs] == [60 * N * 4 for N in NS]


def test_an_output_that_nobody_uses_has_no_gradient() -> None:
    x, upstreams = case(60)
    ws = weights()
    q, _, v = dense_linear(x, ws, NUMERICS)
    torch.autograd.backward([q, v], [upstreams[0], upstreams[2]])
    assert not ws[1].grad.any()
    assert ws[0].grad.any()
    assert ws[2].grad.any()


@pytest.mark.parametrize("shape", [(0,), (0, 20), (3, 0)], ids=str)
def test_no_token(shape: tuple[int, ...]) -> None:
    x, upstreams = case(*shape)
    *outs, dx, d1, d2, d3 = run(x, weights(), upstreams)
    assert [o.shape for o in outs] == [(*shape, N) for N in NS]
    assert dx.shape == x.shape
    assert not any(d.any() for d in (d1, d2, d3))
    w1, w2, w3 = (nn.Parameter(torch.randn(s)) for s in ((96, K), (K, 96), (96, K)))
    out = dense_mlp(x, w1, w2, w3, NUMERICS)
    out.backward(torch.randn_like(out))
    assert out.shape == x.shape
    assert not any(w.grad.any() for w in (w1, w2, w3))


def test_a_dense_mlp_is_an_expert_alone() -> None:
    """Bit for bit the op of the experts, and as close to float64."""
    experts = make_experts((70,))
    x = experts.x.clone().requires_grad_()
    stacked = [nn.Parameter(w.clone()) for w in (experts.w1, experts.w2, experts.w3)]
    dense = [nn.Parameter(FP8LinearWeight(w[0].clone(), NUMERICS)) for w in stacked]
    one, other = expert_mlp(x, *stacked, experts.offs, NUMERICS), dense_mlp(x.view(7, 10, -1), *dense, NUMERICS)
    assert torch.equal(one, other.view_as(one))
    grads = torch.autograd.grad(one, [x, *stacked], experts.upstream)
    others = torch.autograd.grad(other, [x, *dense], experts.upstream.view_as(other))
    for name, a, b in zip(("out", "x", "w1", "w2", "w3"), (one, *grads), (other, *others), strict=True):
        assert torch.equal(a.view_as(b), b), name
        assert sqnr_db(exact_mlp(experts)[name].view_as(b), b) > MLP_DB, name


def test_linear_of_the_parameter_is_the_same_op() -> None:
    x, upstreams = case(60)
    w, bias = weights()[0], torch.randn(NS[0])
    out = F.linear(x, w, bias)
    assert torch.equal(out, dense_linear(x, [w], NUMERICS)[0] + bias)
    (dw,) = torch.autograd.grad(out, w, upstreams[0])
    assert torch.equal(dw, run(x, [w], upstreams[:1])[2])
    assert sqnr_db(out, x @ w.t() + bias) == float("inf")  # a view of it: the same product, not cached


def test_weights_are_quantized_once_a_version() -> None:
    x, upstreams = case(60)
    ws = weights()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        quantize = weight_cache.quantize
        patch.setattr(weight_cache, "quantize", lambda *a, **k: made.append(1) or quantize(*a, **k))
        first = run(x, ws, upstreams)
        assert all(map(torch.equal, first, run(x, ws, upstreams)))
        assert len(made) == 1
        optimizer_step()(ws[1])
        changed = run(x, ws, upstreams)
        assert len(made) == 2
    assert not torch.equal(first[1], changed[1])
    weight_cache.clear()
    assert all(map(torch.equal, changed, run(x, ws, upstreams)))


def test_autocast_gives_its_dtype_and_gradients_of_the_weights_dtype() -> None:
    x, upstreams = case(60)
    ws = weights()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = dense_linear(leaf, ws, NUMERICS)
    assert {o.dtype for o in outs} == {torch.bfloat16}
    torch.autograd.backward(outs, [u.bfloat16() for u in upstreams])
    assert leaf.grad.dtype == torch.float32
    assert {w.grad.dtype for w in ws} == {torch.float32}


def test_saved_for_backward_are_x_in_fp8_and_its_scales() -> None:
    saved: list[Tensor] = []
    x, _ = case(60)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dense_linear(x.requires_grad_(), weights(), NUMERICS)
    sizes = {(t.dtype, tuple(t.shape)) for t in saved if not isinstance(t, FP8LinearWeight)}
    assert sizes == {(torch.float8_e4m3fn, (60, K)), (torch.float32, (60,))}


@pytest.mark.parametrize("shapes", [((60, 32), (64, 64)), ((60, 64), (1, 64, 64))], ids=str)
def test_shapes_that_do_not_belong_together(shapes: tuple) -> None:
    with pytest.raises(ValueError, match=r"dense_linear takes x \[\.\.\., K\] and weights \[N, K\]; got"):
        dense_linear(torch.randn(shapes[0]), [torch.randn(shapes[1])], NUMERICS)
    with pytest.raises(ValueError, match=r"dense_mlp takes x \[\.\.\., D\]"):
        dense_mlp(torch.randn(4, 32), *(torch.randn(64, 64) for _ in range(3)), NUMERICS)
