"""Which modules a config picks, what is left out and why: cases 2 and 7."""

import pytest
from torch import nn

from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from converters.selection import matches
from tests.converters.models import expert_names, in_fp8, llama4

REFERENCE = FP8GroupedExpertsConfig(backend="reference")


def test_case_02_patterns_match_whole_path_components() -> None:
    model = llama4()
    report = convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["experts"]))
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert type(model.layers["0"].moe.shared_experts.w1) is nn.Linear
    assert any(s.fqn == "layers.0.moe.shared_experts.w1" for s in report.skipped)


@pytest.mark.parametrize(
    ("fqn", "pattern", "expected"),
    [
        ("layers.0.moe.experts", "experts", True),
        ("layers.0.moe.shared_experts", "experts", False),
        ("layers.0.moe.shared_experts", "*experts", True),
        ("layers.10.moe.experts", "layers.1", False),
        ("layers.1.moe.experts", "layers.1", True),
        ("layers.3.moe.experts", "layers.[0-2]", False),
        ("layers.2.moe.experts", "layers.[0-2].moe", True),
        ("layers.2.moe.experts", "layers.*.experts", False),  # a wildcard is one component
        ("layers.2.moe.experts", "layers.*.*.experts", True),
        ("experts", "layers.0.experts", False),
    ],
)
def test_case_02_what_a_pattern_matches(fqn: str, pattern: str, expected: bool) -> None:
    assert matches(fqn, pattern) is expected


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("output", "layers.0.moe.experts"),  # tt#4008
        ("layers.1.moe.expert", "layers.1.moe.experts"),
        ("layers.7", r"layers\.\d\.moe\.experts"),
        ("shared_experts", r"layers\.\d\.moe\.experts"),
        ("layers.0.moe.experts.w1", "layers.0.moe.experts"),
    ],
)
def test_case_07_a_pattern_without_a_match_lists_near_names(pattern: str, near: str) -> None:
    model = llama4()
    with pytest.raises(ValueError, match=rf"'{pattern}' matches no expert module.*{near}"):
        convert(model, FP8GroupedExpertsConfig(backend="reference", fqns=["layers.0", pattern]))
    assert not in_fp8(model)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"skip_first_layers": 1}, (1, 2, 3)),
        ({"skip_last_layers": 1}, (0, 1, 2)),
        ({"skip_first_layers": 1, "skip_last_layers": 2}, (1,)),
        ({"fqns": ["layers.[1-3]"], "skip_last_layers": 1}, (1, 2)),
    ],
    ids=str,
)
def test_layers_can_be_left_out(options: dict, layers: tuple[int, ...]) -> None:
    model = llama4()
    report = convert(model, FP8GroupedExpertsConfig(backend="reference", **options))
    assert in_fp8(model) == expert_names(*layers)
    assert {w.fqn for w in report.converted} == expert_names(*layers)
    left = {s.fqn for s in report.skipped if s.fqn.endswith(".experts")}
    assert left == {f"layers.{i}.moe.experts" for i in range(4)} - {f"layers.{i}.moe.experts" for i in layers}


def test_leaving_everything_out_is_an_error_with_the_reason() -> None:
    first = r"layers\.0\.moe\.experts and 3 more: experts in the first 9 layers \(skip_first_layers\)\. Remove the"
    with pytest.raises(ValueError, match=f"converts nothing: {first}"):
        convert(llama4(), FP8GroupedExpertsConfig(backend="reference", skip_first_layers=9))


def test_report_accounts_for_every_module_with_weights() -> None:
    model = llama4(moe_every=2)
    report = convert(model, REFERENCE)
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    told = {w.fqn.rpartition(".")[0] for w in report.converted} | {s.fqn for s in report.skipped}
    assert told == owners
    assert (report.converter, report.recipe, report.backend) == ("fp8.grouped_experts", "tokenwise", "reference")
    first = report.converted[0]
    assert (first.fqn, first.shape, first.dtype) == ("layers.1.moe.experts.w1", (4, 96, 64), "float32")
    assert model.conversion_reports == [report]
    assert "6 expert weights in FP8 (tokenwise, reference backend)" in report.summary()
