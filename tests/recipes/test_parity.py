"""A parity test of two small arms, what its JSON says, and a run that SIGTERM ends and that goes on."""

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter

from recipes import parity, readme_tables
from recipes.compare_verdict import UNKNOWN
from recipes.parity_arms import DONE, Arm
from recipes.parity_plot import plot_parity
from recipes.parity_results import collect, thinned
from recipes.parity_verdicts import worst_ratio
from recipes.runs import TAGS, read_run

ROOT = Path(__file__).parents[2]
EXTRA = (
    *("--training.steps=6", "--training.local_batch_size=2", "--training.seq_len=64", "--metrics.log_freq=1"),
    *("--validation.steps=2", "--validation.local_batch_size=2", "--validation.seq_len=64", "--validation.freq=3"),
)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole small test: Mixtral's debug model in BF16 and in FP8, at once."""
    folder = tmp_path_factory.mktemp("parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.delenv("RANK", raising=False)
        arguments = ["--models=mixtral", "--arms=bf16:3,tokenwise:3", "--jobs=2", f"--folder={folder}"]
        assert parity.main([*arguments, f"--out={folder / 'parity.json'}", "--", *EXTRA]) == 0
    return folder


def test_json_has_every_run_and_a_verdict(parted: Path) -> None:
    found = json.loads((parted / "parity.json").read_text())
    assert {"date", "gpu", "versions", "command"} <= set(found["environment"])
    assert found["environment"]["command"].startswith("python -m recipes.parity ")
    bf16, fp8 = found["runs"]
    assert (bf16["name"], fp8["name"]) == ("mixtral bf16:3", "mixtral tokenwise:3")
    for run in found["runs"]:
        assert (run["model"], run["seed"], run["steps"], run["tokens"]) == ("mixtral", 3, 6, 6 * 2 * 64)
        assert [step for step, _ in run["curve"]] == [1, 2, 3, 4, 5, 6]
        assert [step for step, _ in run["val_curve"]] == [1, 3, 6]
        assert 6 < run["final_test_loss"] < 9
        assert run["final_val_loss"] == pytest.approx(run["val_curve"][-1][1], abs=1e-5)
    assert bf16["curve"][0][1] == pytest.approx(fp8["curve"][0][1], abs=1e-3), "weights and data of the same seed"
    verdict = found["verdicts"][0]
    assert verdict["gap"] == pytest.approx(fp8["final_val_loss"] - bf16["final_val_loss"], abs=1e-5)
    assert (verdict["gaps"], verdict["band"]) == ({"3": verdict["gap"]}, None)
    assert (parted / "parity_mixtral.png").read_bytes().startswith(b"\x89PNG")


WORKERS = (
    *("--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=3"),
    *("--training.dataloader.pin_memory", "--validation.dataloader.num_workers=1"),
)


def train(arm: Arm, folder: Path, *extra: str, stop_at: int = -1) -> str:
    """Runs one arm, with SIGTERM to all its processes once it has logged step `stop_at`; its output."""
    command, output = [sys.executable, *arm.command(folder, [*EXTRA, *extra])[1:]], ""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, **options) as process:
        for line in process.stdout:
            output += line
            if re.search(rf"step: +{stop_at} +loss", line):
                os.killpg(process.pid, signal.SIGTERM)  # as torchrun does
    assert process.returncode == 0, output
    assert not re.search("Traceback|Exception|Error|num_workers|pin_memory' argument", output), output
    assert not alive_in_group(process.pid)
    return output


def alive_in_group(group: int) -> list[str]:
    """Processes of a group; dead ones that nobody has waited for do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(pgrp) == group and state != "Z" else []
    return found


def test_sigterm_saves_and_the_same_command_goes_on_bit_for_bit(
    parted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with workers that load batches, to what a run without them had.

    Not Llama4: torchtitan's balancing counts the tokens of a validation too, and a checkpoint has no counts.
    """
    monkeypatch.delenv("RANK", raising=False)
    arm = Arm(model="mixtral", recipe="tokenwise", seed=3, steps=6)
    step = int(re.search(r"Stopped by SIGTERM after step (\d+)", train(arm, tmp_path, *WORKERS, stop_at=2))[1])
    assert 2 <= step < 6
    assert f"Training starts at step {step + 1}" in train(arm, tmp_path, *WORKERS)
    for tag in (TAGS["loss"], TAGS["val_loss"], TAGS["test_loss"], TAGS["grad_norm"]):
        whole, cut = (read_run(arm.home(folder)).series(tag) for folder in (parted, tmp_path))
        assert whole == cut


