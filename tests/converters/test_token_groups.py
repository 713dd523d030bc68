"""Cases 11-16 at the expert MLP: what groups, padding and extreme rows have broken elsewhere."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.config import Numerics
from tests.helpers import (
    GROUPS,
    NAMES,
    Experts,
    exact_mlp,
    fp8_mlp,
    make_experts,
    poison_freed_memory,
    sqnr_db,
    with_tail,
)

RECIPES = pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])


def assert_close_to_float64(experts: Experts, recipe: str, floor_db: float = 22.0) -> None:
    """Output and every gradient, as a whole and for each expert alone, so that one wrong expert cannot hide."""
    exact, actual = exact_mlp(experts), fp8_mlp(experts, Numerics(recipe=recipe))
    for name in NAMES:
        assert actual[name].isfinite().all(), name
        assert sqnr_db(exact[name], actual[name]) > floor_db, name
        rows = experts.sizes if name in ("out", "x") else (1,) * len(experts.sizes)
        for e, (wanted, got) in enumerate(
            zip(*(t[name][: sum(rows)].split(rows) for t in (exact, actual)), strict=True)
        ):
            empty = experts.sizes[e] == 0
            assert not got.any() if empty else sqnr_db(wanted, got) > floor_db - 2, (name, e)


def assert_same_bits(wanted: dict, actual: dict, rows: int | None = None) -> None:
    for name in NAMES:
        cut = slice(rows) if name in ("out", "x") else slice(None)
        assert torch.equal(wanted[name][cut], actual[name][cut]), name


@RECIPES
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_case_11_rows_past_the_last_offset_reach_nothing(recipe: str, value: float) -> None:
    experts = make_experts(GROUPS["unaligned"], tail=13)
    poison_freed_memory()
    poisoned = fp8_mlp(with_tail(experts, value), Numerics(recipe=recipe))
    assert_same_bits(fp8_mlp(with_tail(experts, 0.0), Numerics(recipe=recipe)), poisoned)
    assert not poisoned["out"][experts.rows :].any()
    assert not poisoned["x"][experts.rows :].any()


@RECIPES
@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns", "bf16"])
def test_case_12_experts_without_a_token_get_exactly_zero_gradients(recipe: str, wgrad: str) -> None:
    """256 experts, 20 tokens, freed memory full of nan."""
    sizes = tuple(1 if e % 13 == 5 else 0 for e in range(256))
    experts = make_experts(sizes, D=16, H=16)
    empty = torch.tensor(sizes) == 0
    for _ in range(3):
        poison_freed_memory()
        actual = fp8_mlp(experts, Numerics(recipe=recipe, wgrad=wgrad))
        for name in ("w1", "w2", "w3"):
            assert not actual[name][empty].any(), name
            assert actual[name][~empty].flatten(1).any(1).all(), name
    assert all(sqnr_db(wanted, actual[name]) > 21 for name, wanted in exact_mlp(experts).items())


@RECIPES
@pytest.mark.parametrize("groups", [g for g in GROUPS if g not in ("unaligned", "no_token")])
def test_case_13_lopsided_groups(recipe: str, groups: str) -> None:
    floor = 20.0 if groups == "more_experts_than_tokens" else 22.0  # three rows: fewer errors to average
    assert_close_to_float64(make_experts(GROUPS[groups]), recipe, floor)


@RECIPES
@pytest.mark.parametrize("tail", [0, 16], ids=["no_rows", "only_padding"])
def test_case_13_a_rank_that_receives_no_token_at_all(recipe: str, tail: int) -> None:
    experts = with_tail(make_experts(GROUPS["no_token"], tail=tail), math.nan)
    poison_freed_memory()
    actual = fp8_mlp(experts, Numerics(recipe=recipe))
    assert actual["out"].shape == actual["x"].shape == (tail, 64)
    assert not any(t.any() for t in actual.values())


@RECIPES
def test_case_14_unaligned_groups_without_padding(recipe: str) -> None:
    assert GROUPS["unaligned"] == (44, 1, 7, 0, 17)
    assert_close_to_float64(make_experts(GROUPS["unaligned"], tail=9), recipe)


@RECIPES
@given(
    sizes=st.lists(st.integers(0, 23), min_size=1, max_size=7).map(tuple),
    tail=st.integers(0, 9),
    D=st.sampled_from([16, 32, 80]),
    H=st.sampled_from([16, 48]),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_case_14_each_group_is_what_it_is_alone(recipe: str, sizes: tuple[int, ...], tail: int, D: int, H: int) -> None:
    """No group sees its neighbours, whatever the sizes: bit for bit."""
    experts = make_experts(sizes, D, H, tail=tail)
    together, begin = fp8_mlp(experts, Numerics(recipe=recipe)), 0
    for e, size in enumerate(sizes):
        alone = fp8_mlp(experts.only(e), Numerics(recipe=recipe))
        part = {n: t[begin : begin + size] if n in ("out", "x") else t[e : e + 1] for n, t in together.items()}
        assert_same_bits(alone, part)
        begin += size


@RECIPES
def test_case_15_zero_padding_inside_a_group_changes_nothing(recipe: str) -> None:
    """What torchtitan's expert parallelism does: each group is filled up to 16 rows with zeros, empty ones too."""
    experts = make_experts((5, 0, 20))
    padded = replace(experts, x=_pad(experts.x), upstream=_pad(experts.upstream), sizes=(16, 16, 32))
    wanted, actual = (fp8_mlp(e, Numerics(recipe=recipe)) for e in (experts, padded))
    real = [*range(5), *range(32, 52)]
    for name in ("out", "x"):
        assert not actual[name][[*range(5, 32), *range(52, 64)]].any(), name
        actual[name] = actual[name][real]
    for name in NAMES:  # the same terms, in the order that BLAS chooses for so many rows: on some CPUs another one
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-5, atol=1e-7)


