"""The runs of a parity test: which command each arm is, and how several of them share one GPU and a time budget.

A small model leaves a GPU idle between its launches, so several runs go at once, each a process of its own. A run that
would not end within the budget is asked to save (recipes/trainer.py), and the next call goes on from there.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.parity_arms import DONE, Arm

LOG = "log.txt"
POLL_SECONDS = 0.5
SAY_SECONDS = 30
# From the end of the budget: runs that will not make it are asked to save; the last of them are killed; no new ones.
SAVE_SECONDS, KILL_SECONDS, START_SECONDS = 45, 5, 100
_STEP = re.compile(r"step: +(\d+) .*?loss: +([\d.]+|nan|inf)")


@dataclass(kw_only=True)
class Running:
    """A started arm; `seen` are (seconds, step) of its first and its last logged step beyond compilation."""

    arm: Arm
    home: Path
    process: subprocess.Popen
    asked: bool = False
    loss: str = ""
    seen: list[tuple[float, int]] = field(default_factory=list)

    def look(self, now: float) -> None:
        """Reads the end of its log."""
        with open(self.home / LOG, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 20_000))
            found = _STEP.findall(log.read().decode(errors="replace"))
        if found and (not self.seen or int(found[-1][0]) > self.seen[-1][1]):
            self.loss = found[-1][1]
            # The first line holds compilation: the speed is taken from the second on.
            self.seen = [*self.seen[:1], (now, int(found[-1][0]))] if int(found[-1][0]) > 1 else []

    @property
    def step(self) -> int:
        """Last logged step, 0 before the first."""
        return self.seen[-1][1] if self.seen else 0

    def seconds_left(self) -> float:
        """Until its last step at the speed so far; infinite while that is unknown."""
        if len(self.seen) < 2:
            return float("inf")
        (start, first), (now, last) = self.seen[0], self.seen[-1]
        return (self.arm.steps - last) * (now - start) / (last - first)


def run_arms(
    arms: Sequence[Arm],
    folder: Path,
    *,
    jobs: int,
    seconds: float,
    extra: Sequence[str],
    say: Callable[[str], None],
) -> dict[Arm, str]:
    """Runs the arms that are not done, `jobs` at a time, for at most `seconds`. Returns what became of each.

    "done", "stopped" (goes on in the next call), "waiting" (not started) or the reason of a failure.

    Raises:
        ValueError: an arm was finished in `folder` by another command.
    """
    begin, said = time.monotonic(), 0.0
    _check_done(arms, folder, extra)
    fate = {arm: "done" if arm.is_done(folder) else "waiting" for arm in arms}
    waiting = [arm for arm in arms if fate[arm] == "waiting"]
    running: list[Running] = []
    try:
        while True:
            now = time.monotonic() - begin
            while waiting and len(running) < jobs and seconds - now > START_SECONDS:
                running.append(_start(waiting.pop(0), folder, jobs, extra))
                say(f"[{now:4.0f} s] {running[-1].arm.name}: started")
            if not running:
                return fate
            time.sleep(POLL_SECONDS)
            _keep_to_budget(running, now, seconds)
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                fate[run.arm] = _finish(run, folder, extra)
                say(f"[{now:4.0f} s] {run.arm.name}: {fate[run.arm]} after step {run.step}, loss {run.loss}")
            if now - said >= SAY_SECONDS:
                said = now
                say(f"[{now:4.0f} s] " + " | ".join(f"{r.arm.name} {r.step}/{r.arm.steps} {r.loss}" for r in running))
    finally:
        for run in running:
            os.killpg(run.process.pid, signal.SIGKILL)


def _check_done(arms: Sequence[Arm], folder: Path, extra: Sequence[str]) -> None:
    for arm in arms:
        if not arm.is_done(folder):
            continue
        made_by, wanted = json.loads((arm.home(folder) / DONE).read_text())["command"], arm.command(folder, extra)
        if made_by != wanted:
            made = f"{arm.home(folder)} was made by another command: {' '.join(made_by)}."
            raise ValueError(f"{made} Give another --folder, or remove it.")


def _start(arm: Arm, folder: Path, jobs: int, extra: Sequence[str]) -> Running:
    home = arm.home(folder)
    home.mkdir(parents=True, exist_ok=True)
    # A last checkpoint of a run that was killed before its last evaluation holds weights only: nothing can go on there.
    shutil.rmtree(home / "checkpoint" / f"step-{arm.steps}", ignore_errors=True)
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    env = os.environ | {
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, *arm.command(folder, extra)[1:]]
    with open(home / LOG, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    return Running(arm=arm, home=home, process=process)


def _keep_to_budget(running: Sequence[Running], now: float, seconds: float) -> None:
    """Asks those to save that will not end in time, and kills what is left at the very end."""
    for run in running:
        run.look(now)
        if seconds - now < KILL_SECONDS:
            os.killpg(run.process.pid, signal.SIGKILL)
        elif seconds - now < SAVE_SECONDS and not run.asked and now + run.seconds_left() > seconds - 2 * KILL_SECONDS:
            run.process.send_signal(signal.SIGTERM)
            run.asked = True


def _finish(run: Running, folder: Path, extra: Sequence[str]) -> str:
    run.look(0.0)  # what it logged last
    code = run.process.returncode
    if code == 0 and run.step >= run.arm.steps:
        shutil.rmtree(run.home / "checkpoint", ignore_errors=True)
        (run.home / DONE).write_text(json.dumps({"command": run.arm.command(folder, extra)}) + "\n")
        return "done"
    if code == 0 or (run.asked and code in (-signal.SIGTERM, -signal.SIGKILL)):
        return "stopped"
    tail = "\n".join((run.home / LOG).read_text(errors="replace").splitlines()[-15:])
    return f"failed with exit code {code}\n{tail}\n"
