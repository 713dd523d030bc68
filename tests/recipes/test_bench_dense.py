"""The bench of dense layers, and what its file decides."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from converters import dense_break_even, weight_cache
from converters.dense_break_even import DenseWork, Measured, costs_of, dense_work, load_measured, speed_ratio, too_small
from converters.dense_config import FP8DenseConfig
from converters.dense_selection import select
from converters.fp8_dense import convert_dense
from recipes import bench_dense, bench_tables
from tests.converters.models import in_fp8, llama4
from tests.converters.test_conversion import ONE, job

CPU = torch.device("cpu")


def costs(kind: str = "linear") -> list[Measured]:
    """Times that follow the formula: FP8 has half of BF16's time a product, and a larger fixed one."""
    sizes = [(T, K, N) for T in (64, 512, 4096) for K, N in ((64, 64), (256, 1024), (2048, 512))]
    rows = []
    for T, K, N in sizes:
        products, weight, rest = T * K * N * 1e-9, K * N * 1e-9, T * (K + N) * 1e-9
        warm = 0.05 + products + 5 * rest
        rows.append(Measured(kind, T, K, N, 0.02 + 2 * products + 3 * weight, warm + 30 * weight, warm))
    return rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the shapes for a GPU")
def test_the_tool_runs_and_its_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "dense.json"
    assert bench_dense.main(["--rounds", "1", "--seconds", "0", "--out", str(file)]) == 0
    assert [row["case"] for row in json.loads(file.read_text())["cases"]] == ["MLP", "wq, wk, wv", "wo"]
    assert [(m.kind, m.T, m.K, m.N) for m in load_measured(file)] == [
        ("mlp", 64, 64, 96),
        ("linear", 64, 64, 128),
        ("linear", 64, 64, 64),
    ]
    printed = capsys.readouterr().out
    assert "ours, cold" in printed
    assert "Without a GPU: tiny shapes, no torchao, BF16 is not compiled" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the sizes for a GPU")
def test_sizes_are_not_measured_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What they are for decides which layers of a GPU run stay in BF16."""
    with pytest.raises(SystemExit, match="2"):
        bench_dense.main(["--sizes", "--out", str(tmp_path / "dense_h200.json")])
    assert "--sizes is for a GPU, and there is none" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_cold_quantizes_again_and_warm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench_dense.TINY[1]
    found = bench_dense.variants(case, CPU, FP8DenseConfig(), with_torchao=False)
    x = torch.randn(case.T, case.K, dtype=torch.bfloat16, requires_grad=True)
    upstreams = [torch.randn(case.T, N, dtype=torch.bfloat16) for N in case.N]
    made = []
    quantize = weight_cache.quantize
    monkeypatch.setattr(weight_cache, "quantize", lambda *a, **k: made.append(1) or quantize(*a, **k))
    counts = []
    for name in ("warm", "warm", "cold", "cold", "warm"):
        found[name].step(x, upstreams)
        counts.append(len(made))
    assert counts == [1, 1, 2, 3, 3]


def test_a_table_shows_times_and_ratios() -> None:
    environment = {"gpu": "G", "date": "D", "versions": dict.fromkeys(("torch", "triton", "torchao"), "1")}
    row = {"case": "wo", "T": 16384, "K": 64, "N": 64, "bf16_ms": 2.0, "cold_ms": 1.0, "warm_ms": 0.8}
    console = Console(width=150, file=io.StringIO())
    console.print(bench_dense.table({"environment": environment, "cases": [row]}))
    printed = console.file.getvalue()
    assert "1.000 ms  2.00x" in printed
    assert "forward + backward, G, D" in printed
    assert "torchao rowwise" not in printed, "not measured"


def test_a_table_of_a_cpu_names_no_gpu_called_none() -> None:
    environment = {"gpu": "none", "date": "D", "versions": dict.fromkeys(("torch", "triton", "torchao"), "1")}
    title = str(bench_dense.table({"environment": environment, "cases": []}).title)
    assert title.startswith("forward + backward, without a GPU, D")
    console = Console(width=150, file=io.StringIO())
    bench_tables._conditions(environment | {"numerics": "N"}, console)
    assert console.file.getvalue().startswith("without a GPU, D")


def test_the_fit_finds_the_costs_it_was_made_with() -> None:
    measured = costs()
    for T, K, N in ((100, 128, 128), (16384, 4096, 4096)):
        bf16 = 0.02 + 2e-9 * T * K * N + 3e-9 * K * N
        warm = 0.05 + 1e-9 * T * K * N + 5e-9 * T * (K + N)
        assert speed_ratio(costs_of(measured), T, K, N, 1) == pytest.approx(bf16 / (warm + 30e-9 * K * N), rel=1e-6)
        assert speed_ratio(costs_of(measured), T, K, N, 4) == pytest.approx(bf16 / (warm + 7.5e-9 * K * N), rel=1e-6)


def test_no_cost_is_negative() -> None:
    """Times that shrink with the weight's size, as noise may have it: none of that is extrapolated."""
    noisy = [Measured("linear", 64, K, 64, 1.0 - K * 1e-4, 1.0, 1.0) for K in (64, 512, 4096)]
    assert speed_ratio(costs_of(noisy), 64, 10**6, 64, 1) > 0


