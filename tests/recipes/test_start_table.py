"""What a run says before its first step: what was converted, how, and what the FP8 copies take on this rank."""

from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console
from torch import nn

from converters.break_even import Workload
from converters.config import FP8GroupedExpertsConfig
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from converters.numerics import Numerics
from converters.selection import ConversionReport
from recipes.folded_names import collapse
from recipes.start_table import conversion_reports, start_table
from tests.converters.models import llama4
from tests.recipes.processors import model


@pytest.mark.parametrize(
    ("fqns", "folded"),
    [
        (["layers.0.w1", "layers.1.w1", "layers.0.w3", "layers.1.w3"], ["layers.{0..1}.{w1,w3}"]),
        (["layers.0.w1", "layers.1.w1", "layers.0.w3"], ["layers.{0..1}.w1", "layers.0.w3"]),
        (["layers.1.w", "layers.3.w", "layers.4.w"], ["layers.{1,3..4}.w"]),
        (["layers.10.w", "layers.9.w"], ["layers.{9..10}.w"]),
        (["layers.7.experts.0.w", "layers.7.experts.1.w"], ["layers.7.experts.0.w", "layers.7.experts.1.w"]),
        (["norm", "output"], ["norm, output"]),
        (["layers.2"], ["layers.2"]),
    ],
)
def test_collapse(fqns, folded):
    assert collapse(fqns) == folded


def test_reports_of_pipeline_stages_are_shown_once():
    one, other = (ConversionReport(f"fp8.{name}", "rowwise", "reference", (), ()) for name in ("dense", "other"))
    assert conversion_reports([model(one), model(one, other), model()]) == [one, other]


def lines(*parts: nn.Module) -> list[str]:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(start_table(list(parts)))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


ROWS = "layers.{0..3}.moe.experts.{w1,w3} 4 x 96 x 64 float32 768.0 KiB"  # 4 layers x 2 x 4 x 96 x 64 x 4 bytes


@pytest.mark.parametrize(
    ("config", "work", "settings", "kept", "here"),
    [
        (
            {},
            None,
            "wgrad = fp8, cache = true, accumulate = fast (the reference backend sums in float32)",
            "FP8 copies kept on this rank: 576.1 KiB (both layouts, for all uses in a step)",
            "384.1 KiB",
        ),
        (
            {"accumulate": "precise"},
            Workload(tokens=64, micro_batches=1),
            "wgrad = fp8, cache = true, accumulate = precise (the reference backend sums in float32)",
            "FP8 copies kept on this rank: 0.1 KiB between steps, up to 312.1 KiB in one (used once a step, then given "
            "up)",
            "216.1 KiB",
        ),
        (
            {"cache": False, "wgrad": "bf16"},
            None,
            "wgrad = bf16, cache = false, accumulate = fast (the reference backend sums in float32)",
            "FP8 copies kept on this rank: none between steps, up to 48.0 KiB in one (cache = false, quantized at each "
            "use)",
            "48.0 KiB",
        ),
        (
            {"recipe": "tensorwise", "backend": "emulated"},
            None,
            "wgrad = fp8, cache = true, accumulate = fast (the emulated backend sums in float32)",
            "FP8 copies kept on this rank: none (emulated, quantized at each use)",
            "none",
        ),
    ],
    ids=["often", "once", "off", "emulated"],
)
def test_memory_of_the_cache_and_how_gemms_are_computed(
    config: dict, work: Workload | None, settings: str, kept: str, here: str
) -> None:
    """4 layers x 3 weights x 4 x 96 x 64 bytes: 288 KiB a layout."""
    experts = llama4()
    convert(experts, FP8GroupedExpertsConfig(**{"backend": "reference", **config}), work)
    found = lines(experts)
    assert {settings, kept, f"{ROWS} {here}"} <= set(found)
    assert "converted E x N x K kept as parameters FP8 here" in found


def test_a_rank_of_a_pipeline_counts_its_own_layers() -> None:
    whole = llama4()
    convert(whole, FP8GroupedExpertsConfig(backend="reference", fqns=["layers.0"]))
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"1": whole.layers["1"]})})
    stage.conversion_reports = whole.conversion_reports
    assert "layers.0.moe.experts.{w1,w3} 4 x 96 x 64 float32 192.0 KiB other ranks" in lines(stage)
    assert not any("kept on this rank" in line for line in lines(stage))


@pytest.mark.parametrize("backend", ["reference", "emulated"])
def test_linear_layers(backend: str) -> None:
    dense = llama4(n_layers=1)
    recipe = {"reference": "tokenwise", "emulated": "tensorwise"}[backend]
    convert_dense(dense, FP8DenseConfig(backend=backend, recipe=recipe, fqns=["attention.wo"]))
    found = lines(dense)
    here = {"reference": "8.0 KiB", "emulated": "none"}[backend]
    assert f"layers.0.attention.wo.weight 64 x 64 float32 16.0 KiB {here}" in found
    (report,) = dense.conversion_reports
    assert report.summary().startswith("fp8.dense: 1 linear weight in FP8")
    assert found[0].startswith("fp8.dense: 1 weight in FP8")
    assert any(line.startswith("wgrad = fp8, cache = true, accumulate = precise_wgrad") for line in found)


@pytest.mark.parametrize("dense_first", [True, False])
def test_what_either_converter_took_is_not_left_as_it_is(dense_first: bool) -> None:
    both = llama4()
    dense = partial(convert_dense, both, FP8DenseConfig(backend="reference", skip_first_layers=1))
    experts = partial(convert, both, FP8GroupedExpertsConfig(backend="reference", skip_last_layers=1))
    for way in (dense, experts) if dense_first else (experts, dense):
        way()
    found = lines(both)
    assert any(line.endswith("in the first layer (skip_first_layers)") for line in found)
    assert "layers.3.moe.experts experts in the last layer (skip_last_layers)" in found
    assert any(line.startswith("layers.3.moe.experts routed experts: only the converter") for line in found)
    every = ("{0..3}.attention.", "{0..3}.moe.shared_experts", "{0..3}.moe.experts")  # no table has all four layers
    assert not any(name in line for name in every for line in found)


def test_on_a_gpu_sums_are_what_was_asked_for() -> None:
    asked = Numerics(backend="hopper", wgrad="fp8_columns", accumulate="precise_wgrad")
    report = ConversionReport("fp8.dense", "tokenwise", "hopper", (), (), numerics=asked)
    assert "wgrad = fp8_columns, cache = true, accumulate = precise_wgrad" in lines(model(report))
    report = replace(report, numerics=replace(asked, wgrad="bf16"))
    sums = "(as fast: sums of BF16 products are float32)"
    assert f"wgrad = bf16, cache = true, accumulate = precise_wgrad {sums}" in lines(model(report))
