"""recipes.bench on the reference backend: what it measures, not how fast."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torchtitan.models.moe.moe import _run_experts_grouped_mm

from converters import weight_cache
from converters.break_even import _terms, load_measured
from converters.config import Numerics
from recipes import bench, bench_dense, bench_sizes, readme_tables
from recipes.bench import _parser, chosen, main, results, sqnr_db
from recipes.bench_cases import CASES, TINY, Case, bf16, group_ends, make_inputs, ours, parse_shape
from recipes.timing import elapsed_ms

CPU = torch.device("cpu")


def test_tiny_run_writes_what_the_readme_table_reads(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "bench.json"
    assert main(["--shape", "48,32,64,3", "--rounds", "1", "--seconds", "0", "--parts", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert {"date", "gpu", "versions", "command"} <= data["environment"].keys()
    assert data["environment"]["command"].startswith("python -m recipes.bench --shape 48,32,64,3")
    (case,) = data["cases"]
    assert [case[k] for k in ("case", "M", "D", "H", "E")] == ["48,32,64,3", 48, 32, 64, 3]
    assert min(case[k] for k in ("bf16_ms", "cold_ms", "warm_ms")) > 0
    assert {"torchao_ms", "bf16_peak_bytes", "fp8_peak_bytes", "torchao_sqnr_db"} <= case.keys()
    assert all(case["sqnr_db"][k] > 20 for k in ("out", "dx", "dw13", "dw2"))
    assert case["parts"]["dW13"]["tflops"] > 0
    *each, warm, cold = (part["ms"] for part in case["parts"].values())
    assert [case["parts"][f"together, {which}"]["ms"] for which in ("warm", "cold")] == [warm, cold]
    assert cold == pytest.approx(sum(each))
    assert warm == pytest.approx(cold - sum(case["parts"][f"{weight} to FP8"]["ms"] for weight in ("W13", "W2")))
    printed = capsys.readouterr().out
    assert "48,32,64,3" in printed
    assert "columns of dy, x" in printed
    assert "together, warm: without W13 to FP8 and W2 to FP8, which only changed weights take." in printed
    if not torch.cuda.is_available():
        assert data["environment"]["bf16"] == "eager"
        assert "Without a GPU: BF16 is not compiled, memory is not measured." in printed
        assert [v for k, v in case.items() if k.endswith("peak_bytes")] == [None] * 3, "not measured is not 0"
        row = readme_tables.bench(data).splitlines()[2]
        assert row.endswith(" |  |  |")
        assert row.startswith("| 48,32,64,3 48 x 32 x 64, 3 experts | ")
    assert ("48,32,64,3: torchao fails: " in printed) == ("torchao_error" in case)


def test_without_a_gpu_only_the_tiny_case_runs_by_itself() -> None:
    assert chosen(_parser().parse_args([]), cuda=False) == [TINY]
    assert chosen(_parser().parse_args([]), cuda=True) == CASES
    assert [c.name for c in chosen(_parser().parse_args(["--cases", "small,scout"]), cuda=False)] == ["small", "scout"]


@pytest.mark.parametrize("make", [bench.main, bench_dense.main], ids=["experts", "dense"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rounds", "0"], "--rounds: 0 is no number of rounds: give a whole number, 1 or more"),
        (["--seconds", "-1"], "--seconds: -1 is no number of seconds: give 0 or more"),
        (["--out", "recipes"], "recipes is a folder: give the name of a file in it"),
        (["--out", "asets/b.json"], "there is no folder asets for b.json: make it, or mend its name"),
        (["--accumulate", "nope"], "--accumulate: nope is unknown: choose one of fast, precise_wgrad, precise"),
    ],
    ids=str,
)
def test_what_cannot_be_timed_or_written_is_refused_first(
    args: list[str],
    message: str,
    make: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit, match="2"):
        make(args)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the sizes for a GPU")
def test_sizes_are_not_measured_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What they are for decides which experts of a GPU run stay in BF16."""
    assert main(["--sizes", "--out", str(tmp_path / "experts_h200.json")]) == 2
    assert "--sizes is for a GPU, and there is none: leave it out to run the tiny shape of a CPU" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [["--cases", "scout"], ["--shape", "64,64,64,2"], ["--parts"]], ids=str)
