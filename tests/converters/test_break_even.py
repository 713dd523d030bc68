"""When is FP8 expected to be slower, and what does the converter do then?  On made-up measurements of known lines."""

import json
import logging
from pathlib import Path

import pytest
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters import capability, fp8_grouped_experts
from converters.break_even import RESULTS, Measured, Workload, load_measured, speed_ratio, workload
from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import FP8GroupedExpertsConverter, convert
from tests.converters.models import MixtralExperts, expert_names, in_fp8, llama4
from tests.converters.test_conversion import job

D, H = 64, 96  # of the test model, E = 4, top_k = 2
HOPPER = FP8GroupedExpertsConfig(backend="hopper")


def case(rows: int, E: int = 4, D: int = D, H: int = H, slower: float = 1.0) -> dict:
    """An expert takes 2 + rows / 100 ms in BF16; 3 + rows / 200 in cold FP8, equal at 200 rows, 1.5 less warm."""
    line = {"bf16_ms": 2 + rows / 100, "cold_ms": slower * (3 + rows / 200), "warm_ms": 1.5 + rows / 200}
    return {"case": "made up", "M": rows * E, "D": D, "H": H, "E": E, **{k: E * D * H * v for k, v in line.items()}}


def table(folder: Path, *cases: dict) -> list[Measured]:
    file = folder / "bench.json"
    file.write_text(json.dumps({"environment": {"gpu": "none"}, "cases": list(cases)}))
    return load_measured(file)


def ratio(measured: list[Measured], rows: float, micro_batches: int = 1, D: int = D, H: int = H, E: int = 4) -> float:
    return speed_ratio(measured, rows, D, H, E, micro_batches)


@pytest.mark.parametrize("rows", [1, 50, 100, 200, 777, 1000])
def test_between_and_below_measured_rows_the_line_holds(tmp_path: Path, rows: int) -> None:
    measured = table(tmp_path, case(1000), case(100), case(400, E=2))
    assert ratio(measured, rows) == pytest.approx((2 + rows / 100) / (3 + rows / 200))
    assert ratio(measured, rows, micro_batches=2) == pytest.approx((2 + rows / 100) / (2.25 + rows / 200))


def test_far_beyond_the_most_rows_the_last_ratio_stays(tmp_path: Path) -> None:
    assert ratio(table(tmp_path, case(100), case(1000)), 10**6) == pytest.approx(12 / 8)


def test_one_measured_case_is_one_ratio(tmp_path: Path) -> None:
    measured = table(tmp_path, case(100))
    assert [ratio(measured, rows) for rows in (1, 100, 9999)] == pytest.approx([3 / 3.5] * 3)


def test_a_fixed_time_below_zero_is_not_believed(tmp_path: Path) -> None:
    steep = case(200) | {"bf16_ms": 4 * D * H * 100.0}  # from 3 ms at 100 rows to 100 ms: -94 ms at none
    assert ratio(table(tmp_path, case(100), steep), 10) == pytest.approx(0.3 / 3.05)


def test_the_nearest_shape_decides_and_then_the_nearest_expert_count(tmp_path: Path) -> None:
    far = case(100, D=4 * D, slower=2)
    measured = table(tmp_path, far, case(100, slower=4), case(100, E=32, slower=8))
    found = [ratio(measured, 100, E=8), ratio(measured, 100, E=16), ratio(measured, 100, D=3 * D)]
    assert found == pytest.approx([3 / 14, 3 / 28, 3 / 7])


def test_no_file_is_no_table_and_another_file_is_refused(tmp_path: Path) -> None:
    assert load_measured(tmp_path / "none.json") == []
    for text in ("{", "[]", '{"cases": [{"M": 1}]}', '{"cases": [3]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"bad\.json is no result of recipes\.bench .*measure again, or delete it\.$"
        ):
            load_measured(tmp_path / "bad.json")


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_committed_measurement_is_read() -> None:
    measured = load_measured()
    assert len(measured) >= 2
    assert all(m.rows > 0 and m.bf16 > 0 and m.cold > 0.97 * m.warm > 0 for m in measured)
    assert all(m.cold >= m.warm for m in measured if m.E > 2)  # quantizing the weights of two is less than the noise


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
    monkeypatch.setattr(fp8_grouped_experts, "load_measured", lambda: table(tmp_path, case(100), case(1000)))


def tokens(rows: float) -> Workload:
    return Workload(tokens=rows * 4 / 2, micro_batches=1)


@pytest.mark.usefixtures("on_hopper")
def test_below_break_even_is_said_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    with caplog.at_level(logging.WARNING):
        convert(model, HOPPER, tokens(100))
    assert [r.getMessage() for r in caplog.records] == [
        "fp8.grouped_experts: layers.0.moe.experts and 3 more will get 100 rows an expert, where FP8 has 0.86x the "
        "speed of BF16 (bench_h200.json): train with more tokens at a time, or set below_break_even = 'bf16'."
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
