"""recipes.bench on the reference backend: what it measures, not how fast."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from converters import weight_cache
from converters.config import Numerics
from recipes import bench, bench_dense
from recipes.bench import _parser, chosen, main, results, sqnr_db
from recipes.bench_cases import CASES, TINY, Case, bf16, group_ends, make_inputs, ours, parse_shape

CPU = torch.device("cpu")


def test_tiny_run_writes_what_the_readme_table_and_break_even_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "results" / "bench.json"
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
    printed = capsys.readouterr().out
    assert "48,32,64,3" in printed
    assert "columns of dy, x" in printed
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


def test_unknown_case_and_bad_shape_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["--cases", "scout,tin"]) == 2
    assert "--cases tin: choose of scout, " in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ValueError, match=r"--shape '1,2,3' must be four whole numbers"):
        parse_shape("1,2,3")
    with pytest.raises(ValueError, match=r"--shape '64,40,64,2': .* multiples of 16"):
        parse_shape("64,40,64,2")


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
