"""What the backward of an MLP keeps while it works: which tensors are still there when each of its GEMMs begins."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from converters import weight_cache
from converters.backends import reference
from converters.backends.reference_tokens import slots_of
from converters.config import Numerics
from converters.dense_mlp import dense_mlp
from converters.expert_mlp import expert_mlp
from converters.mlp_gradients import makes_both
from converters.routed_mlp import routed_mlp
from tests.converters.routing import make_routed
from tests.helpers import make_experts

EXPERTS = make_experts((44, 1, 0, 19), tail=3)
ONCE = Numerics(used_once=True)
Case = tuple[Callable[[], Tensor], list[Tensor]]
Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
ROW_GEMMS = {"y13": "x8", "out": "h8", "dh": "g8", "dx": "dy8"}  # in this order, with their rows
WEIGHTS = {"y13": "w13", "out": "w2", "dh": "w2_t", "dx": "w13_t"}
# What may be alive when a GEMM of the backward begins, of all that GEMMs have been given until then.
ALIVE = {
    "dh": {"x8", "y13", "h8", "g8", "w2_t"},
    "dw2": {"x8", "operands of dw2"},
    "dx": {"x8", "dy8", "w13_t"},
    "dw1": {"operands of dw1"},
    "dw3": {"operands of dw3"},
}


class Watch:
    """Stands before the GEMMs of the reference backend and remembers, by name, the storages of what they are given.

    The bodies of our operators call the backend at run time, whether their caller is compiled or not.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storages: dict[str, list[StorageWeakRef]] = {}
        self.alive: dict[str, set[str]] = {}
        self.row_gemms, self.weight_gemms = list(ROW_GEMMS), ["dw2", "dw1", "dw3"]
        for name in ("gemm_rows", "gemm_wgrad", "swiglu_rows"):
            patch.setattr(reference, name, partial(getattr(self, name), getattr(reference, name)))

    def remember(self, name: str, *tensors: Tensor) -> None:
        self.storages[name] = [StorageWeakRef(t.untyped_storage()) for t in tensors]

    def begin(self, name: str) -> None:
        self.alive[name] = {n for n, refs in self.storages.items() if any(not ref.expired() for ref in refs)}

    def gemm_rows(self, compute: Callable, q: Tensor, scale: Tensor, w_q: Tensor, *rest: Any) -> Tensor:
        name = self.row_gemms.pop(0)
        self.remember(ROW_GEMMS[name], q)
        self.remember(WEIGHTS[name], w_q)
        self.begin(name)
        return compute(q, scale, w_q, *rest)

    def gemm_wgrad(self, compute: Callable, a: Any, b: Any, *rest: Any, **options: Any) -> Tensor:
        name = self.weight_gemms.pop(0)
        self.remember(f"operands of {name}", a.q, b.q)
        if name == "dw3":
            self.storages["operands of dw1"] = self.storages["operands of dw1"][:1]  # they share the other one
        self.begin(name)
        return compute(a, b, *rest, **options)

    def swiglu_rows(self, compute: Callable, y13: Tensor) -> tuple[Tensor, Tensor]:
        self.remember("y13", y13)
        self.begin("h8")
        return compute(y13)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    weight_cache.clear()
    yield
    torch._dynamo.reset()


def experts(wrap: Wrap, numerics: Numerics = ONCE) -> Case:
    inputs = [t.bfloat16().requires_grad_() for t in (EXPERTS.x, EXPERTS.w1, EXPERTS.w2, EXPERTS.w3)]
    run = wrap(partial(expert_mlp, offs=EXPERTS.offs, numerics=numerics))
    return lambda: run(*inputs), inputs


def dense(wrap: Wrap, numerics: Numerics = ONCE) -> Case:
    x = EXPERTS.x.bfloat16().requires_grad_()
    ws = [nn.Parameter(w[:2].flatten(0, -2).bfloat16()) for w in (EXPERTS.w1, EXPERTS.w3)]
    w2 = nn.Parameter(EXPERTS.w2[:2].transpose(1, 2).flatten(0, 1).t().bfloat16().contiguous())
    run = wrap(partial(dense_mlp, numerics=numerics))
    return lambda: run(x, ws[0], w2, ws[1]), [x, *ws, w2]


def tokens(wrap: Wrap, numerics: Numerics = ONCE) -> Case:
    routed = make_routed(30, 2, 4)
    inputs = routed.leaves(torch.bfloat16)
    slots, offs = slots_of(routed.order, *routed.chosen.shape), routed.counts.cumsum(0).int()
    run = wrap(lambda x, scores, base, *ws: routed_mlp(x, scores, slots, base, *ws, offs, False, numerics))
    return lambda: run(*inputs), inputs


