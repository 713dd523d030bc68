"""The fit of costs to measurements, and what the committed measurements decide."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from converters import break_even, dense_break_even
from converters.measured_cost import fit, fit_all, fp8_speed, load_cases


def test_costs_are_found_although_a_product_costs_a_millionth_of_a_millionth_of_a_launch() -> None:
    costs = np.array([5e-2, 1e-14, 3e-9])
    terms = np.array([[1.0, M * D**2, M * D] for M in (1e3, 1e5, 1e7) for D in (256, 4096)])
    assert fit(terms, terms @ costs) == pytest.approx(costs, rel=1e-6)


def test_of_all_choices_of_costs_above_zero_the_best_is_taken() -> None:
    """By hand: of (a, 0, c) the normal equations give 10/91 and 44/91. Without the lowest cost time and again: one."""
    terms = np.array([[3.0, 2, 3], [3, 5, 2], [2, 2, 0], [4, 2, 5]])
    assert fit(terms, np.array([2.0, 1, 5, 5])) == pytest.approx([10 / 91, 0, 44 / 91])


def test_a_term_that_is_nowhere_costs_nothing_and_fewer_cases_than_terms_are_enough() -> None:
    assert fit(np.array([[1.0, 0.0]]), np.array([4.0])) == pytest.approx([4, 0])
    assert np.array([1.0, 2, 3]) @ fit(np.array([[1.0, 2, 3]]), np.array([4.0])) == pytest.approx(4)


@dataclass(frozen=True)
class Row:
    M: int
    bf16_ms: float
    cold_ms: float
    warm_ms: float


def test_the_first_micro_batch_is_cold_and_the_others_are_warm() -> None:
    cases = [Row(M, 2.0 * M, 4.0 * M, 1.0 * M) for M in (1, 2, 3)]
    costs = fit_all([[c.M] for c in cases], cases)
    assert [fp8_speed(costs, [7], n) for n in (1, 3)] == pytest.approx([2 / 4, 2 / ((4 + 1 + 1) / 3)])


def test_no_file_is_no_table_and_another_file_is_refused(tmp_path: Path) -> None:
    assert load_cases(tmp_path / "none.json", Row, "things") == []
    file, good = tmp_path / "bad.json", {"M": 1, "bf16_ms": 1.0, "cold_ms": 1.0, "warm_ms": 1.0}
    file.write_text(json.dumps({"cases": [good | {"more": 1}]}))
    assert load_cases(file, Row, "things") == [Row(1, 1.0, 1.0, 1.0)]
    times = [json.dumps({"cases": [good | {"cold_ms": wrong}]}) for wrong in (0.0, -1.0, None, "1", float("nan"))]
    for text in ("{", "[]", '{"cases": [{"M": 1}]}', '{"cases": [3]}', *times):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json does not hold measured things .*again, or delete it\.$"):
            load_cases(file, Row, "things")


# Which file, sizes and micro-batches, and whether FP8 is faster there. Experts: rows of each, D, H, E.
EXPERTS, DENSE = break_even, dense_break_even
KNOWN = [
    (EXPERTS, "", (1024, 5120, 8192, 16, 1), True),  # Scout: 1.57x in bench_h200.json
    (EXPERTS, "", (16, 512, 1024, 64, 1), False),
    (DENSE, "linear", (16384, 5120, 8192, 1), True),
    (DENSE, "mlp", (16384, 5120, 8192, 1), True),
    (DENSE, "linear", (64, 64, 64, 1), False),
    (DENSE, "mlp", (64, 64, 64, 1), False),
]
MEASURED = [known for known in KNOWN if known[0].RESULTS.exists()]


@pytest.mark.parametrize(("judge", "kind", "size", "faster"), MEASURED, ids=lambda v: str(getattr(v, "__name__", v)))
def test_committed_measurements_judge_the_large_and_the_small(judge, kind: str, size: tuple, faster: bool) -> None:
    cases = [m for m in judge.load_measured() if getattr(m, "kind", "") == kind]
    assert (judge.speed_ratio(judge.costs_of(cases), *size) > 1) == faster


def sizes(judge, case) -> tuple:
    return (case.M / case.E, case.D, case.H, case.E) if judge is EXPERTS else (case.T, case.K, case.N)


@pytest.mark.parametrize("judge", sorted({known[0] for known in MEASURED}, key=str), ids=lambda m: m.__name__)
def test_where_a_measurement_is_clear_the_fit_agrees(judge) -> None:
    """Clear: more than 1.2x of one on the other. The fit is of five numbers at most, and bends nowhere."""
    wrong = []
    for case in (measured := judge.load_measured()):
        alike = [m for m in measured if getattr(m, "kind", "") == getattr(case, "kind", "")]
        found, expected = judge.speed_ratio(judge.costs_of(alike), *sizes(judge, case), 1), case.bf16_ms / case.cold_ms
        if max(expected, 1 / expected) > 1.2 and (found > 1) != (expected > 1):
            wrong.append(f"{case}: {expected:.2f}x, by the fit {found:.2f}x")
    assert not wrong
