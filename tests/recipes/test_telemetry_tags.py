"""Telemetry's names and figures, its options, and the table at the end of a run."""

import io
import math

import pytest
from rich.console import Console

from converters.telemetry_config import FP8TelemetryConfig
from recipes.gradient_groups import group_of
from recipes.telemetry_table import TelemetrySummary, telemetry_table
from recipes.telemetry_tags import agreement, load_figures, loads, operand_figures, sqnr_db


@pytest.mark.parametrize(
    ("fqn", "group"),
    [
        ("tok_embeddings.weight", "embedding"),
        ("layers.0.attention.wq.weight", "attention"),
        ("layers.0.attention.q_norm.weight", "norms"),
        ("layers.0.attention_norm.weight", "norms"),
        ("layers.1.moe.experts.w1", "experts"),
        ("layers.1.moe.router.gate.weight", "router"),
        ("layers.1.moe.shared_experts.w2.weight", "shared_expert"),
        ("layers.0.feed_forward.w1.weight", "dense_ffn"),
        ("norm.weight", "norms"),
        ("output.weight", "head"),
        ("something.else", "other"),
    ],
)
def test_groups_of_parameters(fqn: str, group: str) -> None:
    assert group_of(fqn) == group


def test_figures_of_records():
    record = [2.0, 0.5, -0.25, 3, 12, 1, 20, 0, 100.0, 0.1]
    assert operand_figures(record) == {
        "amax": 2.0,
        "flushed": 0.25,
        "saturated": 0.05,
        "scale_min": 0.25,
        "scale_max": 0.5,
        "sqnr_db": pytest.approx(30),
    }
    assert operand_figures([0.0, -math.inf, -math.inf, 0, 0, 0, 0, 0, 0.0, 0.0]) == {}  # no row
    zeros = operand_figures([0.0, -math.inf, -math.inf, 0, 0, 0, 64, 0, 0.0, 0.0])
    assert zeros == {"amax": 0.0, "flushed": 0.0, "saturated": 0.0}
    assert (sqnr_db(1.0, 0.0), sqnr_db(1.0, math.nan) != sqnr_db(1.0, math.nan)) == (200.0, True)
    assert load_figures([0, 0], None) == {}
    assert load_figures([6, 2, 0, 0], [0.5, 0.5, 0.0, 0.0])["twin_agreement"] == 0.75
    assert agreement([1.0, 0.0], [0.0, 1.0]) == 0


def test_loads_keep_the_order_of_more_than_ten_experts():
    counts = list(range(12))
    scalars = {f"fp8/layers.0.moe/{k}": {5: v} for k, v in load_figures(counts, None).items()}
    assert loads(scalars) == {"layers.0.moe": {5: [c / sum(counts) for c in counts]}}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": -1}, r"every = -1 must be a whole number"),
        ({"every": True}, r"every = True must be a whole number"),
        ({"twin": "run"}, r"twin = 'run' needs every = N"),
        ({"every": 1, "twin": 3}, r"twin = 3 must be the folder"),
    ],
)
def test_options_are_checked(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FP8TelemetryConfig(**options)


def test_the_table_names_the_worst():
    seen = TelemetrySummary()
    for step, sqnr, flushed in ((1, 31.0, 0.5), (2, 20.0, 0.0)):
        seen.add(step, {"fp8/a/g/sqnr_db": sqnr, "fp8/a/g/flushed": flushed, "fp8/b/g/sqnr_db": 31.4})
    seen.add(3, {"fp8/a/g/sqnr_db": math.nan, "fp8/b/g/sqnr_db": 30.0, "fp8/l.moe/load_max_over_mean": 1.5})
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(telemetry_table(seen, "runs/x"))
    text = " ".join(console.export_text().split())
    assert "g gradient of the output" in text
    assert "nan dB 50 %" in text
    assert "a, step 3" in text
