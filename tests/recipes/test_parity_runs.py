"""The scheduler of a parity test, on a clock of its own and with stand-ins for train.py."""

import re
import signal
from pathlib import Path

import pytest

from recipes import parity, parity_runs
from recipes.issue1152 import __main__ as issue1152
from recipes.parity_arms import Arm, parse_arms
from recipes.parity_runs import Running, run_arms

ROOT = Path(__file__).parents[2]

SECONDS_A_STEP = parity_runs.POLL_SECONDS


class StandIn:
    """For train.py: a step at each poll, logged as torchtitan does; SIGTERM saves the step to go on from."""

    pid = 0

    def __init__(self, home: Path, steps: int, fails: bool) -> None:
        self.home, self.steps, self.fails, self.asked, self.returncode = home, steps, fails, False, None
        self.saved = home / "checkpoint" / "step"
        self.step = int(self.saved.read_text()) if self.saved.exists() else 0
        (home / "checkpoint").mkdir(exist_ok=True)
        (home / parity_runs.LOG).write_text("")
        with open(home / "starts", "a") as file:
            file.write(f"{self.step}\n")

    def send_signal(self, number: int) -> None:
        self.asked = number == signal.SIGTERM

    def poll(self) -> int | None:
        if self.asked:
            self.saved.write_text(str(self.step))
            self.returncode = 0
        elif self.step == self.steps:
            self.returncode = 3 if self.fails else 0
        else:
            self.step += 1
            with open(self.home / parity_runs.LOG, "a") as log:
                log.write(f"[titan] - INFO - step: {self.step:2}  loss: {8 / self.step:8.5f}  grad_norm:  1.0\n")
        return self.returncode


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> list[Arm]:
    """Three arms of 400 steps, 200 s each on a clock that goes on when somebody sleeps."""
    now = [0.0]
    monkeypatch.setattr(parity_runs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(parity_runs.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(parity_runs.subprocess, "Popen", None)

    def start(arm: Arm, folder: Path, jobs: int, extra: list[str]) -> Running:
        home = arm.home(folder)
        home.mkdir(parents=True, exist_ok=True)
        return Running(arm=arm, home=home, process=StandIn(home, arm.steps, "fails" in extra))

    monkeypatch.setattr(parity_runs, "_start", start)
    return [Arm(model="m", recipe=rule, seed=1, steps=400) for rule in ("delayed", "tokenwise", "bf16")]


def starts(arm: Arm, folder: Path) -> list[int]:
    """The step that each start of an arm began from."""
    file = arm.home(folder) / "starts"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_budget_cut_is_saved_and_the_next_call_goes_on(arms: list[Arm], tmp_path: Path) -> None:
    lines: list[str] = []
    fate = run_arms(arms, tmp_path, jobs=2, seconds=150, extra=[], say=lines.append)
    assert list(fate.values()) == ["stopped", "stopped", "waiting"]
    assert not starts(arms[2], tmp_path)
    fate = run_arms(arms, tmp_path, jobs=3, seconds=600, extra=[], say=lines.append)
    assert set(fate.values()) == {"done"}
    assert [len(starts(arm, tmp_path)) for arm in arms] == [2, 2, 1]
    asked_at = (150 - parity_runs.SAVE_SECONDS) / SECONDS_A_STEP
    assert starts(arms[0], tmp_path)[1] == pytest.approx(asked_at, abs=2), "it went on from what it saved"
    assert not (arms[0].home(tmp_path) / "checkpoint").exists(), "a finished run leaves no checkpoint"
    assert any("delayed:1: done after step 400, loss 0.02000" in line for line in lines)
    assert set(run_arms(arms, tmp_path, jobs=3, seconds=600, extra=[], say=lines.append).values()) == {"done"}
    assert [len(starts(arm, tmp_path)) for arm in arms] == [2, 2, 1], "what is done is left out"


def test_what_another_command_finished_is_not_taken_for_done(arms: list[Arm], tmp_path: Path) -> None:
    run_arms(arms, tmp_path, jobs=3, seconds=600, extra=["--training.seq_len=8"], say=lambda line: None)
    with pytest.raises(ValueError, match=r"m_delayed_1 was made by another command: .*seq_len=8"):
        run_arms(arms, tmp_path, jobs=3, seconds=600, extra=[], say=lambda line: None)


def test_no_run_starts_that_has_no_time_to_compile(arms: list[Arm], tmp_path: Path) -> None:
    fate = run_arms(arms, tmp_path, jobs=1, seconds=290, extra=[], say=lambda line: None)
    assert list(fate.values()) == ["done", "waiting", "waiting"]


def test_a_run_that_will_end_in_time_is_not_stopped(arms: list[Arm], tmp_path: Path) -> None:
    """It ends after 200 s; others were asked to save 45 s before the end of 215 s."""
    fate = run_arms(arms[:1], tmp_path, jobs=1, seconds=215, extra=[], say=lambda line: None)
    assert fate[arms[0]] == "done"


def test_a_failed_run_says_so_and_the_others_go_on(arms: list[Arm], tmp_path: Path) -> None:
    fate = run_arms(arms, tmp_path, jobs=1, seconds=1000, extra=["fails"], say=lambda line: None)
    assert all(re.match(r"failed with exit code 3\n(.*\n)*.*step: 400", what) for what in fate.values())
    assert not any(arm.is_done(tmp_path) for arm in arms)


def test_arms_are_every_rule_of_every_model_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arms = parse_arms("mixtral, llama4", "bf16:2, rowwise:1", ["--training.steps=7"])
    assert [arm.name for arm in arms] == ["mixtral bf16:2", "llama4 bf16:2", "mixtral rowwise:1", "llama4 rowwise:1"]
    assert {arm.steps for arm in arms} == {7}
    assert {arm.steps for arm in parse_arms("mixtral_300m", "bf16:1", [])} == {2000}


@pytest.mark.parametrize(
    ("models", "given", "message"),
    [
        ("mixtral", "bf16:1,delayd:1", "Arm 'delayd' is of no scale rule: choose one of bf16, tokenwise, .*, whole"),
        ("mixtral", "bf16:1,bf16:01", "Arm bf16:1 is named twice"),
        ("mixtral,mixtral", "bf16:1", "Model mixtral is named twice"),
        ("nobody", "bf16:1", r"Model 'nobody' has no recipes/nobody_bf16\.toml"),
        ("mixtral", "bf16", "Arm 'bf16' is not RULE:SEED"),
        ("mixtral", "bf16:one", "Arm 'bf16:one' is not RULE:SEED"),
    ],
)
def test_wrong_arms_are_refused(models: str, given: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message):
        parse_arms(models, given, [])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--training.steps=two"], "--training.steps=two must be a whole number, 1 or more"),
        (["--training.steps=0"], "--training.steps=0 must be a whole number"),
        (["--training.steps"], "--training.steps= must be a whole number"),
        (["--debug.seed", "4"], "'--debug.seed' is set for each arm by this command"),
        (["--job.dump-folder=out"], "'--job.dump-folder=out' is set for each arm"),
        (["bf16:2"], "'bf16:2' is no option of the runs: give those after --"),
    ],
)
def test_options_that_no_run_or_every_arm_would_take_are_refused(extra, message, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message):
        parse_arms("mixtral", "bf16:1", extra)


