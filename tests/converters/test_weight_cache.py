"""A quantized weight is reused while its weight is unchanged and never after, however the change was made.

A stale entry is the worst kind of fault: the optimizer moves the parameter, the loss still falls, and no GEMM sees it.
"""

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters import weight_cache
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from parallel.wrapped_weight import plain
from tests.helpers import Experts, make_experts

ROWS = make_experts((8, 8), 16, 16)  # square weights: a wrong orientation would not show in a shape


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    weight_cache.clear()
    yield
    weight_cache.clear()


def parameters(numerics: Numerics | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(FP8ExpertWeight(w.clone(), numerics or Numerics())) for w in (ROWS.w1, ROWS.w2, ROWS.w3)]


def mlp(weights: list[nn.Parameter]) -> Tensor:
    return expert_mlp(ROWS.x, *weights, ROWS.offs, weights[0]._context)


USES: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
    "expert_mlp": mlp,
    "grouped_mm": lambda w: torch._grouped_mm(ROWS.x, w[1].mT, offs=ROWS.offs),
    "grouped_mm_untransposed": lambda w: torch._grouped_mm(ROWS.x, w[1], offs=ROWS.offs),
    "matmul_of_an_expert": lambda w: ROWS.x @ w[1][0].t(),
    "linear": lambda w: F.linear(ROWS.x, w[1][1]) + F.linear(ROWS.x, w[1][0]),
    "cast": lambda w: torch._grouped_mm(ROWS.x.bfloat16(), w[1].bfloat16().mT, offs=ROWS.offs),
    "halves": lambda w: expert_mlp(ROWS.x, w[1].mT, w[1], w[1].mT, ROWS.offs, Numerics()),
    "alias": lambda w: torch._grouped_mm(ROWS.x, w[1].detach(), offs=ROWS.offs),
}


def optimizer_step(**options: object) -> Callable[[nn.Parameter], None]:
    def step(p: nn.Parameter) -> None:
        p.grad = torch.ones_like(plain(p.detach()))
        torch.optim.AdamW([p], lr=0.1, **options).step()

    return step


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "adamw": optimizer_step(),
    "adamw_foreach": optimizer_step(foreach=True),
    "adamw_fused": optimizer_step(fused=True),
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(p * 2),
    "normal_": lambda p: nn.init.trunc_normal_(p),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.mul(p, 2, out=p),
    "data": lambda p: p.data.mul_(2),
    "data_of_an_expert": lambda p: p.data[0].mul_(2),
    "data_assigned": lambda p: setattr(p, "data", p.data * 2),
    "data_assigned_plain": lambda p: setattr(p, "data", plain(p.detach()) * 2),
    "detached": lambda p: p.detach().mul_(2),
    "an_expert": lambda p: p[0].mul_(2),
    "setitem": lambda p: p.__setitem__(0, p[0] * 2),
    "flat": lambda p: p.view(-1).mul_(2),
    "unbind": lambda p: [w.mul_(2) for w in p.unbind(0)],
    "transposed": lambda p: p.mT.mul_(2),
    "view_of_a_view": lambda p: p[0].t()[3:].mul_(2),
    "state_dict": lambda p: plain(p.detach()).mul_(2),
    "part_of_state_dict": lambda p: plain(p.detach())[0].narrow(0, 2, 5).mul_(2),
    "swapped": lambda p: torch.utils.swap_tensors(p, nn.Parameter(FP8ExpertWeight(plain(p).detach() * 2, Numerics()))),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", USES)
def test_any_write_is_seen_by_any_use(use: str, write: str) -> None:
    weights = parameters()
    before = [USES[use](weights).detach() for _ in range(2)]
    with torch.no_grad():
        WRITES[write](weights[1])
    after = USES[use](weights).detach()
    weight_cache.clear()
    assert torch.equal(*before)
    assert not torch.equal(before[0], after), "the write was lost"
    assert torch.equal(USES[use](weights), after), "stale"