def eager(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return run


def compiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(run, fullgraph=True, backend="aot_eager")


def recomputed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(run, *args, use_reentrant=False)


def backward(case: Case, upstream: Tensor | None = None, **options: bool) -> list[Tensor]:
    run, inputs = case
    out = run()
    return list(torch.autograd.grad(out, inputs, torch.randn_like(out) if upstream is None else upstream, **options))


@pytest.mark.parametrize("wrap", [eager, compiled])
@pytest.mark.parametrize("make", [experts, dense, tokens])
def test_backward_frees_what_it_has_used(
    make: Callable[..., Case], wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    backward(make(wrap))
    assert not watch.row_gemms
    assert not watch.weight_gemms
    assert {name: watch.alive[name] for name in ALIVE} == ALIVE


def test_recomputed_activations_are_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.row_gemms = ["y13", "out", *watch.row_gemms]
    backward(experts(recomputed, Numerics()))
    assert watch.alive["dw1"] == {"operands of dw1", "w13", "w2", "w13_t", "w2_t"}  # weights used twice are kept


def test_the_forward_drops_a_weight_after_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    experts(eager)[0]()
    assert watch.alive["h8"] == {"x8", "y13"}


@pytest.mark.parametrize("make", [experts, dense, tokens])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(make: Callable[..., Case]) -> None:
    run, inputs = make(eager)
    out = run()
    upstream = torch.randn_like(out)
    grads = [torch.autograd.grad(out, inputs, upstream, retain_graph=keep) for keep in (True, True, False)]
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, upstream)


@pytest.mark.parametrize("make", [experts, dense, tokens])
def test_a_gradient_of_a_gradient_is_refused(make: Callable[..., Case]) -> None:
    """Operators have no gradient, and without one torch only warns."""
    run, inputs = make(eager)
    out = run()
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[1].backward(torch.randn_like(grads[1]))


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(wgrad="fp8_columns"), Numerics(wgrad="bf16")], ids=str)
def test_nobody_reads_dh_after_its_memory_was_given_away(numerics: Numerics, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = torch.randn_like(EXPERTS.x).bfloat16()
    wanted, compute = backward(experts(eager, numerics), upstream), reference.dswiglu_rows

    def used_up(dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
        rows = compute(dh, y13)
        dh.fill_(torch.nan)
        return rows

    monkeypatch.setattr(reference, "dswiglu_rows", used_up)
    assert all(torch.equal(a, b) for a, b in zip(wanted, backward(experts(eager, numerics), upstream), strict=True))


# rows, [E, H, D], bytes of an element: one step of one micro-batch on an H200, 16 experts of Llama4 Scout and others
@pytest.mark.parametrize(
    ("M", "shape", "dtype", "both"),
    [
        (16384, (16, 8192, 5120), torch.bfloat16, True),
        (65536, (16, 8192, 5120), torch.bfloat16, False),
        (65536, (16, 8192, 5120), torch.float32, True),
        (16384, (8, 14336, 4096), torch.bfloat16, True),
        (16384, (2, 8192, 5120), torch.bfloat16, False),
        (16384, (8192, 5120), torch.bfloat16, False),
    ],
)
def test_which_shapes_make_both_layouts_at_once(M: int, shape: tuple[int, ...], dtype: torch.dtype, both: bool) -> None:
    assert makes_both(M, torch.empty(shape, dtype=dtype, device="meta")) == both


@pytest.mark.parametrize("rows", [8, 4096])
def test_a_layout_that_backward_makes_again_gives_the_same_bits(rows: int) -> None:
    few = make_experts((rows, 3), D=32, H=16)
    ws = [w.bfloat16().requires_grad_() for w in (few.w1, few.w2, few.w3)]
    upstream = few.upstream.bfloat16()
    wanted = torch.autograd.grad(expert_mlp(few.x.bfloat16(), *ws, few.offs, Numerics()), ws, upstream)
    weight_cache.clear()
    out = expert_mlp(few.x.bfloat16(), *ws, few.offs, ONCE)
    kept = sum(e.quantized.q_t.numel() for e in weight_cache._entries.values())
    assert kept == sum(w.numel() for w in (ws if rows == 8 else ws[1:2]))
    assert all(torch.equal(a, b) for a, b in zip(wanted, torch.autograd.grad(out, ws, upstream), strict=True))
    assert not any(e.quantized.q_t.numel() for e in weight_cache._entries.values())
