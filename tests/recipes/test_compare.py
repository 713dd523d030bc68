"""recipes.compare on runs written with torch's SummaryWriter: what it says, and that it fails when it should."""

import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter
from torchtitan.config import JobConfig

from recipes.compare import main
from recipes.compare_numbers import match
from recipes.run_info import describe_run, write_run_info
from recipes.runs import TAGS, RunError, read_run

UNJUDGED = 2  # five steps are too few
STEPS = (1, 10, 20, 30, 40)
LOSSES = {1: 7.625, 10: 6.5, 20: 5.25, 30: 4.5, 40: 4.25}


def write_events(
    folder: Path,
    losses: dict[int, float],
    val: dict[int, float] | None = None,
    test: dict[int, float] | None = None,
    start: str = "a",
) -> None:
    writer = SummaryWriter(str(folder / "tb" / start))
    for step, loss in losses.items():
        rest = {"grad_norm": 1.0 + step / 64, "tokens_per_second": 100.0 * step, "memory_gib": 2.0, "mfu_percent": 25.0}
        for metric, value in {"loss": loss, **rest}.items():
            writer.add_scalar(TAGS[metric], value, step)
    for metric, points in (("val_loss", val), ("test_loss", test)):
        for step, loss in (points or {}).items():
            writer.add_scalar(TAGS[metric], loss, step)
    writer.add_text("run", "text is no scalar")
    writer.close()


def write_info(folder: Path, mfu_peak: tuple[float, str] | None = None, **changes: object) -> None:
    config = JobConfig().to_dict()
    config["debug"]["seed"] = 1
    config["validation"]["enable"] = True
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        config[section][key] = value
    settings = {"device": "CPU", "world_size": 1, "batch_degree": 1, "metrics_rank": 0, "mfu_peak": mfu_peak}
    write_run_info(folder, describe_run(config, **settings))


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """BF16, and FP8 whose loss is higher by 1/64 (1/32 at step 20) and whose validation loss is higher by 1/128."""
    bf16, fp8 = tmp_path / "bf16", tmp_path / "fp8"
    write_events(bf16, LOSSES, {20: 5.5, 40: 4.5})
    write_events(fp8, {s: v + (1 / 32 if s == 20 else 1 / 64) for s, v in LOSSES.items()}, {20: 5.5, 40: 4.5 + 1 / 128})
    write_info(bf16)
    write_info(fp8, model__converters=["fp8.grouped_experts"])
    return bf16, fp8


