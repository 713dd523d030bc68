"""Same, worse, better, or too short or too small to judge: the rules, and where each comes from (RULES)."""

import math
from dataclasses import dataclass

import numpy as np

from recipes.compare_pairs import Pair

SAME, WORSE, BETTER, UNKNOWN = "same", "worse", "better", "too short or too small to judge"
RULES = (
    "A gap is B - A at the last common step: of the training loss smoothed, of the validation loss as it is. It is "
    "held against the band of seeds where there is one; else against the limits of the command line, which then decide "
    "alone; else against a tolerance of 0.25 % of A's loss, within which DeepSeek-V3 reports its FP8 training to stay "
    "(arXiv 2412.19437, section 3.3).",
    "Too short: fewer than 10 common logged steps. Too small: neither the fall of A's loss nor the gap is 10 times "
    "what the gap is held against, so a difference had nothing to show itself in. Too noisy: half of the gap's 95 % "
    "interval is wider than what it is held against (a band of validations has that noise in itself), or the gap is "
    "beyond it by less than that, or beyond a band of one validation.",
    "Worse or better: beyond it by more than the noise of the gap. Same: within it. The validation loss speaks before "
    "the training loss, but a worse one of the two is worse. A nan or inf in B is worse, one in A leaves nothing to "
    "judge by.",
)
EXIT_CODES = {SAME: 0, BETTER: 0, WORSE: 1, UNKNOWN: 2}

# A debug model of a few steps was once declared worse (torchtitan#1191). With 10 steps, the noise is known to about a
# third: it comes from the 5 differences since half of the last step.
MIN_STEPS = 10
MIN_DIFFERENCES = 3
# Another seed leaves a spread of one step in half of the draws (compare_band.py), so a gap beyond it says nothing.
MIN_VALIDATIONS = 2
# So the noise or a gap of a yardstick's size is at most a tenth of what was learned.
MOVED = 10.0
UNMEASURED = 0.0025


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What a gap is held against: its size, and what it is: "band", "limit" or "tolerance"."""

    size: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One metric's gap, what it was held against, and what came of it. `noise`: half a 95 % interval, or nan."""

    metric: str
    step: int
    gap: float
    noise: float
    yardstick: Yardstick
    word: str
    reason: str = ""

    def line(self, name: str) -> str:
        """Such as: fp8 - bf16 = +0.0021 at step 2000, band 0.0043: same (training loss); `name` is the first part."""
        places = max(4, 1 - math.floor(math.log10(self.yardstick.size))) if 0 < self.yardstick.size < 1 else 4
        held = f"{self.yardstick.kind} {self.yardstick.size:.{places}f}"
        why = f"; {self.reason}" if self.reason else ""
        metric = {"loss": "training loss", "val_loss": "validation loss"}[self.metric]
        return f"{name} = {self.gap:+.{places}f} at step {self.step}, {held}: {self.word} ({metric}{why})"


def judge(metric: str, pair: Pair, training: Pair, smooth: int, limit: float | None, limited: bool) -> Judgement | None:
    """Judges `pair`, the losses named `metric` ("loss" or "val_loss"); `training` is the pair of the training losses.

    `limited`: limits decide; then a metric without one is not judged. None: nothing to judge.
    """
    held = limit is not None or bool(pair.band) or not limited
    stale = not pair.steps or (limit is None and pair.steps[-1] < training.steps[-1] / 2)
    if stale or not held:
        return None
    gap = pair.smoothed[-1] if metric == "loss" else pair.gap[-1]
    noise = noise_of(pair, min(smooth, len(pair.steps)) if metric == "loss" else 1)
    yardstick = _yardstick(pair, limit)
    seeded = bool(pair.band) and metric != "loss"
    lone = len(pair.steps) - _half(pair) < MIN_VALIDATIONS
    word, reason = _decide(gap, noise, yardstick, training, seeded=seeded, lone=lone)
    return Judgement(
        metric=metric, step=pair.steps[-1], gap=gap, noise=noise, yardstick=yardstick, word=word, reason=reason
    )


def verdict(judgements: list[Judgement]) -> Judgement:
    """The judgement that speaks for all: the first that says worse, else the first that could judge, else the last."""
    ordered = [
        *(j for j in judgements if j.word == WORSE),
        *(j for j in judgements if j.word != UNKNOWN),
        judgements[-1],
    ]
    return ordered[0]


def noise_of(pair: Pair, averaged: int) -> float:
    """Half of the 95 % interval of a mean of `averaged` gaps: Student's t times the standard error; nan: unknown.

    The spread of one gap comes from the differences of neighbours since half of the last step, so a trend does not
    count (von Neumann's estimator; k differences know as much as 2k/3 degrees of freedom). Slow wandering is in the
    band instead.
    """
    differences = np.diff(pair.gap[_half(pair) :])
    if len(differences) < MIN_DIFFERENCES:
        differences = np.diff(pair.gap)  # a few validations: all of them
    if len(differences) < MIN_DIFFERENCES:
        return math.nan
    one_gap = math.sqrt(float(np.mean(differences**2)) / 2)
    return student_t(2 * len(differences) / 3) * one_gap / math.sqrt(averaged)


def _half(pair: Pair) -> int:
    """Index of the first step since half of the last one."""
    return int(np.searchsorted(pair.steps, pair.steps[-1] / 2))


def student_t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, by its Cornish-Fisher series: 2 % low at 4 degrees of freedom, 10 % at 2."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _yardstick(pair: Pair, limit: float | None) -> Yardstick:
    if pair.band:
        return Yardstick(size=pair.band[-1], kind="band")
    if limit is not None:
        return Yardstick(size=limit, kind="limit")
    return Yardstick(size=UNMEASURED * abs(pair.a[-1]), kind="tolerance")


def _decide(gap: float, noise: float, held: Yardstick, training: Pair, seeded: bool, lone: bool) -> tuple[str, str]:
    """Word and reason. `seeded`: the band is of single points and has their noise in it; it need not be small then.

    `lone`: it is of one such point.
    """
    beyond = WORSE if gap > 0 else BETTER
    if held.kind == "limit":
        return (SAME if abs(gap) <= held.size else beyond), ""
    if len(training.steps) < MIN_STEPS:
        return UNKNOWN, f"{len(training.steps)} common logged steps, fewer than {MIN_STEPS}"
    fallen = training.a[0] - _last_loss(training)
    if max(fallen, abs(gap)) < MOVED * held.size:
        return UNKNOWN, f"the loss fell by {fallen:.4f}, less than {MOVED:.0f} times the {held.kind}"
    if math.isnan(noise) and not seeded:
        return UNKNOWN, "too few points to know the noise of the gap"
    if math.isnan(noise) and lone and abs(gap) > held.size:
        return UNKNOWN, "beyond a band of one validation, in which seeds may meet by chance: validate more often"
    noise = 0.0 if math.isnan(noise) else noise
    if abs(gap) - noise > held.size:
        return beyond, ""
    if noise > held.size and not seeded:
        return UNKNOWN, f"the gap's noise is ±{noise:.4f}, wider than the {held.kind}: train longer or smooth more"
    if abs(gap) > held.size:
        return UNKNOWN, f"beyond the {held.kind} by less than the gap's noise, ±{noise:.4f}"
    return SAME, ""


def _last_loss(training: Pair) -> float:
    """The last loss of A, as a mean over the last twentieth of the steps (at least one)."""
    return float(np.mean(training.a[-max(1, len(training.a) // 20) :]))
