"""When is FP8 expected to be slower, and what does the converter do then?  On made-up measurements of known lines."""

import json
import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

from converters import capability, fp8_grouped_experts
from converters.break_even import Measured, Workload, below_break_even, costs_of, load_measured, speed_ratio, workload
from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import FP8GroupedExpertsConverter, convert
from tests.converters.models import MixtralExperts, expert_names, in_fp8, llama4
from tests.converters.test_conversion import job

HOPPER = FP8GroupedExpertsConfig(backend="hopper")


def law(launches: float, products: float, weights: float, activations: float, expert: float) -> Callable[..., float]:
    """Time in ms of M rows in all and E experts of D x H."""
    return lambda M, D, H, E: (
        launches + products * M * D * H + weights * E * D * H + activations * M * (D + H) + expert * E
    )


def table(folder: Path, bf16: Callable, cold: Callable, warm: Callable) -> list[Measured]:
    """As recipes.bench --sizes writes it, with times by these laws."""
    rows = []
    for D, H, E, each in product((32, 256, 4096), (64, 1024), (2, 16), (10, 100, 5000)):
        size = {"M": each * E, "D": D, "H": H, "E": E}
        rows.append(size | {"case": "", "bf16_ms": bf16(**size), "cold_ms": cold(**size), "warm_ms": warm(**size)})
    file = folder / "experts.json"
    file.write_text(json.dumps({"environment": {"gpu": "none"}, "cases": rows}))
    return load_measured(file)


def lines(folder: Path) -> list[Measured]:
    """An expert takes 2 + rows / 100 in BF16; 3 + rows / 200 in cold FP8, equal at 200 rows, 1.5 less warm."""
    return table(folder, *(law(0, b, c, 0, 0) for b, c in ((1e-2, 2), (5e-3, 3), (5e-3, 1.5))))


# About what an H200 needs for one dense MLP (dense_h200.json), and 2 us for each further expert.
LAWS = law(0.05, 2.3e-11, 3e-9, 2.2e-9, 0.002), law(0.2, 1e-11, 6.5e-9, 7.5e-9, 0.002), law(0.2, 1e-11, 3e-9, 7.5e-9, 0)


@pytest.mark.parametrize(
    "size",
    [
        (1.5, 64, 96, 4),
        (16, 512, 1024, 64),
        (1024, 5120, 8192, 16),
        (10**6, 8192, 8192, 256),
    ],
    ids=str,
)
def test_the_costs_of_every_term_are_found_from_measurements(tmp_path: Path, size: tuple) -> None:
    measured, (rows, D, H, E) = table(tmp_path, *LAWS), size
    bf16, cold, warm = (t(rows * E, D, H, E) for t in LAWS)
    assert speed_ratio(costs_of(measured), *size, 1) == pytest.approx(bf16 / cold, rel=1e-6)
    assert speed_ratio(costs_of(measured), *size, 4) == pytest.approx(bf16 / (cold / 4 + warm * 3 / 4), rel=1e-6)


def test_small_experts_are_named_and_those_of_scout_are_not(tmp_path: Path) -> None:
    """Which never could happen to D = 512 when only experts of D >= 4096 were measured, 128 rows each and more."""
    measured, model = table(tmp_path, *LAWS), nn.ModuleDict()
    sizes = {"small": (512, 1024, 64, 6), "scout": (5120, 8192, 16, 1), "middle": (2048, 4096, 8, 2)}
    for name, (D, H, E, top_k) in sizes.items():
        with torch.device("meta"):
            moe = nn.ModuleDict({"experts": GroupedExperts(D, H, E, use_grouped_mm=True)})
        moe.router = nn.Identity()
        moe.router.top_k = top_k
        model[name] = moe
    experts = {f"{name}.experts": model[name]["experts"] for name in sizes}

    def named(tokens: float, **options: int) -> dict[str, str]:
        return below_break_even(model, experts, Workload(tokens=tokens, micro_batches=1, **options), measured)

    assert named(16384) == {"small.experts": "1,536 rows an expert, where FP8 has 0.82x the speed of BF16"}
    assert set(named(16)) == {"small.experts", "middle.experts", "scout.experts"}
    assert "scout.experts" not in named(16384, ep=8)
    assert "scout.experts" in named(16384, ep=8, tp=8)  # of two experts an eighth of H: launches take half of it
    assert not below_break_even(model, experts, Workload(tokens=16, micro_batches=1), [])


def dims(world_size: int = 1, **degrees: int) -> ParallelDims:
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    return ParallelDims(**ones | degrees, world_size=world_size)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({}, Workload(tokens=800, micro_batches=12)),
        ({"dp_shard": 2}, Workload(tokens=800, micro_batches=6)),
        ({"dp_shard": 4, "ep": 4}, Workload(tokens=3200, micro_batches=3, ep=4)),
        ({"cp": 2}, Workload(tokens=400, micro_batches=12)),
        ({"tp": 2}, Workload(tokens=800, micro_batches=12, tp=2)),
        ({"tp": 2, "dp_shard": 2, "ep": 4}, Workload(tokens=1600, micro_batches=6, ep=4)),  # all tokens of two batches
        ({"tp": 2, "ep": 2, "etp": 2, "dp_shard": 2}, Workload(tokens=1600, micro_batches=6, ep=2, tp=2)),
        ({"pp": 2}, Workload(tokens=200, micro_batches=48)),  # a pipeline cuts the local batch again
    ],
    ids=str,
)
def test_tokens_that_reach_the_experts(degrees: dict[str, int], expected: Workload) -> None:
    config = JobConfig()
    config.training.local_batch_size, config.training.seq_len, config.training.global_batch_size = 8, 100, 96
    config.parallelism.pipeline_parallel_microbatch_size, config.activation_checkpoint.mode = 2, "none"
    world = degrees.get("dp_shard", 1) * degrees.get("cp", 1) * degrees.get("tp", 1) * degrees.get("pp", 1)
    assert workload(config, dims(world, **degrees)) == expected


