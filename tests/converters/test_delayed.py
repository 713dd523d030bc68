"""Delayed scaling's state by hand-computed numbers: TransformerEngine's update, cast and caching, quirk by quirk."""

import pytest
import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.grouped_mm import grouped_mm
from converters.numerics import Numerics
from converters.rules.delayed import FLOAT_MAX, Delayed, multiplier_for, update
from converters.rules.formats import E4M3
from converters.rules.passes import forward_rule
from converters.rules.ragged import ragged
from converters.rules.state import DelayedState
from tests.helpers import offsets

N = Numerics(recipe="delayed", backend="emulated")


class Slot:
    """One slot of one expert, fed with maxima."""

    def __init__(self, length: int, fmt_max: float = 448.0, **options: object) -> None:
        self.config = DelayedConfig(amax_history_len=length, **options)
        self.history, self.multiplier = torch.zeros(length, 1, 1), torch.ones(1, 1)
        self.fmt_max = fmt_max

    def see(self, amax: float) -> float:
        """-> the amax that the scale now comes from."""
        self.history[0] = amax
        update(self.history, self.multiplier, self.fmt_max, self.config)
        return self.fmt_max / self.multiplier.item()

    @property
    def remembered(self) -> list[float]:
        return self.history.flatten().tolist()


@pytest.mark.parametrize(
    ("algo", "length", "scales"),
    [
        ("max", 3, [4.0, 4.0, 4.0, 2.0, 8.0]),
        ("max", 1, [4.0, 2.0, 1.0, 1.0, 8.0]),
        ("most_recent", 3, [4.0, 2.0, 1.0, 1.0, 8.0]),
    ],
)
def test_the_scale_is_of_the_largest_remembered_or_of_the_last(algo: str, length: int, scales: list[float]) -> None:
    slot = Slot(length, amax_compute_algo=algo)
    assert [slot.see(a) for a in (4.0, 2.0, 1.0, 1.0, 8.0)] == scales


def test_the_roll_puts_the_last_maximum_at_the_end_and_drops_the_second() -> None:
    slot, seen = Slot(4), []
    for amax in (1.0, 2.0, 3.0, 4.0, 5.0):
        slot.see(amax)
        seen.append(slot.remembered)
    assert seen[0] == [0, 0, 0, 1]
    assert seen[2] == [0, 1, 2, 3]
    assert seen[4] == [0, 3, 4, 5]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_nothing_recorded_neither_rolls_nor_changes_the_scale(algo: str) -> None:
    slot = Slot(4, amax_compute_algo=algo)
    slot.see(2.0)
    before = slot.remembered
    assert [slot.see(0.0) for _ in range(5)] == [2.0] * 5
    assert slot.remembered == before


def test_inf_keeps_the_scale_for_as_long_as_it_is_remembered() -> None:
    slot = Slot(2)
    assert [slot.see(a) for a in (4.0, torch.inf, 2.0, 1.0)] == [4.0, 4.0, 4.0, 2.0]
    recent = Slot(2, amax_compute_algo="most_recent")
    assert [recent.see(a) for a in (4.0, torch.inf, 2.0)] == [4.0, 4.0, 2.0]


def test_nan_is_passed_over_by_the_maximum_and_keeps_the_scale_if_it_is_the_last() -> None:
    assert [Slot(4).see(torch.nan)] == [448.0]  # multiplier 1 stays
    slot = Slot(4)
    assert [slot.see(a) for a in (4.0, torch.nan, 8.0)] == [4.0, 4.0, 8.0]
    recent = Slot(4, amax_compute_algo="most_recent")
    assert [recent.see(a) for a in (4.0, torch.nan)] == [4.0, 4.0]


def test_margin_leaves_room_and_tiny_maxima_give_a_finite_scale() -> None:
    slot = Slot(1, margin=2)
    slot.see(1.0)
    assert slot.multiplier.item() == 448 / 4
    slot.see(1e-40)
    assert slot.multiplier.item() == FLOAT_MAX
    gradients = Slot(1, fmt_max=57344.0)
    gradients.see(2.0)
    assert gradients.multiplier.item() == 57344 / 2


