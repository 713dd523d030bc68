"""The routed experts from tokens to tokens: against float64, and beside torchtitan's own token path in FP8."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from converters.backends import reference, reference_tokens
from converters.backends.reference_tokens import slots_of, to_rows, to_tokens
from converters.config import Numerics
from converters.routed_mlp import routed_mlp
from tests.converters.routing import NAMES, exact, fused, make_routed, unfused
from tests.helpers import poison_freed_memory, sqnr_db

ORDERS = pytest.mark.parametrize("before", [True, False], ids=["score_before", "score_after"])
# T, k and experts that get a token, of ten.
SHAPES = pytest.mark.parametrize(("T", "k", "live"), [(384, 1, 10), (384, 2, 7), (200, 8, 10), (61, 3, 3)])


@ORDERS
@SHAPES
def test_output_and_gradients_against_float64(before: bool, T: int, k: int, live: int) -> None:
    """Not below the recipe's floor, and not worse than with torchtitan's path around the same experts."""
    routed = make_routed(T, k, live=live)
    poison_freed_memory()
    wanted, titan, ours = exact(routed, before), unfused(routed, before), fused(routed, before)
    for name in NAMES:
        assert ours[name].dtype == titan[name].dtype, name
        db = sqnr_db(wanted[name], ours[name])
        assert db > 23.0, (name, db)
        assert db >= sqnr_db(wanted[name], titan[name]) - 0.5, name
    for name in ("w1", "w2", "w3"):
        assert not ours[name][live:].any(), name


@ORDERS
@pytest.mark.parametrize("k", [1, 2, 8])
def test_in_float32_it_is_torchtitans_path_around_the_same_experts(before: bool, k: int) -> None:
    """No rounding to BF16 is left to save there, and sums over one or two choices have one order."""
    routed = make_routed(96, k)
    titan, ours = (f(routed, before, torch.float32) for f in (unfused, fused))
    for name in NAMES:
        assert sqnr_db(titan[name], ours[name]) > 120, name
        assert name in ("out", "x", "scores") or torch.equal(titan[name], ours[name]), name


@ORDERS
@pytest.mark.parametrize(("T", "k"), [(1, 1), (1, 8), (0, 2)])
def test_one_token_and_none(before: bool, T: int, k: int) -> None:
    routed = make_routed(T, k)
    wanted, ours = exact(routed, before), fused(routed, before, wrapped=True)
    for name in NAMES:
        assert ours[name].shape == wanted[name].shape
        assert sqnr_db(wanted[name], ours[name]) > (12 if name == "scores" else 20), name  # of one or eight numbers


def test_weighted_rows_are_rounded_once() -> None:
    """Against float64: what torchtitan rounds to BF16 and the quantizer again loses a little more."""
    routed = make_routed(500, 2)
    order, scores = routed.order, routed.top_scores.flatten()[routed.order]
    rows = routed.x.double()[order // 2] * scores.double()[:, None]
    twice = reference.quantize_rows((routed.x.float()[order // 2] * scores[:, None]).bfloat16())
    once = to_rows(routed.x, slots_of(order, 500, 2), 1000, scores)[:2]
    errors = [(q.double() * s.double()[:, None] - rows).norm() for q, s in (once, twice)]
    assert errors[0] < errors[1]


@ORDERS
def test_a_share_of_the_rows(before: bool) -> None:
    """Other ranks have the other tokens: theirs get nothing here but the base, and give nothing."""
    routed = make_routed(40, 2)
    part = replace(routed, x=routed.x[10:30], chosen=routed.chosen[10:30], top_scores=routed.top_scores[10:30])
    ws = [w.float() for w in routed.weights]
    slots = torch.full((40, 2), -1, dtype=torch.int32)
    slots[10:30] = slots_of(part.order, 20, 2)
    scores, offs = part.top_scores.flatten()[part.order], part.counts.cumsum(0).int()
    x = routed.x.float().requires_grad_()
    out = routed_mlp(x, scores, slots, routed.base.float(), *ws, offs, before, Numerics())
    alone = routed_mlp(part.x.float(), scores, slots[10:30], routed.base[10:30].float(), *ws, offs, before, Numerics())
    (dx,) = torch.autograd.grad(out, x, routed.upstream.float())
    outside = [*range(10), *range(30, 40)]
    assert torch.equal(out[10:30], alone)
    assert torch.equal(out[outside], routed.base.float()[outside])
    assert not dx[outside].any()
    assert dx[10:30].any(1).all()


@ORDERS
def test_base_is_optional(before: bool) -> None:
    routed = make_routed(30, 2)
    x, scores, base, *ws = routed.leaves(torch.float32)
    slots, offs = slots_of(routed.order, 30, 2), routed.counts.cumsum(0).int()
    outs = [routed_mlp(x, scores, slots, b, *ws, offs, before, Numerics()) for b in (None, torch.zeros_like(base))]
    assert torch.equal(*outs)


@ORDERS
def test_recomputation_gives_the_same_bits(before: bool) -> None:
    routed = make_routed(50, 2)
    results = []
    for recompute in (False, True):
        leaves = routed.leaves(torch.bfloat16)
        slots, offs = slots_of(routed.order, 50, 2), routed.counts.cumsum(0).int()

        run = partial(routed_mlp, slots=slots, offs=offs, before=before, numerics=Numerics())
        named = dict(zip(("x", "scores", "base", "w1", "w2", "w3"), leaves, strict=True))
        out = checkpoint(run, **named, use_reentrant=False) if recompute else run(**named)
        results.append([out, *torch.autograd.grad(out, leaves, routed.upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_slots_are_the_inverse_of_an_order() -> None:
    assert slots_of(torch.tensor([3, 0, 5]), 3, 2).tolist() == [[1, -1], [-1, 0], [-1, 2]]


def test_twins_by_hand() -> None:
    x = torch.tensor([[1.0, -2], [3, 4]])
    slots = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    scores = torch.tensor([0.5, 2.0, 1.0])
    q, s, dots = to_rows(x, slots, 3, scores, torch.tensor([[1.0, 1], [1, 0], [0, 1]]))
    assert (q.float() * s[:, None]).tolist() == [[0.5, -1], [6, 8], [1, -2]]
    assert dots.tolist() == [-1, 3, -2]
    rows = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    out, dots = to_tokens(rows, slots, torch.float32, scores, torch.tensor([[10.0, 20], [30, 40]]), x)
    assert out.tolist() == [[15.5, 27], [36, 48]]
    assert dots.tolist() == [-3, 25, -7]
    assert reference_tokens.to_tokens(rows, slots, torch.float32)[1].numel() == 0