# The numbers, from runs that nobody trained


def record(arm: Arm, folder: Path, val: list[float], norm: float) -> Arm:
    """Writes a finished run of validation losses at steps 10, 20, ... and gradient norms `norm`, but 1 at first."""
    home = arm.home(folder)
    writer = SummaryWriter(str(home / "tb" / "a"))
    for i, loss in enumerate(val):
        step = 10 * (i + 1)
        writer.add_scalar(TAGS["val_loss"], loss, step)
        writer.add_scalar(TAGS["loss"], loss + 0.5, step)
        writer.add_scalar(TAGS["grad_norm"], norm if i else 1.0, step)
        writer.add_scalar(TAGS["tokens_per_second"], 1000.0 * step, step)
        writer.add_scalar(TAGS["memory_gib"], 2.0, step)
    writer.close()
    (home / "run.json").write_text('{"schema": 1, "data": {"global_batch_size": 4, "seq_len": 8}}')
    (home / DONE).write_text("{}")
    return arm


@pytest.fixture
def recorded(tmp_path: Path) -> list[Arm]:
    runs = {
        ("bf16", 1): ([5.0, 4.0, 3.0, 2.00], 1.0),
        ("bf16", 2): ([5.0, 4.3, 3.1, 2.02], 1.1),
        ("tokenwise", 1): ([5.0, 4.0, 3.0, 2.05], 1.2),
        ("tokenwise", 2): ([5.0, 4.0, 3.0, 1.97], 1.0),
        ("delayed", 2): ([5.0, 4.5, 3.4, 2.40], 0.5),
    }
    return [record(Arm(model="m", recipe=r, seed=s, steps=40), tmp_path, *of) for (r, s), of in runs.items()]


def test_a_rule_is_held_against_bf16_of_its_seeds_and_the_band_of_all(recorded: list[Arm], tmp_path: Path) -> None:
    """Gaps of tokenwise: +0.05 and -0.05. The band is the largest spread since half of the run: 0.3 at step 20."""
    delayed, tokenwise = collect(recorded, tmp_path)["verdicts"]
    assert (tokenwise["name"], tokenwise["seeds"]) == ("m tokenwise", [1, 2])
    assert tokenwise["gaps"] == {"1": pytest.approx(0.05, abs=1e-5), "2": pytest.approx(-0.05, abs=1e-5)}
    assert tokenwise["gap"] == pytest.approx(0.0, abs=1e-5)
    assert tokenwise["standard_error"] == pytest.approx(0.05, abs=1e-5)
    assert tokenwise["gap_to_all_seeds"] == pytest.approx(0.0, abs=1e-5)
    assert tokenwise["band"] == pytest.approx(0.3, abs=1e-5)
    line = "m tokenwise - BF16 = {} at step 40 (mean of seeds 1, 2), band 0.3000: same (validation loss)"
    assert tokenwise["line"] in (line.format("+0.0000"), line.format("-0.0000"))
    assert (delayed["gap"], delayed["verdict"]) == (pytest.approx(0.38, abs=1e-5), "worse")
    assert (delayed["standard_error"], delayed["gap_to_all_seeds"]) == (None, pytest.approx(0.39, abs=1e-5))


def verdict_of(recorded: list[Arm], folder: Path, last: float, steps: int = 40) -> str:
    """Of one more rule with seed 1 whose last validation loss is `last`; BF16's is 2.0, the band 0.3."""
    arm = record(Arm(model="m", recipe="rowwise", seed=1, steps=steps), folder, [5.0, 4.0, 3.0, last], 1.0)
    return collect([*recorded[:2], arm], folder)["verdicts"][0]["verdict"]


@pytest.mark.parametrize(
    ("last", "verdict"),
    [(2.004, "same"), (1.996, "same"), (2.1, "inside the band"), (2.4, "worse"), (1.6, "better"), (math.nan, "worse")],
)
def test_words(recorded: list[Arm], tmp_path: Path, last: float, verdict: str) -> None:
    assert verdict_of(recorded, tmp_path, last) == verdict