def _pad(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:5], torch.zeros(27, 64), rows[5:], torch.zeros(12, 64)])


@RECIPES
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**40])
def test_case_15_gradients_do_not_depend_on_the_size_of_their_neighbours(recipe: str, scale: float) -> None:
    experts = make_experts((24, 24))
    x, upstream = experts.x.clone(), experts.upstream.clone()
    upstream[24:] *= scale
    actual = fp8_mlp(replace(experts, x=x, upstream=upstream), Numerics(recipe=recipe))
    wanted = fp8_mlp(experts, Numerics(recipe=recipe))
    for name in NAMES[1:]:
        cut = slice(24) if name == "x" else slice(1)
        assert torch.equal(actual[name][cut], wanted[name][cut]), name


@RECIPES
@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_case_16_rows_of_nearly_nothing_stay_finite(recipe: str, value: float) -> None:
    experts = make_experts((8, 8))
    x, upstream = experts.x.clone(), experts.upstream.clone()
    x[3], upstream[12] = value, value
    actual = fp8_mlp(replace(experts, x=x, upstream=upstream), Numerics(recipe=recipe))
    assert all(t.isfinite().all() for t in actual.values())
    assert actual["out"][3].abs().max() <= 1e-30
    others = [r for r in range(16) if r != 3]
    assert torch.equal(actual["out"][others], fp8_mlp(experts, Numerics(recipe=recipe))["out"][others])


@RECIPES
def test_case_16_one_3e38_stays_in_its_row(recipe: str) -> None:
    """y1 * y3 of that row is past float32: inf and nan are right there, and nowhere else in the output."""
    experts = make_experts((8, 8))
    x = experts.x.clone()
    x[3, 7] = 3e38
    out = fp8_mlp(replace(experts, x=x), Numerics(recipe=recipe))["out"]
    assert not out[3].isfinite().any()
    others = [r for r in range(16) if r != 3]
    assert torch.equal(out[others], fp8_mlp(experts, Numerics(recipe=recipe))["out"][others])


@RECIPES
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "upstream", "w1", "w2", "w3"])
def test_case_16_inf_and_nan_of_one_expert_stay_visible_and_stay_there(recipe: str, bad: float, where: str) -> None:
    experts = make_experts((8, 8))
    tensor = getattr(experts, where).clone()
    tensor.view(2, -1)[0, 5] = bad
    actual = fp8_mlp(replace(experts, **{where: tensor}), Numerics(recipe=recipe))
    healthy, exact = fp8_mlp(experts, Numerics(recipe=recipe)), exact_mlp(replace(experts, **{where: tensor}))
    seen = [name for name in NAMES if not exact[name].isfinite().all()]
    assert len(seen) >= 2
    for name in NAMES:
        first, second = actual[name].view(2, -1)
        assert torch.equal(second, healthy[name].view(2, -1)[1]), f"{name} of the other expert"
        assert name not in seen or not first.isfinite().all(), f"{name} hides it"