def test_small_layers_are_named_and_large_ones_not() -> None:
    units, _ = select(llama4(n_layers=2, moe_every=2), FP8DenseConfig())
    measured = costs() + costs("mlp")
    assert {u.fqn for u in units} == set(too_small(units, DenseWork(tokens=64, micro_batches=1), measured, True))
    assert not too_small(units, DenseWork(tokens=10**7, micro_batches=1), measured, True)
    some = too_small(units, DenseWork(tokens=4000, micro_batches=64), measured, True)
    assert "layers.0.feed_forward" not in some  # 64 x 256
    assert "layers.0.attention.wo" in some  # 64 x 64
    assert "4,000 tokens x 64 x 64, where FP8 has 0." in some["layers.0.attention.wo"]
    assert not too_small(units, DenseWork(tokens=64, micro_batches=1), [], True)


def test_tensor_parallelism_makes_layers_smaller() -> None:
    units, _ = select(llama4(n_layers=2, moe_every=2), FP8DenseConfig())
    whole, cut = (too_small(units, DenseWork(tokens=1, micro_batches=1, tp=tp), costs(), True) for tp in (1, 2))
    assert "1 tokens x 64 x 128" in whole["layers.0.attention"]
    assert "1 tokens x 64 x 64" in cut["layers.0.attention"]
    assert "1 tokens x 32 x 64" in cut["layers.0.attention.wo"]


@pytest.mark.parametrize("option", ["bf16", "warn"])
def test_small_layers_stay_in_bf16_on_hopper(
    option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them may: a small recipe must run with the same converters on a GPU."""
    monkeypatch.setattr("converters.fp8_dense.load_measured", lambda: costs() + costs("mlp"))
    monkeypatch.setattr("converters.capability.hopper_problem", lambda: None)
    model = llama4(n_layers=2, moe_every=2)
    config = FP8DenseConfig(backend="hopper", below_break_even=option)
    report = convert_dense(model, config, DenseWork(tokens=64, micro_batches=1))
    small = [s for s in report.skipped if s.reason.startswith("too small: 64 tokens x 64 x")]
    assert (len(in_fp8(model)), len(small)) == ((0, 14) if option == "bf16" else (14, 0))
    assert ("kept in BF16" if option == "bf16" else "train with more tokens at a time") in caplog.text


def test_what_a_job_sends_through_its_dense_layers() -> None:
    job_config = job("fp8.dense")
    job_config.training.local_batch_size, job_config.training.seq_len = 2, 8192
    job_config.training.global_batch_size = 8
    assert dense_work(job_config, ONE) == DenseWork(tokens=16384, micro_batches=4, tp=1, uses_once=False)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    assert load_measured(file) == []
    file.write_text('{"cases": [{"case": "scout", "M": 1}]}')
    with pytest.raises(ValueError, match=r"does not hold measured dense layers"):
        load_measured(file)


def test_the_shipped_table_if_there_is_one() -> None:
    """Scout's layers pay with 16,384 tokens, and a layer of 64 x 64 with 64 tokens does not."""
    for kind in ("linear", "mlp"):
        if cases := [m for m in load_measured(dense_break_even.RESULTS) if m.kind == kind]:
            assert speed_ratio(costs_of(cases), 16384, 5120, 8192, 1) > 1
            assert speed_ratio(costs_of(cases), 64, 64, 64, 1) < 1


def test_an_unknown_accumulate_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_dense.main(["--accumulate", "exact"])
    assert "--accumulate: exact is unknown: choose one of fast, precise_wgrad, precise" in capsys.readouterr().err