def count_quantizations(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls, real = [], weight_cache.quantize
    monkeypatch.setattr(
        weight_cache, "quantize", lambda *args, **kwargs: (calls.append(None), real(*args, **kwargs))[1]
    )
    return calls


def test_one_quantization_a_step_for_all_micro_batches_and_their_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, weights = count_quantizations(monkeypatch), parameters()
    for step in range(1, 4):
        for _ in range(4):
            mlp(weights).backward(ROWS.upstream)
        assert len(calls) == 2 * step  # W13 and W2
        torch.optim.SGD(weights, lr=0.1).step()


@pytest.mark.parametrize("cache", [True, False])
def test_gradient_accumulation_is_the_same_with_and_without_cache(cache: bool) -> None:
    """Case 33's kind: a scale beside fresh data made weights zero elsewhere (TransformerEngine#1047)."""
    weights = parameters(Numerics(cache=cache))
    optimizer = torch.optim.SGD(weights, lr=0.5)
    losses = []
    for _ in range(3):
        for _ in range(2):
            out = mlp(weights)
            out.backward(ROWS.upstream)
            losses.append(out.detach())
        optimizer.step()
    weight_cache.clear()
    fresh = parameters(Numerics(cache=False))
    optimizer = torch.optim.SGD(fresh, lr=0.5)
    for i in range(6):
        out = mlp(fresh)
        out.backward(ROWS.upstream)
        assert torch.equal(out, losses[i])
        if i % 2:
            optimizer.step()


def test_another_recipe_or_orientation_of_the_same_plain_weight_is_another_entry() -> None:
    offs, x, w = ROWS.offs, ROWS.x, ROWS.w1 * torch.logspace(0, 5, 16)
    products = [lambda: grouped_mm(x, w, offs, Numerics()), lambda: grouped_mm(x, w.mT, offs, Numerics())]
    products += [lambda: grouped_mm(x, w, offs, Numerics(recipe="rowwise"))]
    products += [lambda: expert_mlp(x, w, w, w, offs, Numerics())]  # its w2 lies as the first product's weight does
    together = [product() for product in products]
    for product, out in zip(products, together, strict=True):
        weight_cache.clear()
        assert torch.equal(product(), out)


def test_freed_weights_leave_the_cache_and_are_never_mistaken_for_new_ones() -> None:
    """Storages are reused: many weights in the same place, one after the other."""
    for seed in range(20):
        experts: Experts = make_experts((8, 8), 16, 16, seed=seed)
        weights = [nn.Parameter(FP8ExpertWeight(w, Numerics())) for w in (experts.w1, experts.w2, experts.w3)]
        cached = mlp(weights)
        uncached = expert_mlp(ROWS.x, *weights, ROWS.offs, Numerics(cache=False))
        assert torch.equal(cached, uncached)
        del experts, weights, cached, uncached
    mlp(parameters())
    assert len(weight_cache._entries) <= 2


def test_freed_weights_leave_while_others_are_quantized_again_and_again() -> None:
    alive = [parameters() for _ in range(4)]
    gone = [parameters() for _ in range(3)]
    for weights in (alive[0], gone[0], alive[1], gone[1], gone[2], *alive[2:]):
        mlp(weights)
    assert len(weight_cache._entries) == 14
    del gone, weights
    for _ in range(2):  # optimizer steps
        for weights in alive:
            with torch.no_grad():
                torch._foreach_mul_(weights, 0.5)
            mlp(weights)
    assert len(weight_cache._entries) == 8
    assert not any(entry.is_dead() for entry in weight_cache._entries.values())


def test_threads_share_entries() -> None:
    """autograd runs a device's backward on a thread of its own, pipeline schedules may run several."""
    weights = [parameters() for _ in range(3)]
    expected = [mlp(w).detach() for w in weights]
    results: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        found = results[number] = []
        for i in range(30):
            torch.autograd.graph.increment_version([plain(w.detach()) for w in weights[i % 3]])
            found.append(mlp(weights[i % 3]).detach())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in results.values():
        assert len(found) == 30
        assert all(torch.equal(out, expected[i % 3]) for i, out in enumerate(found))
    assert len(weight_cache._entries) == 6


def test_a_deep_copy_has_entries_of_its_own() -> None:
    module = nn.ParameterList(parameters())
    first = mlp(list(module))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[1].mul_(2)
    assert torch.equal(mlp(list(module)), first)
    assert not torch.equal(mlp(list(other)), first)


def test_a_write_between_forward_and_backward_is_refused() -> None:
    """Backward would multiply with other weights than forward; autograd's own check covers wrapped weights too."""
    weights = parameters()
    out = mlp(weights)
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(ROWS.upstream)


def test_inference_tensors_are_not_cached() -> None:
    with torch.inference_mode():
        weights = [FP8ExpertWeight(w.clone(), Numerics()) for w in (ROWS.w1, ROWS.w2, ROWS.w3)]
        assert torch.equal(mlp(weights), mlp(parameters()))
        weights[1].mul_(2)
        assert not torch.equal(mlp(weights), mlp(parameters()))


def cached_layouts() -> list[int]:
    """Elements of q and q_t over all entries."""
    kept = [e.quantized for e in weight_cache._entries.values()]
    return [sum(w.q.numel() for w in kept), sum(w.q_t.numel() for w in kept)]


def test_a_weight_that_is_used_once_leaves_nothing_at_the_end_of_backward() -> None:
    size = ROWS.w1.numel() + ROWS.w2.numel() + ROWS.w3.numel()
    weights = parameters(Numerics(used_once=True))
    out = mlp(weights)
    assert cached_layouts() == [0, size]
    out.backward(torch.randn_like(out))
    assert cached_layouts() == [0, 0]
    assert weight_cache.cached_bytes() < size  # the scales


def test_what_one_use_has_dropped_is_kept_for_many() -> None:
    """bench: the same weights in a step of one micro-batch, then in a step of many."""
    size = ROWS.w1.numel() + ROWS.w2.numel() + ROWS.w3.numel()
    weights = parameters(Numerics(used_once=True))
    mlp(weights).backward(torch.randn_like(ROWS.x))
    expert_mlp(ROWS.x, *weights, ROWS.offs, Numerics())
    assert cached_layouts() == [size, size]


def test_a_weight_that_was_to_be_used_once_may_be_used_again() -> None:
    g = torch.randn_like(ROWS.x)
    results = []
    for numerics in (Numerics(), Numerics(used_once=True)):
        weights = parameters(numerics)
        mlp(weights)  # a validation batch
        out = mlp(weights)
        out.backward(g, retain_graph=True)
        out.backward(g)
        with torch.no_grad():
            weights[0].mul_(2)
        mlp(weights).backward(g)
        results.append([out.detach(), mlp(weights).detach(), *(w.grad for w in weights)])
    for kept, dropped in zip(*results, strict=True):
        assert torch.equal(kept, dropped)