def test_a_run_of_a_few_steps_is_not_judged(recorded: list[Arm], tmp_path: Path) -> None:
    assert verdict_of(recorded, tmp_path, 2.0, steps=9) == UNKNOWN


def test_gradient_norms_are_held_against_the_same_seeds(recorded: list[Arm], tmp_path: Path) -> None:
    """Two logged steps a window; the first full window has (1 + norm) / 2 in it, the others norm."""
    found = collect(recorded, tmp_path)
    runs = {run["name"]: run["grad_norm_ratio"] for run in found["runs"]}
    assert runs["m bf16:1"] is None
    assert runs["m bf16:2"]["ratio"] == pytest.approx(1.1, abs=1e-4)
    assert runs["m tokenwise:1"] == {"ratio": 1.2, "step": 30, "window": 2, "against": "m_bf16_1"}
    assert runs["m delayed:2"]["ratio"] == pytest.approx(0.5 / 1.1, abs=1e-4)
    both = found["verdicts"][1]["grad_norm_ratio"]
    assert (both["ratio"], both["against"]) == (pytest.approx(2.2 / 2.1, abs=1e-4), "m_bf16_1, m_bf16_2")


@pytest.mark.parametrize(("every", "window"), [(1, 200), (2, 100), (10, 20), (400, 1)])
def test_gradient_norms_are_means_over_200_steps_however_often_they_are_logged(every: int, window: int) -> None:
    curves = [dict.fromkeys((1, *range(every, 2001, every)), 1.0) for _ in range(2)]
    runs = [SimpleNamespace(series={TAGS["grad_norm"]: curve}.__getitem__, label="bf16") for curve in curves]
    assert worst_ratio(runs[:1], runs[1:])["window"] == window


def test_readme_table_has_a_row_for_bf16_and_one_a_rule(recorded: list[Arm], tmp_path: Path) -> None:
    found = {"environment": parity.environment(1, []), **collect(recorded, tmp_path)}
    for run in found["runs"]:
        run["final_test_loss"] = 3.0
    lines = readme_tables.parity(found).splitlines()
    assert lines[2] == "| m BF16 | 1, 2 | 2.0100 | 3.0000 |  |  |  | 1.100 |  |"
    assert lines[3] == "| m delayed | 2 | 2.4000 | 3.0000 | +0.3800 |  | 0.3000 | 0.455 | worse |"
    assert lines[4].replace("-0.0000", "+0.0000") == (
        "| m tokenwise | 1, 2 | 2.0100 | 3.0000 | +0.0000 | 0.0500 | 0.3000 | 1.048 | same |"
    )
    assert len([line for line in lines if line.startswith("| ")]) == 5


def test_runs_that_are_not_done_are_left_out(recorded: list[Arm], tmp_path: Path) -> None:
    (recorded[0].home(tmp_path) / DONE).unlink()
    found = collect(recorded, tmp_path)
    assert [run["name"] for run in found["runs"]] == ["m bf16:2", "m delayed:2", "m tokenwise:1", "m tokenwise:2"]
    assert {verdict["band"] for verdict in found["verdicts"]} == {None}
    (recorded[1].home(tmp_path) / DONE).unlink()
    assert collect(recorded, tmp_path)["verdicts"] == []
    assert all(run["grad_norm_ratio"] is None for run in collect(recorded, tmp_path)["runs"])


def test_pictures_are_drawn_of_whatever_is_there(recorded: list[Arm], tmp_path: Path) -> None:
    for arms in (recorded, recorded[:1], recorded[2:]):
        found = {"environment": parity.environment(1, []), **collect(arms, tmp_path)}
        plot_parity(found, "m", tmp_path / "m.png")
        assert (tmp_path / "m.png").stat().st_size > 10_000


def test_thinned_curves_keep_the_last_step() -> None:
    points = thinned({step: float(step) for step in range(1, 1001)})
    assert len(points) == 200
    assert points[-1] == [1000, 1000.0]
    assert len({b[0] - a[0] for a, b in itertools.pairwise(points)}) == 1