def test_steps_are_read_however_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of another length than expected would be started again for ever."""
    monkeypatch.chdir(ROOT)
    for extra in (["--training.steps", "7"], ["--training.steps=9", "--training.steps=7", "--metrics.log_freq=1"]):
        assert parse_arms("mixtral", "bf16:1", extra)[0].steps == 7


def test_fp8_and_bf16_of_one_seed_differ_in_fp8_alone() -> None:
    def options(rule: str, seed: int) -> set[str]:
        return set(Arm(model="mixtral", recipe=rule, seed=seed, steps=1).command(Path("out"), ["--training.steps=3"]))

    different = {option.split("=")[0] for option in options("bf16", 1) ^ options("rowwise", 1)}
    assert different == {"--job.config_file", "--fp8.grouped_experts.recipe", "--job.dump_folder"}
    different = {option.split("=")[0] for option in options("bf16", 1) ^ options("bf16", 2)}
    assert different == {"--debug.seed", "--data.shuffle_seed", "--job.dump_folder"}


@pytest.mark.parametrize("command", [parity, issue1152], ids=["parity", "issue1152"])
def test_ctrl_c_says_how_to_go_on(command, monkeypatch, capfd):
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_arms", interrupted)
    monkeypatch.chdir(ROOT)
    assert command.main([]) == 130
    captured = capfd.readouterr()
    assert "Stopped: the same command leaves out the arms that are done." in captured.out + captured.err