@pytest.mark.parametrize(
    ("recompute", "batch", "once"), [("none", 8, True), ("none", 16, False), ("full", 8, False)], ids=str
)
def test_a_weight_is_used_once_in_a_step_of_one_micro_batch_without_recomputation(
    recompute: str, batch: int, once: bool
) -> None:
    config = JobConfig()
    config.training.local_batch_size, config.training.global_batch_size = 8, batch
    config.activation_checkpoint.mode = recompute
    assert workload(config, dims()).uses_once == once


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that says it has a Hopper, with a table that breaks even at 200 rows an expert."""
    monkeypatch.setattr(capability, "hopper_problem", lambda: None)
    monkeypatch.setattr(fp8_grouped_experts, "load_measured", lambda: lines(tmp_path))


def tokens(rows: float) -> Workload:
    return Workload(tokens=rows * 4 / 2, micro_batches=1)


@pytest.mark.usefixtures("on_hopper")
def test_below_break_even_is_said_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    with caplog.at_level(logging.WARNING):
        convert(model, HOPPER, tokens(100))
    assert [r.getMessage() for r in caplog.records] == [
        "fp8.grouped_experts: layers.0.moe.experts and 3 more will get 100 rows an expert, where FP8 has 0.86x the "
        "speed of BF16 (experts_h200.json): train with more tokens at a time, or set below_break_even = 'bf16'."
    ]
    assert in_fp8(model) == expert_names(0, 1, 2, 3)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("work", [tokens(201), None, Workload(tokens=200, micro_batches=8)], ids=["more", "?", "warm"])
def test_nothing_is_said_where_fp8_is_faster_or_the_job_unknown(work: Workload | None, caplog) -> None:
    model = llama4()
    convert(model, FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16"), work)
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("on_hopper")
def test_bf16_keeps_them_and_reports_them(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    report = convert(model, FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16"), tokens(100))
    assert not in_fp8(model)
    assert not report.converted
    reason = "below break-even: 100 rows an expert, where FP8 has 0.86x the speed of BF16"
    assert [s.fqn for s in report.skipped if s.reason == reason] == [f"layers.{n}.moe.experts" for n in range(4)]
    assert report.summary().startswith("fp8.grouped_experts: 0 expert weights in FP8")
    assert f"4 {reason}" in report.summary()
    assert [r.getMessage()[-13:] for r in caplog.records if r.levelno == logging.WARNING] == ["kept in BF16."]


@pytest.mark.usefixtures("on_hopper")
def test_only_the_slow_modules_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    model.layers["2"].moe.router.top_k = 8  # four times the rows
    convert(model, FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16"), tokens(100))
    assert in_fp8(model) == expert_names(2)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "options",
    [{"backend": "reference"}, {"backend": "hopper", "experts": "sequential"}],
    ids=["reference", "sequential"],
)
def test_what_is_not_for_speed_is_not_judged(options: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    convert(model, FP8GroupedExpertsConfig(below_break_even="bf16", **options), tokens(1))
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.usefixtures("on_hopper")
def test_without_a_cache_every_micro_batch_is_cold() -> None:
    model = llama4()
    config = FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16", cache=False)
    convert(model, config, Workload(tokens=200, micro_batches=8))
    assert not in_fp8(model)


@pytest.mark.usefixtures("on_hopper")
def test_experts_of_others_are_not_judged() -> None:
    model = llama4()
    model.layers["0"].moe.experts = MixtralExperts()
    config = FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16", fqns=["layers.0.moe.experts"])
    convert(model, config, tokens(1))
    assert len(in_fp8(model)) == 2


def test_bf16_without_a_measurement_is_said(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(capability, "hopper_problem", lambda: None)
    monkeypatch.setattr(fp8_grouped_experts, "load_measured", lambda: [])
    model = llama4()
    convert(model, FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16"), tokens(1))
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert "keeps nothing in BF16, since " in caplog.text


@pytest.mark.usefixtures("on_hopper")
def test_the_converter_reads_the_jobs_batch() -> None:
    config = job(config=FP8GroupedExpertsConfig(backend="hopper", below_break_even="bf16"))
    for seq_len, stays in ((50, True), (101, False)):  # 4 x 50 tokens, two experts each of four: 100 rows
        config.training.local_batch_size, config.training.seq_len, model = 4, seq_len, llama4()
        FP8GroupedExpertsConverter(config, dims()).convert(model)
        assert (not in_fp8(model)) == stays
