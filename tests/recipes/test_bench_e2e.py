"""bench_e2e: its commands, its reading of a trace, its table; the tool itself on the debug recipe."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.config import JobConfig

from recipes import bench_e2e
from recipes.bench_e2e import CLEAN_STEPS, LOG_FREQ, PROFILED, STEPS, Job, jobs, measure, show
from recipes.trace import kind_of, read_trace, short_name, step_kernels


def test_every_run_is_a_command_and_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = jobs(["recipes/llama4"], ["fsdp", "fsdp_ep"], 2, tmp_path, ["--training.seq_len=64"])
    assert [(r.layout, r.precision) for r in runs] == [
        (layout, p)
        for layout in ("fsdp", "fsdp_ep")
        for p in ("bf16", "fp8 experts, wires in bf16", "fp8 experts", "fp8")
    ]
    assert len({r.folder for r in runs}) == 8
    for r in runs:
        assert ("--parallelism.expert_parallel_degree=2" in r.command) == (r.layout == "fsdp_ep")
        assert f"--job.config_file=recipes/llama4_{'bf16' if r.precision == 'bf16' else 'fp8'}.toml" in r.command
        assert ("--model.converters=fp8.grouped_experts" in r.command) == ("experts" in r.precision)
        assert any("fp8_dispatch" in a for a in r.command) == ("wires" in r.precision)
        assert r.command[-1] == "--training.seq_len=64"


def test_one_gpu_has_no_wires_and_a_recipe_may_name_a_flavor(tmp_path: Path) -> None:
    runs = jobs(["recipes/llama4", "recipes/mixtral:debug_bias"], ["single"], 1, tmp_path, [])
    assert [r.name for r in runs] == [
        f"{model} single {p}" for model in ("llama4", "debug_bias") for p in ("bf16", "fp8 experts", "fp8")
    ]
    assert ["--model.flavor=debug_bias" in r.command for r in runs] == [False] * 3 + [True] * 3


def test_speed_is_that_of_steps_as_a_user_logs_them_and_the_profiled_one_is_ordinary() -> None:
    assert JobConfig().metrics.log_freq == LOG_FREQ
    logged = {s for s in range(1, STEPS + 1) if s == 1 or s % LOG_FREQ == 0 or s == STEPS}
    assert set(CLEAN_STEPS) == {s for s in logged if LOG_FREQ < s < PROFILED}
    profiling = JobConfig().profiling
    assert max(CLEAN_STEPS) <= PROFILED - profiling.profiler_active - profiling.profiler_warmup
    assert not logged & {PROFILED, PROFILED + 1}
    assert PROFILED < STEPS < 2 * PROFILED - profiling.profiler_warmup, "one trace"


def test_a_run_reports_the_speed_between_compilation_and_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    series = {
        "throughput(tps)": {1: 1.0, 10: 2.0, 20: 300.0, 30: 600.0, 37: 9.0},
        "memory/max_active(GiB)": {1: 3.0, 37: 2.0},
        "loss_metrics/global_avg_loss": {1: 8.0, 37: 7.0},
        "grad_norm": {1: 1.0, 37: 2.0},
    }
    monkeypatch.setattr(bench_e2e, "read_run", lambda folder: SimpleNamespace(series=series.__getitem__))
    job = Job(name="n", recipe="r", layout="single", precision="bf16", command=("true",), folder=tmp_path / "run")
    found = measure(job, 100)
    assert found["tokens_per_second_per_gpu"] == 400, "as many tokens at each speed"
    assert (found["peak_gib"], found["final_loss"], found["grad_norm"]) == (3.0, 7.0, 2.0)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam...", "optimizer"),
        ("triton_poi_fused_add_mul_0", "other"),
        ("rows_kernel", "gemm"),
        ("wgrad_kernel", "gemm"),
        ("_rows_kernel", "quantize"),
        ("_dswiglu_kernel", "quantize"),
    ],
)
def test_kernels_are_sorted_by_what_they_do(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_names_of_kernels_are_cut_to_what_tells_them_apart() -> None:
    apply = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    assert short_name(f"{apply}TensorListMetadata<1>, at::native::LpNormFunctor<float>>(int)") == (
        "multi_tensor_apply_kernel LpNormFunctor"
    )
    assert short_name("rows_kernel") == "rows_kernel"


def test_bytes_and_times_of_a_trace(tmp_path: Path) -> None:
    def kernel(name: str, ts: float, dur: float, **args: object) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}

    gather = {"Collective name": "_allgather_base", "dtype": "Byte", "In msg nelems": 100, "Out msg nelems": 200}
    scatter = {"Collective name": "_reduce_scatter_base", "dtype": "Float", "In msg nelems": 50, "Out msg nelems": 25}
    swap = {"Collective name": "all_to_allv", "dtype": "BFloat16", "In msg nelems": 10, "Out msg nelems": 12}
    events = [
        kernel("ncclDevKernel_AllGather", 0, 1000, **gather),
        kernel("ncclDevKernel_ReduceScatter", 500, 1000, **scatter),
        kernel("ncclDevKernel_SendRecv", 1500, 500, **swap),
        kernel("nvjet_x", 1000, 3000),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e9},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    read = read_trace(path)
    assert (read["all_gather_bytes"], read["reduce_scatter_bytes"], read["all_to_all_bytes"]) == (200, 200, 24)
    assert read["split_ms"] == {"communication": 2.5, "gemm": 3.0, "communication_exposed": 1.0, "step": 4.0}
    assert read["kernels"][0] == {"name": "nvjet_x", "ms": 3.0, "calls": 1}


def test_kernels_of_the_step_before_do_not_count() -> None:
    def mark(step: int, ts: float) -> dict:
        return {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": ts, "dur": 100}

    def launch(correlation: int, ts: float, kind: str = "cuda_runtime") -> dict:
        return {"cat": kind, "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "args": {"correlation": correlation}}

    def kernel(name: str, correlation: int, ts: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": 10, "args": {"correlation": correlation}}

    events = [mark(1, 0), mark(2, 100), launch(7, 50), launch(8, 150), launch(9, 160, "cuda_driver")]
    events += [kernel("late", 7, 120), kernel("ours", 8, 170), kernel("triton", 9, 250), kernel("unknown", 5, 101)]
    assert [e["name"] for e in step_kernels(events)] == ["ours", "triton"]


def test_a_failed_run_shows_in_the_table(capsys: pytest.CaptureFixture) -> None:
    show(
        [
            {
                "name": "fsdp bf16",
                "recipe": "recipes/llama4",
                "layout": "fsdp",
                "precision": "bf16",
                "error": "exit 1",
                "log": [],
            }
        ]
    )
    assert "exit 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("throughput(tps)", "lacks throughput(tps)"),
        ("memory/max_active(GiB)", "lacks memory/max_active(GiB)"),
        ("loss_metrics/global_avg_loss", "lacks loss_metrics/global_avg_loss"),
        ("grad_norm", "lacks grad_norm"),
        (20, "lacks throughput(tps) of step 20"),
    ],
    ids=str,
)
def test_a_run_that_lacks_a_number_is_a_failed_one(
    lost: str | int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = ("throughput(tps)", "memory/max_active(GiB)", "loss_metrics/global_avg_loss", "grad_norm")
    series = {tag: {} if tag == lost else {s: 1.0 for s in (1, 10, 20, 30, 37) if s != lost} for tag in tags}
    monkeypatch.setattr(bench_e2e, "read_run", lambda folder: SimpleNamespace(series=series.__getitem__))
    job = Job(name="n", recipe="r", layout="single", precision="bf16", command=("true",), folder=tmp_path / "run")
    found = measure(job, 100)
    assert message in found["error"]
    assert "tokens_per_second_per_gpu" not in found


def test_a_run_without_events_is_a_failed_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    job = Job(name="n", recipe="r", layout="single", precision="bf16", command=("true",), folder=tmp_path / "run")
    found = measure(job, 100)
    assert "holds no TensorBoard events" in found["error"]
    show([found])
    assert "n failed: " in capsys.readouterr().out


def test_half_a_trace_takes_no_number_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(series=lambda tag: dict.fromkeys((1, 10, 20, 30, 37), 1.0))
    monkeypatch.setattr(bench_e2e, "read_run", lambda folder: run)
    job = Job(name="n", recipe="r", layout="single", precision="bf16", command=("true",), folder=tmp_path / "run")
    trace = job.folder / "profile_traces" / f"iteration_{PROFILED}" / "rank0_trace.json"
    trace.parent.mkdir(parents=True)
    trace.write_text('{"traceEvents": [')
    found = measure(job, 100)
    assert (found["peak_gib"], found["trace"][:8]) == (1.0, "no JSON:")


def test_torchrun_is_this_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment need not be activated."""
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ("torchrun", "--no-such-option")
    job = Job(name="usage", recipe="r", layout="single", precision="bf16", command=command, folder=tmp_path / "run")
    assert measure(job, 100)["error"] == "exit 2"
    assert "--nproc" in (tmp_path / "run" / "log.txt").read_text()
