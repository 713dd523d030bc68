"""The parts of recipes.bench are what a step does: the same calls of the backend, with the same data, in its order."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from converters import mlp_gradients, weight_cache
from converters.backends import reference
from converters.numerics import Accumulate, Numerics, Wgrad
from recipes import bench_parts
from recipes.bench_cases import TINY, Case, Inputs, change_weights, make_inputs, ours
from recipes.bench_parts import COLD, GEMMS, WARM, WEIGHTS, parts, run_parts

CPU = torch.device("cpu")
ALL = [Numerics(wgrad=w, accumulate=a) for w, a in product(get_args(Wgrad), get_args(Accumulate))]
CALLS = ("groups", "quantize_rows", "quantize_weight", "gemm_rows", "gemm_wgrad", "gemm_wgrad_hp", "wgrad_operand")
CALLS += ("wgrad_operand_hp", "swiglu_rows", "dswiglu_rows")
PLAIN = ("swiglu", "dswiglu")  # of high precision: who calls them has imported them
MANY_ROWS = Case("many rows", 512, 32, 48, 2)
Calls = list[tuple[str, Any]]


def seen(value: Any) -> Any:
    """`value` as something that compares: a tensor by its dtype, shape and bytes."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()
    if is_dataclass(value):
        return {f.name: seen(getattr(value, f.name)) for f in fields(value)}
    return [seen(v) for v in value] if isinstance(value, list) else value


def recorded(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Where all calls go from now on."""
    calls: Calls = []

    def record(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append((name, {k: seen(v) for k, v in bound.arguments.items()}))
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(reference, name, record(name, getattr(reference, name)))
    for name in PLAIN:
        function = getattr(reference, name)
        for module in (mlp_gradients, bench_parts):
            monkeypatch.setattr(module, name, record(name, function))
    return calls


def third_step(calls: Calls, step: Callable[[], Any]) -> Calls:
    """The calls of a step that two others came before: what they have kept is kept."""
    weight_cache.clear()
    for _ in range(3):
        calls.clear()
        step()
    return list(calls)


def cold_parts(i: Inputs, n: Numerics) -> None:
    """As `parts` runs them."""
    change_weights(i)
    run_parts(i, replace(n, cache=True, used_once=True), lambda name: None)


@pytest.mark.parametrize("case", [TINY, MANY_ROWS], ids=lambda c: c.name)
@pytest.mark.parametrize("n", ALL, ids=str)
def test_parts_are_the_calls_of_a_step(n: Numerics, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    i, calls = make_inputs(case, CPU, seed=0), recorded(monkeypatch)
    found = third_step(calls, lambda: cold_parts(i, n))
    for cold in (True, False):
        variant = ours(i, n, cold=cold)
        expected = third_step(calls, lambda v=variant: v.step(i.g))
        mine = found if cold else [call for call in found if call[0] != "quantize_weight"]
        assert [name for name, _ in mine] == [name for name, _ in expected]
        assert all(a == b for a, b in zip(mine, expected, strict=True))


def test_both_ways_to_quantize_a_weight_are_among_the_cases_above() -> None:
    made = [mlp_gradients.makes_both(c.M, make_inputs(c, CPU, seed=0).w1) for c in (TINY, MANY_ROWS)]
    assert made == [True, False]


@pytest.mark.parametrize("n", ALL, ids=str)
def test_quantizing_the_weights_is_all_that_the_weights_parts_do(n: Numerics, monkeypatch: pytest.MonkeyPatch) -> None:
    i, calls, part_of = make_inputs(TINY, CPU, seed=0), recorded(monkeypatch), []

    def mark(name: str) -> None:
        part_of.extend((name, call) for call, _ in calls)
        calls.clear()

    change_weights(i)
    run_parts(i, replace(n, cache=True, used_once=True), mark)
    assert {name for name, call in part_of if call == "quantize_weight"} == set(WEIGHTS)
    assert {call for name, call in part_of if name in WEIGHTS} == {"quantize_weight"}
    assert {name for name, call in part_of if call.startswith("gemm_")} == GEMMS.keys()
    calls.clear()
    found = parts(TINY, i, n, steps=4)
    assert [name for name, _ in calls].count("quantize_weight") == (2 + 4) * len(WEIGHTS)  # two to warm up
    assert list(found)[-2:] == [WARM, COLD]
    assert found.keys() - {WARM, COLD} == {name for name, _ in part_of}
    assert ("columns of dy, x" in found) == (n.wgrad != "bf16")
    assert ("dy, h in high precision" in found) == (n.wgrad != "fp8")