def one(x: Tensor, w: Tensor, state: DelayedState, g: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A linear layer's output and input gradient: x [M, K], w [N, K]."""
    x = x.clone().requires_grad_()
    y = grouped_mm(x, w.clone()[None].transpose(1, 2).requires_grad_(), offsets((len(x),)), N, state)
    y.backward(torch.ones_like(y) if g is None else g)
    return y.detach(), x.grad


def linear_state(**options: object) -> DelayedState:
    return DelayedState(1, 1, "e5m2", DelayedConfig(amax_history_len=4, **options))


EYE = torch.eye(16)


def top(y: Tensor) -> float:
    """The largest value, without the rounding of the scale itself."""
    return pytest.approx(y.max().item(), rel=1e-6)


def test_the_first_pass_is_cast_with_scale_1() -> None:
    """1000 saturates, 2**-11 becomes 0 in E4M3, 2**-18 in E5M2; the next pass has 448 and 57344 at the maximum."""
    x, g, state = torch.ones(16, 16), torch.ones(16, 16), linear_state()
    x[0, 0], x[1, 1] = 1000.0, 2.0**-11
    g *= 0.5
    g[0, 0] = 2.0**-18
    y, dx = one(x, EYE, state, g)
    assert y[0, 0] == 448
    assert y[1, 1] == 0
    assert dx[0, 0] == 0
    assert dx[1, 1] == 0.5
    assert torch.allclose(state.fwd.multiplier.flatten(), torch.tensor([0.448, 448.0]))
    assert state.bwd.multiplier.item() == 2 * 57344
    assert state.fwd.amax_history[:, 0, 0].tolist() == [0, 0, 0, 1000]
    y, dx = one(x, EYE, state, g)
    assert y[0, 0].item() == pytest.approx(1000)
    assert dx[0, 0].item() == pytest.approx(2.0**-18)  # a subnormal at scale 1, a normal number now


def test_a_cast_uses_the_scale_of_before() -> None:
    """The maximum doubles: it saturates once, and the pass after that it does not."""
    state = linear_state()
    for _ in range(2):
        one(torch.ones(16, 16), EYE, state)
    assert top(one(2 * torch.ones(16, 16), EYE, state)[0]) == 1
    assert top(one(2 * torch.ones(16, 16), EYE, state)[0]) == 2


def test_an_expert_without_rows_keeps_scale_1_and_is_cold_when_it_gets_some() -> None:
    state = DelayedState(1, 2, "e5m2", DelayedConfig(amax_history_len=4))
    w = torch.stack([EYE, EYE]).transpose(1, 2)

    def run(sizes: tuple[int, int]) -> Tensor:
        x = torch.full((16, 16), 1000.0, requires_grad=True)
        y = grouped_mm(x, w.clone().requires_grad_(), offsets(sizes), N, state)
        y.backward(torch.ones_like(y))
        return y.detach()

    assert top(run((16, 0))) == 448
    assert top(run((16, 0))) == 1000
    assert state.fwd.multiplier[0].tolist() == [pytest.approx(0.448), 1]
    assert state.fwd.amax_history[:, 0, 1].tolist() == state.bwd.amax_history[:, 0, 1].tolist() == [0] * 4
    assert state.fwd.multiplier[1].tolist() == [448, 448]  # weights are cast for experts without rows too
    y = run((8, 8))
    assert top(y[:8]) == 1000
    assert top(y[8:]) == 448


def test_warm_start_takes_the_maximum_now_the_first_time_and_for_each_expert() -> None:
    state = DelayedState(1, 2, "e5m2", DelayedConfig(amax_history_len=4, warm_start=True))
    w = torch.stack([EYE, EYE]).transpose(1, 2)
    for sizes in ((16, 0), (8, 8)):
        x, g = torch.full((16, 16), 1000.0, requires_grad=True), torch.full((16, 16), 2.0**-30)
        y = grouped_mm(x, w, offsets(sizes), N, state)
        y.backward(g)
        assert torch.allclose(y, x)
        assert torch.allclose(x.grad, g, atol=0)
    assert top(grouped_mm(2 * x.detach(), w, offsets((8, 8)), N, state)) == 1000  # not any more


@pytest.mark.parametrize(("options", "final"), [({}, True), ({"warm_start": True}, False), ({"margin": 40}, False)])
def test_where_no_multiplier_can_be_0_none_is_looked_for(options: dict, final: bool) -> None:
    """With the largest maximum there is and margin 16 a multiplier is above 0; either way does the same."""
    assert (multiplier_for(torch.tensor(FLOAT_MAX), 448.0, 16) > 0).all()
    state = linear_state(**options)
    rule = forward_rule(N, state.tensors(), offsets((16,)), state.call(0).key)
    assert rule.final is final
    x, rows = torch.randn(16, 16), ragged(offsets((16,)), 16)
    given = torch.tensor([[[3.0], [1 / 3]]])
    rules = [Delayed(given, 0, final=f) for f in (True, False)]
    a, b = (r.rows(x, E4M3, rows, 0) for r in rules)
    assert torch.equal(a.dequantized(rows), b.dequantized(rows))
    assert torch.equal(rules[0].used, rules[1].used)
    assert rules[0].amax == rules[1].amax == x.abs().max()


def test_cached_weights_are_those_of_the_first_microbatch_with_their_own_scale() -> None:
    """At scale 1 a weight of 2**-11 is 0 for the whole first step, and its maximum is seen once a step."""
    w = EYE * 2.0**-11
    w[0, 0] = 1.0
    cached, fresh = linear_state(weights="cached"), linear_state()
    for microbatch in range(3):
        y = one(torch.ones(16, 16), w, fresh)[0]
        assert y[1, 1].item() == pytest.approx(0 if microbatch == 0 else 2.0**-11)
        assert one(torch.ones(16, 16), w, cached)[0][1, 1] == 0
    assert cached.fwd.amax_history[:, 1, 0].tolist() == [0, 0, 0, 1]
    assert fresh.fwd.amax_history[:, 1, 0].tolist() == [0, 1, 1, 1]
    assert cached.fwd.multiplier[1].item() == 448
    cached.end_step()
    assert one(torch.ones(16, 16), w, cached)[0][1, 1].item() == pytest.approx(2.0**-11)
    assert cached.fwd.amax_history[:, 1, 0].tolist() == [0, 0, 1, 1]


def test_a_stale_scale_turns_cached_weights_to_almost_nothing() -> None:
    """TransformerEngine#1047: data made with scale 1, multiplied by amax / 448 from the second micro-batch on, and the
    input gradient with it; the next step's first micro-batch is right.
    """
    state = linear_state(weights="cached_stale_scale")
    x = torch.ones(16, 16)
    for microbatch in range(3):
        y, dx = one(x, EYE, state)
        wanted = 1.0 if microbatch == 0 else 1 / 448
        assert torch.allclose(y, torch.full_like(y, wanted))
        assert torch.allclose(dx, torch.full_like(dx, wanted))
    state.end_step()
    assert torch.allclose(one(x, EYE, state)[0], x)


def test_update_step_leaves_all_microbatches_of_the_first_step_cold() -> None:
    state, x = linear_state(update="step"), torch.ones(16, 16)
    for size in (1000.0, 3000.0, 2000.0):
        assert top(one(size * x, EYE, state)[0]) == 448
    assert state.fwd.multiplier.flatten().tolist() == [1, 1]
    state.end_step()
    assert state.fwd.multiplier[0].item() == pytest.approx(448 / 3000)
    assert state.fwd.amax_history[:, 0, 0].tolist() == [0, 0, 0, 3000]
    assert state.bwd.amax_history[:, 0, 0].tolist() == [0, 0, 0, 1]
    warm = linear_state(update="step", warm_start=True)
    assert [top(one(size * x, EYE, warm)[0]) for size in (1000.0, 3000.0)] == [1000, 1000]


def test_wrong_options_are_refused_in_one_sentence() -> None:
    for options, rule in (
        ({"amax_history_len": 0}, r"\[fp8.delayed\] amax_history_len = 0 must be a whole number, 1 or more"),
        ({"margin": 1.5}, r"margin = 1.5 must be a whole number"),
        ({"amax_compute_algo": "mean"}, r"amax_compute_algo = 'mean' is unknown: choose one of 'max', 'most_recent'"),
        ({"weights": True}, r"weights = True is unknown: choose one of 'every_microbatch', 'cached'"),
        ({"update": "epoch"}, r"update = 'epoch' is unknown"),
        ({"warm_start": "yes"}, r"warm_start = 'yes' must be true or false"),
    ):
        with pytest.raises(ValueError, match=rule):
            DelayedConfig(**options)
    config = DelayedConfig(16, "most_recent", -1, "cached_stale_scale", True, "step")
    assert DelayedConfig.parse(config.key) == config