def test_sizes_take_no_other_shapes(option: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^--sizes has sizes of its own: leave --cases, --shape and --parts out"):
        chosen(_parser().parse_args(["--sizes", *option]), cuda=True)


def test_sizes_tell_the_costs_apart_and_fit_a_gpu() -> None:
    found = chosen(_parser().parse_args(["--sizes"]), cuda=True)
    assert len(found) == len({(c.M, c.D, c.H, c.E) for c in found})
    assert max(3 * 2 * c.E * c.D * c.H for c in found) < 10e9
    terms = np.array([_terms(c.M, c.D, c.H, c.E) for c in found])
    relative = terms / (terms @ [0.1, 1e-11, 5e-9, 5e-9, 2e-3])[:, None]  # by costs such as an H200's
    assert np.linalg.cond(relative / np.linalg.norm(relative, axis=0)) < 20


def test_sizes_are_measured_as_break_even_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nothing but the choice of the sizes and the clock asks for a GPU."""
    cases = [Case("a", 64, 32, 48, 4), Case("b", 32, 32, 48, 2), Case("c", 32, 64, 32, 2)]
    monkeypatch.setattr(bench, "chosen", lambda args, cuda: cases)
    monkeypatch.setattr(bench, "device_ms", lambda run: elapsed_ms(run, 0.0, False))
    made, file = [], tmp_path / "experts.json"
    function = bench_sizes.expert_function
    monkeypatch.setattr(bench_sizes, "expert_function", lambda *a, **k: made.append(1) or function(*a, **k))
    assert main(["--sizes", "--rounds", "1", "--out", str(file)]) == 0
    assert [(m.M, m.D, m.H, m.E) for m in load_measured(file)] == [(c.M, c.D, c.H, c.E) for c in cases]
    assert len(made) == 2  # one compilation for each weight [H, D]
    environment = json.loads(file.read_text())["environment"]
    assert environment["command"].startswith("python -m recipes.bench --sizes --rounds 1 --out ")
    assert "32 x 48" in capsys.readouterr().out


def test_one_compilation_serves_all_rows_and_experts() -> None:
    """And nothing else is computed by it."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(_run_experts_grouped_mm, fullgraph=True, backend=counter)
    for case in (Case("a", 128, 32, 48, 4), Case("b", 256, 32, 48, 4), Case("c", 256, 32, 48, 8)):
        inputs = make_inputs(case, CPU, seed=0)
        assert min(sqnr_db(results(bf16(inputs), inputs.g), results(bf16(inputs, run), inputs.g)).values()) > 100
    assert counter.frame_count == 1


def test_help_and_flags_of_numerics(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--wgrad", "nope"])
    assert "--wgrad: nope is unknown: choose one of fp8, fp8_columns, bf16" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "default: all; without a GPU one tiny shape" in shown
    assert "It is for a GPU, as --cases is: both are refused without one." in shown
    assert "the reference backend and BF16 that is not compiled" in shown


def test_unknown_case_and_bad_shape_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["--cases", "scout,tin"]) == 2
    assert "--cases tin: choose of scout, " in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ValueError, match=r"--shape '1,2,3' must be four whole numbers"):
        parse_shape("1,2,3")
    with pytest.raises(ValueError, match=r"--shape '64,0,64,2': M, D, H and E must be positive"):
        parse_shape("64,0,64,2")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            "1000,64,64,2",
            "M = 1000 is no multiple of 16, but BF16's weight gradient and torchao take .*: give 992 or 1008",
        ),
        ("5,64,64,2", "M = 5 is .*: give 16[.]"),
        ("64,40,64,2", "D = 40 is no multiple of 16, but FP8 GEMMs take no other dims: give 32 or 48[.]"),
        ("64,64,72,2", "H = 72 is .*: give 64 or 80[.]"),
    ],
)
def test_a_shape_that_some_variant_refuses_is_refused_with_the_nearest(shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^--shape '{shape}': {message}"):
        parse_shape(shape)


def test_names_of_cases_may_have_spaces_around_but_not_be_missing(capsys: pytest.CaptureFixture) -> None:
    spaced = _parser().parse_args(["--cases", "scout, small "])
    assert [c.name for c in chosen(spaced, cuda=True)] == ["scout", "small"]
    for text in ("", " ", "scout,", "scout,,small"):
        with pytest.raises(SystemExit, match="2"):
            main(["--cases", text])
        assert f"--cases: {text!r} lacks a name: give one or more" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("case", [*CASES, TINY, Case("few rows", 16, 32, 32, 8)], ids=lambda c: c.name)
def test_groups_are_uneven_aligned_and_fill_the_rows(case: Case) -> None:
    ends = group_ends(case, seed=0)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32
    assert int(ends[-1]) == case.M
    assert (sizes >= 0).all()
    assert (sizes % 16 == 0).all()
    assert len(set(sizes.tolist())) > 1
    assert torch.equal(ends, group_ends(case, seed=0))


def test_cold_quantizes_again_each_step_and_warm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    quantize = weight_cache.quantize
    monkeypatch.setattr(weight_cache, "quantize", lambda *a, **k: calls.append(1) or quantize(*a, **k))
    weight_cache.clear()
    inputs = make_inputs(TINY, CPU, seed=0)
    counts = []
    for cold in (False, True):
        variant = ours(inputs, Numerics(), cold)
        variant.step(inputs.g)
        calls.clear()
        for _ in range(3):
            variant.step(inputs.g)
        counts.append(len(calls))
    assert counts == [0, 6]  # W13 and W2 in each of three steps


def test_gradients_of_both_variants_belong_to_the_same_function() -> None:
    inputs = make_inputs(TINY, CPU, seed=0)
    db = sqnr_db(results(bf16(inputs), inputs.g), results(ours(inputs, Numerics(), cold=False), inputs.g))
    assert min(db.values()) > 22
    wrong = results(ours(inputs, Numerics(), cold=False), inputs.g.flip(0))
    assert sqnr_db(results(bf16(inputs), inputs.g), wrong)["dx"] < 3