@pytest.fixture(autouse=True)
def _no_picture(request, monkeypatch):
    """Half a second each; the tests of the pictures draw them."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("recipes.compare_outputs.plot_report", lambda report, path: path.touch())


def compare(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_numbers_of_the_json(twins, tmp_path, capsys):
    assert compare(*twins, "--out", tmp_path / "out", "--smooth", 2, "--max-val-gap", 0.01) == 0
    report = json.loads((tmp_path / "out" / "compare.json").read_text())
    loss, val = report["metrics"]["loss"], report["metrics"]["val_loss"]
    assert loss["steps"] == list(STEPS)
    assert loss["gap"] == [1 / 64, 1 / 64, 1 / 32, 1 / 64, 1 / 64]
    assert loss["gap_smoothed"] == [1 / 64, 1 / 64, 3 / 128, 3 / 128, 1 / 64]
    assert loss["largest"]["step"] == 20
    assert loss["largest"]["gap"] == 1 / 32
    assert val["final"] == {"step": 40, "a": 4.5, "b": 4.5 + 1 / 128, "gap": 1 / 128, "gap_smoothed": 1 / 256}
    assert report["metrics"]["tokens_per_second"]["median"] == {"a": 2500.0, "b": 2500.0}  # step 1 is warm-up
    assert report["verdict"]["passed"] is True
    assert report["limits"] == {"loss": None, "val_loss": 0.01, "smooth": 2}
    assert report["config_differences"] == {"model.converters": [[], ["fp8.grouped_experts"]]}
    assert report["runs"]["b"]["run"]["versions"]["torchtitan"] == "0.2.2"
    out = capsys.readouterr().out
    assert "fp8 - bf16 = +0.0078 at step 40, limit 0.0100: same (validation loss)" in out
    assert out.count("torchtitan 0.2.2, torch ") == 2  # of both runs
    assert "Also different" not in out


def test_picture_is_a_png_that_shows_something(twins, tmp_path):
    assert compare(*twins, "--out", tmp_path, "--max-loss-gap", 0.02) == 0
    data = (tmp_path / "compare.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1800, 1260)
    at, pixels = 8, b""
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        pixels += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    rows = np.frombuffer(zlib.decompress(pixels), dtype=np.uint8)
    assert len(np.unique(rows)) > 50  # a blank picture has two byte values


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ((), 2),  # five steps are too few to judge
        (("--max-loss-gap", 1 / 64, "--smooth", 1), 0),  # a gap of exactly the limit holds
        (("--max-loss-gap", 0.0156, "--smooth", 1), 1),
        (("--max-loss-gap", 0.016, "--smooth", 5), 1),  # mean of five gaps is 6/320
        (("--max-val-gap", 1 / 128), 0),
        (("--max-val-gap", 0.0078), 1),
        (("--max-val-gap", 0), 1),
        (("--max-loss-gap", 1, "--max-val-gap", 0.001), 1),
    ],
)
def test_exit_code_follows_the_limits(twins, limits, code):
    assert compare(*twins, *limits) == code
    assert compare(*reversed(twins), *limits) == code  # a gap below zero counts as much


def test_failure_is_said_and_written(twins, capsys):
    assert compare(*twins, "--max-val-gap", 0.001) == 1
    assert "FAIL: validation loss gap +0.007812 is beyond 0.001" in capsys.readouterr().out
    verdict = json.loads((twins[1] / "compare.json").read_text())["verdict"]
    assert verdict["passed"] is False
    assert verdict["failures"] == ["validation loss gap +0.007812 is beyond 0.001"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "val_loss", "grad_norm"])
@pytest.mark.parametrize("both", [False, True])  # inf - inf is no gap either
def test_non_finite_never_passes(twins, capsys, value, where, both):
    for run in twins[not both :]:
        writer = SummaryWriter(str(run / "tb" / "b"))
        writer.add_scalar(TAGS[where], value, 40)
        if where != "loss":
            writer.add_scalar(TAGS["loss"], 4.25, 40)
        writer.close()
    limits = ("--max-loss-gap", 100, "--max-val-gap", 100)
    assert compare(*twins, *(limits if where != "val_loss" or not both else ())) == 1
    assert f"is {value} at step 40" in capsys.readouterr().out
    report = json.loads((twins[1] / "compare.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert report["metrics"][where]["final"]["b"] is None


@pytest.mark.parametrize("flag", ["--max-loss-gap", "--max-val-gap"])
@pytest.mark.parametrize("limit", ["nan", "inf", "-0.1", "much"])
def test_a_limit_that_limits_nothing_is_refused(twins, flag, limit, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(*twins, f"{flag}={limit}")
    assert flag in capsys.readouterr().err


def test_smoothing_over_no_step_is_refused(twins, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(*twins, "--smooth", 0)
    assert "0 steps cannot be averaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"debug__seed": 2}, "do not match in seed: 1 and 2"),
        ({"training__dataset": "jsonl"}, "do not match in data: dataset is 'c4_test' in A and 'jsonl' in B"),
        ({"training__dataset_path": "/data"}, "do not match in data: dataset_path is None in A and '/data' in B"),
        ({"training__seq_len": 64}, "do not match in data: seq_len is 2048 in A and 64 in B"),
        ({"training__local_batch_size": 2}, "do not match in data: global_batch_size is 8 in A and 2 in B"),
        ({"model__hf_assets_path": "other"}, "do not match in data: tokenizer"),
        ({"validation__steps": 3}, "do not match in data: validation steps"),
        ({"model__flavor": "other"}, "train different models"),
    ],
)
def test_runs_of_other_seed_data_or_model_are_refused(twins, capsys, changes, message):
    write_info(twins[1], **changes)
    assert compare(*twins, "--max-loss-gap", 1) == 2
    assert message in capsys.readouterr().err
    assert not (twins[1] / "compare.json").exists()


def test_same_global_batch_in_other_micro_batches_is_compared_with_a_note(twins, capsys):
    write_info(twins[1], training__local_batch_size=2, training__global_batch_size=8, optimizer__lr=0.5)
    assert compare(*twins) == UNJUDGED
    out = capsys.readouterr().out.replace("\n", " ")
    assert "Also different: optimizer.lr 0.0008 and 0.5; training.global_batch_size" in out


def test_runs_without_a_seed_are_refused(twins, capsys):
    for run in twins:
        write_info(run, debug__seed=None)
    assert compare(*twins) == 2
    assert "Neither run set debug.seed" in capsys.readouterr().err


def test_stock_runs_are_compared_with_a_note(twins, capsys):
    (twins[0] / "run.json").unlink()
    assert compare(*twins) == UNJUDGED
    assert "No run.json in bf16: seed and data could not be checked." in capsys.readouterr().out


def test_mfu_is_shown_with_its_peak_only(twins, capsys):
    assert compare(*twins) == UNJUDGED
    assert "MFU" not in capsys.readouterr().out
    for run in twins:
        write_info(run, mfu_peak=(989e12, "dense BF16 peak"))
    assert compare(*twins) == UNJUDGED
    assert "MFU %, of 989 TFLOP/s (dense BF16 peak)" in capsys.readouterr().out


def test_test_split_is_shown_where_both_have_it(twins, capsys):
    assert compare(*twins) == UNJUDGED
    out = capsys.readouterr().out
    assert "test loss" not in out
    # exp(4.5) and exp(4.5 + 1/128)
    assert "perplexity 90.0171 90.7231 +0.7060 1.0078" in " ".join(out.split())
    for run, loss, shown in zip(twins, (4.0, 4.25), (False, True), strict=True):
        write_events(run, LOSSES, {40: 4.5}, {40: loss}, start="b")
        assert compare(*twins) == UNJUDGED
        out = " ".join(capsys.readouterr().out.split())
        assert ("test loss" in out) == shown
    # one point has no largest gap; exp(4) and exp(4.25)
    assert (
        "test loss, step 40 4.000000 4.250000 +0.250000 1.0625 perplexity 54.5982 70.1054 +15.5073 1.2840 grad" in out
    )
    assert json.loads((twins[1] / "compare.json").read_text())["metrics"]["test_loss"]["final"]["gap"] == 0.25


def test_a_run_that_broke_is_worse_and_its_end_is_named(twins, capsys):
    write_events(twins[1], {30: math.nan}, start="b")  # replaces steps 30 and 40
    assert compare(*twins) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "fp8 has no end yet and is at step 30 (training loss nan): compared up to step 30." in out
    assert "fp8 against bf16: worse (fp8: training loss is nan at step 30 (1 such steps))" in out
    write_events(twins[0], {30: math.nan}, start="c")
    write_events(twins[1], LOSSES, start="c")
    assert compare(*twins) == UNJUDGED  # what broke is the reference
    assert "too short or too small to judge (bf16: training loss is nan" in capsys.readouterr().out


def test_steps_of_one_run_only_are_left_out_and_counted(twins, tmp_path, capsys):
    sparse = tmp_path / "sparse"
    write_events(sparse, {20: 5.25, 40: 4.25}, {40: 4.5})
    write_info(sparse)
    assert compare(twins[0], sparse) == UNJUDGED
    assert "2 logged steps match; 3 only in bf16, left out." in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--max-loss-gap", "--max-val-gap"])
def test_validation_limit_without_validation_is_refused(tmp_path, capsys, flag):
    for name in ("a", "b"):
        write_events(tmp_path / name, LOSSES)
    code = compare(tmp_path / "a", tmp_path / "b", flag, 1)
    assert code == (2 if flag == "--max-val-gap" else 0)
    assert code == 0 or "have no validation loss at a common step" in capsys.readouterr().err


def test_unreadable_folders_are_one_sentence(twins, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    for other, message in ((tmp_path / "gone", "is not a folder"), (empty, "holds no TensorBoard events")):
        assert compare(twins[0], other) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert compare(twins[0], twins[0]) == 2
    assert "the same folder" in capsys.readouterr().err
    (twins[1] / "run.json").write_text("{")
    assert compare(*twins) == 2
    assert "is not valid JSON" in capsys.readouterr().err
    with pytest.raises(RunError, match=r"holds 2 runs \(bf16/tb, fp8/tb\): name one"):
        read_run(tmp_path)


def test_match_takes_common_steps_and_averages_what_there_is():
    pair = match({1: 1.0, 2: 1.0, 3: 1.0, 9: 1.0}, {2: 2.0, 3: 4.0, 9: 1.0, 10: 5.0}, smooth=2)
    assert pair.steps == (2, 3, 9)
    assert pair.gap == (1.0, 3.0, 0.0)
    assert pair.smoothed == (1.0, 2.0, 1.5)
    assert pair.steps[pair.largest()] == 3
