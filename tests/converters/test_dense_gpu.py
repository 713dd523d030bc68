"""Dense ops on the hopper backend: against float64, against the experts' op, compiled, without a wait for the host."""

import pytest
import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import FeedForward

from converters import weight_cache
from converters.dense_config import FP8DenseConfig
from converters.dense_linear import dense_linear
from converters.dense_mlp import dense_mlp
from converters.expert_mlp import expert_mlp
from converters.fp8_dense import convert_dense
from converters.numerics import Numerics
from tests.converters.gpu_checks import poison
from tests.helpers import sqnr_db

pytestmark = pytest.mark.gpu(capability=(9, 0))
HOPPER = Numerics(backend="hopper")
K, NS = 512, (512, 128, 48)  # 48: narrower than any tile


@pytest.fixture(autouse=True)
def poisoned() -> None:
    poison("cuda")


def randn(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * std).bfloat16()


def projections(T: int) -> tuple[Tensor, list[nn.Parameter], list[Tensor]]:
    weights = [nn.Parameter(randn(N, K, std=0.02)) for N in NS]
    return randn(T, K).requires_grad_(), weights, [randn(T, N) for N in NS]


@pytest.mark.parametrize("T", [1, 100, 1024])
def test_joined_projections_against_float64(T: int) -> None:
    x, weights, upstreams = projections(T)
    exact = [t.detach().double().requires_grad_() for t in (x, *weights)]
    wanted = [exact[0] @ w.t() for w in exact[1:]]
    found = dense_linear(x, weights, HOPPER)
    grads = torch.autograd.grad(found, [x, *weights], upstreams)
    wanted_grads = torch.autograd.grad(wanted, exact, [u.double() for u in upstreams])
    for a, b in zip((*wanted, *wanted_grads), (*found, *grads), strict=True):
        assert sqnr_db(a, b) > (27 if T > 1 else 25)  # one row alone: 26.6 dB has been seen


def test_a_dense_mlp_is_an_expert_alone() -> None:
    x, g = randn(300, 256).requires_grad_(), randn(300, 256)
    dense = [nn.Parameter(randn(*shape, std=0.02)) for shape in ((336, 256), (256, 336), (336, 256))]
    stacked = [nn.Parameter(w.detach()[None].clone()) for w in dense]
    offs = torch.tensor([300], dtype=torch.int32, device="cuda")
    outs = dense_mlp(x, *dense, HOPPER), expert_mlp(x, *stacked, offs, HOPPER)
    grads = [torch.autograd.grad(o, [x, *w], g) for o, w in zip(outs, (dense, stacked), strict=True)]
    for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert torch.equal(a, b.view_as(a))


def test_no_token() -> None:
    x, weights, upstreams = projections(0)
    outs = dense_linear(x, weights, HOPPER)
    torch.autograd.backward(outs, upstreams)
    assert [tuple(o.shape) for o in outs] == [(0, N) for N in NS]
    assert not any(w.grad.any() for w in weights)


def test_nothing_waits_for_the_host() -> None:
    """From the second step on, whose tables of groups exist."""
    x, weights, upstreams = projections(256)
    mlp = [nn.Parameter(randn(*shape, std=0.02)) for shape in ((1024, K), (K, 1024), (1024, K))]
    for sync in ("default", "error"):
        torch.cuda.set_sync_debug_mode(sync)
        try:
            torch.autograd.backward(dense_linear(x, weights, HOPPER), upstreams)
            out = dense_mlp(x, *mlp, HOPPER)
            out.backward(torch.ones_like(out))
            for w in (*weights, *mlp):
                torch.autograd.graph.increment_version(w)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Block(nn.Module):
    """A shared expert's MLP and three projections of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = FeedForward(K, 1024)
        self.wq, self.wk, self.wv = (nn.Linear(K, N, bias=False) for N in NS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.feed_forward(x)
        return torch.cat([self.wq(x), self.wk(x) * 2, self.wv(x)], dim=-1)


def test_compiled_equals_eager() -> None:
    """In float32 masters under autocast, as torchtitan trains on one GPU."""
    weight_cache.clear()
    model = Block().cuda()
    convert_dense(model, FP8DenseConfig(backend="hopper"))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(2, 128, K, device="cuda")
    results = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = run(leaf)
        torch.manual_seed(0)
        out.backward(torch.randn_like(out))
        results.append([out.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    for a, b in zip(*results, strict=True):
        assert sqnr_db(a, b) > 40
