"""What converted modules run: alone, joined, hooked, copied, compiled, recomputed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchtitan.models.llama4 import Transformer

from converters import weight_cache
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from tests.converters.models import llama4, materialized
from tests.helpers import DEVICE, sqnr_db

REFERENCE = FP8DenseConfig(backend="reference")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    weight_cache.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def fp8_and_bf16(n_layers: int = 1, moe_every: int = 2) -> tuple[Transformer, Transformer]:
    """A converted model and the same one unconverted, with weights at a scale where every layer matters."""
    torch.manual_seed(0)
    fp8 = llama4(n_layers=n_layers, moe_every=moe_every)
    convert_dense(fp8, REFERENCE)
    models = materialized(fp8), materialized(llama4(n_layers=n_layers, moe_every=moe_every))
    with torch.no_grad():
        for p in fp8.layers.parameters():
            if p.dim() > 1:
                p.normal_(std=p.shape[-1] ** -0.5)
    models[1].load_state_dict(fp8.state_dict())
    return models


def tokens() -> Tensor:
    return torch.randint(0, 128, (2, 32), device=DEVICE)


def gradients(model: nn.Module, out: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.backward(upstream)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_converted_block_computes_what_the_block_computes() -> None:
    """Five FP8 GEMMs of 28 dB on the way, and no router."""
    fp8, bf16 = fp8_and_bf16()
    batch, upstream = tokens(), torch.randn(2, 32, 128, device=DEVICE)
    outs = [m(batch) for m in (bf16, fp8)]
    assert 20 < sqnr_db(*outs) < 40
    grads = [gradients(m, out, upstream) for m, out in zip((bf16, fp8), outs, strict=True)]
    for name in grads[0]:
        assert 15 < sqnr_db(grads[0][name], grads[1][name]) < (200 if name == "output.weight" else 60), name


class CrossAttention(nn.Module):
    """wk and wv see another tensor than wq; it counts its calls, as a module with state would."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32, bias=i < 3) for i in range(4))
        self.calls = 0

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        self.calls = self.calls + 1
        q, k, v = self.wq(x), self.wk(context), self.wv(context)
        return self.wo(torch.softmax(q @ k.mT, dim=-1) @ v)


def test_projections_of_different_tensors_stay_apart() -> None:
    plain = CrossAttention()
    model = nn.ModuleDict({"attention": copy.deepcopy(plain)})
    convert_dense(model, REFERENCE)
    x, context = torch.randn(8, 32), torch.randn(8, 32)
    assert sqnr_db(plain(x, context), model["attention"](x, context)) > 20
    assert sqnr_db(plain(x, x), model["attention"](x, x)) > 20
    assert model["attention"].calls == 2


def test_hooks_on_a_layer_are_called() -> None:
    model, _ = fp8_and_bf16()
    batch = tokens()
    joined, seen = model(batch), []
    for layer in (model.layers["0"].attention.wk, model.layers["0"].feed_forward.w3):
        layer.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    assert sqnr_db(joined, model(batch)) > 30  # a gradient's or weight's scale differs where layers are apart
    assert seen == [(2, 32, 32), (2, 32, 256)]


def test_a_copied_model_has_forwards_of_its_own() -> None:
    """A pipeline copies the whole model for each stage."""
    model, _ = fp8_and_bf16()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.layers["0"].attention.wq.weight.zero_()
        model.layers["0"].feed_forward.w1.weight.zero_()
    attention = other.layers["0"].attention
    assert attention.forward.__self__ is attention
    assert all(layer.joined_layers[0] is attention.wq for layer in (attention.wq, attention.wk, attention.wv))
    batch = tokens()
    assert not torch.equal(model(batch), other(batch))


def step(model: nn.Module, run: Any, batch: Tensor, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = run(batch)
    grads = gradients(model, out, upstream)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return out.detach(), grads


def test_blocks_compile_as_torchtitan_compiles_them() -> None:
    """Whole dense blocks; of a mixture's block its attention and shared expert. Two steps: weights must be seen to
    change.
    """
    eager, _ = fp8_and_bf16(n_layers=2)
    compiled = copy.deepcopy(eager)
    options = {"fullgraph": True, "backend": "aot_eager"}
    compiled.layers["0"] = torch.compile(compiled.layers["0"], **options)
    block = compiled.layers["1"]
    block.attention = torch.compile(block.attention, **options)
    block.moe.shared_experts = torch.compile(block.moe.shared_experts, **options)
    for _ in range(2):
        batch, upstream = tokens(), torch.randn(2, 32, 128, device=DEVICE)
        (a, grads), (b, others) = (step(m, m, batch, upstream) for m in (eager, compiled))
        assert torch.equal(a, b)
        for name, other in zip(grads, others.values(), strict=True):
            assert sqnr_db(grads[name], other) > 100, name  # gradients of the norms are summed in another order


def test_a_new_number_of_tokens_compiles_once_more() -> None:
    model, _ = fp8_and_bf16()
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(model.layers["0"].feed_forward, fullgraph=True, backend=counter)
    for T in (24, 40, 56, 8):
        x = torch.randn(1, T, 64, device=DEVICE)
        assert torch.equal(run(x), model.layers["0"].feed_forward(x))
    assert counter.frame_count == 2


def test_recomputation_gives_the_same_bits() -> None:
    model, _ = fp8_and_bf16()
    block, x = model.layers["0"], torch.randn(2, 32, 64, device=DEVICE, requires_grad=True)
    outs = [block(x, model.freqs_cis, None), checkpoint(block, x, model.freqs_cis, None, use_reentrant=False)]
    upstream = torch.randn_like(x)
    results = [torch.autograd.grad(out, [x, *block.parameters()], upstream) for out in outs]
    assert all(map(torch.equal, *results))
