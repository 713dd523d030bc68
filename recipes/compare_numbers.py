"""The numbers of a comparison: one reference run, each other run against it, and the seeds that make a band."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.compare_checks import check_band, check_comparable
from recipes.compare_load import LoadDivergence, load_divergence
from recipes.compare_pairs import Pair, Ratio, match, ratio
from recipes.compare_verdict import EXIT_CODES, UNKNOWN, WORSE, Judgement, judge, verdict
from recipes.run_info import config_differences
from recipes.runs import NAMES, TAGS, Run, RunError

JUDGED = ("val_loss", "loss")
BANDED = (*JUDGED, "test_loss")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a comparison is held to; None is no limit. `smooth`: common logged steps in a mean; None: choose."""

    loss: float | None = None
    val_loss: float | None = None
    smooth: int | None = None

    @property
    def given(self) -> bool:
        """Is there any limit?"""
        return self.loss is not None or self.val_loss is not None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that a table, a picture or a JSON file says about two runs; `limits.smooth` is the one used."""

    a: Run
    b: Run
    limits: Limits
    pairs: dict[str, Pair]
    norm_ratio: Ratio | None
    load: LoadDivergence | None
    broken: tuple[str, ...]
    exceeded: tuple[str, ...]
    notes: tuple[str, ...]
    config_differences: dict[str, tuple[Any, Any]]
    judgements: tuple[Judgement, ...]
    word: str

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence for each nan or inf, and for each limit that is exceeded."""
        return (*self.broken, *self.exceeded)

    @property
    def passed(self) -> bool | None:
        """False: worse, or something failed. True: every limit holds, or as good. None: cannot be judged."""
        if self.failures or self.word == WORSE:
            return False
        return None if self.word == UNKNOWN and not self.limits.given else True

    @property
    def code(self) -> int:
        """0: as good, or within the limits; 1: worse, a limit exceeded, B broke; 2: cannot be judged."""
        if self.exceeded or self.word == WORSE:
            return 1
        return 0 if self.passed else EXIT_CODES[UNKNOWN]

    @property
    def verdict(self) -> str:
        """One line, such as: fp8 - bf16 = +0.0021 at step 2000, band 0.0043: same (training loss)."""
        if self.broken:
            return f"{self.b.label} against {self.a.label}: {self.word} ({'; '.join(self.broken)})"
        return verdict(list(self.judgements)).line(f"{self.b.label} - {self.a.label}")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All comparisons of one command: each run against the first, in one band."""

    reference: Run
    seeds: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The reference, the compared runs, the seeds."""
        return (self.reference, *(c.b for c in self.comparisons), *self.seeds)

    @property
    def code(self) -> int:
        """1 when one run is worse, else 2 when one cannot be judged, else 0."""
        codes = {comparison.code for comparison in self.comparisons}
        return next(code for code in (1, 2, 0) if code in codes)


def compare_all(reference: Run, others: Sequence[Run], seeds: Sequence[Run], limits: Limits) -> Report:
    """Compares each of `others` with `reference`; `seeds` are runs like the reference with other seeds.

    Raises:
        RunError: two runs do not belong side by side, or a limit was given for a metric that they lack.
    """
    reference, *rest = _tell_apart([reference, *others, *seeds])
    others, seeds = rest[: len(others)], tuple(rest[len(others) :])
    notes = check_band(reference, others, seeds)
    compared = [compare_runs(reference, other, limits, seeds) for other in others]
    return Report(
        reference=reference, seeds=seeds, comparisons=tuple(replace(c, notes=(*c.notes, *notes)) for c in compared)
    )


def compare_runs(a: Run, b: Run, limits: Limits, seeds: Sequence[Run] = ()) -> Comparison:
    """Matches the steps of two runs and measures their gaps.

    Raises:
        RunError: the runs differ in seed, model or data, or a limit was given for a metric that they lack.
    """
    notes = check_comparable(a, b)
    _check_limits(a, b, limits)
    common = len(a.series(TAGS["loss"]).keys() & b.series(TAGS["loss"]).keys())
    # A twentieth of the run: short against what the loss does, long against one batch; 5 was enough for 40 steps.
    limits = replace(limits, smooth=limits.smooth or max(5, common // 20))
    pairs = {metric: _pair(metric, a, b, seeds, limits.smooth) for metric in TAGS}
    if not pairs["loss"].steps:
        labels = ", ".join(run.label for run in (a, b, *seeds))
        raise RunError(f"The runs have no common logged step: {labels}.")
    judgements = _judgements(pairs, limits)
    broken = (*non_finite(a), *non_finite(b))
    differences = {} if not (a.info and b.info) else config_differences(a.info["config"], b.info["config"])
    norm, load = ratio(pairs["grad_norm"], limits.smooth), load_divergence(a, b)
    return Comparison(
        a=a, b=b, limits=limits, pairs=pairs, norm_ratio=norm, load=load, broken=broken,
        exceeded=_exceeded(pairs, limits), notes=tuple(notes), config_differences=differences,
        judgements=judgements, word=_word(b, broken, judgements),
    )  # fmt: skip


def non_finite(run: Run) -> list[str]:
    """One line for each metric of `run` with a nan or inf, at any step, matched or not."""
    lines = []
    for metric, name in NAMES.items():
        bad = [(step, value) for step, value in run.series(TAGS[metric]).items() if not math.isfinite(value)]
        if bad:
            lines.append(f"{run.label}: {name} is {bad[0][1]} at step {bad[0][0]} ({len(bad)} such steps)")
    return lines


def _pair(metric: str, a: Run, b: Run, seeds: Sequence[Run], smooth: int) -> Pair:
    """Seeds that share no step of a metric take no part in it; they must share some of the training loss."""
    tag, common = TAGS[metric], a.series(TAGS[metric]).keys() & b.series(TAGS[metric]).keys()
    banded = [seed.series(tag) for seed in seeds] if metric in BANDED else []
    if metric != "loss":
        banded = [seed for seed in banded if seed.keys() & common]
    return match(a.series(tag), b.series(tag), smooth, banded, smooth if metric == "loss" else 1)


def _judgements(pairs: dict[str, Pair], limits: Limits) -> tuple[Judgement, ...]:
    given = {"loss": limits.loss, "val_loss": limits.val_loss}
    judged = (judge(m, pairs[m], pairs["loss"], limits.smooth, given[m], limits.given) for m in JUDGED)
    return tuple(judgement for judgement in judged if judgement is not None)


def _word(b: Run, broken: tuple[str, ...], judgements: tuple[Judgement, ...]) -> str:
    """A reference that broke is nothing to judge by; a run that broke is worse."""
    if broken:
        return WORSE if non_finite(b) else UNKNOWN
    return verdict(list(judgements)).word


def _tell_apart(runs: list[Run]) -> list[Run]:
    """Runs of one label get their parent folder's name before it."""
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else replace(run, label=f"{run.folder.resolve().parent.name}/{run.label}")
        for run in runs
    ]


def _check_limits(a: Run, b: Run, limits: Limits) -> None:
    given = (("loss", limits.loss, "--max-loss-gap"), ("val_loss", limits.val_loss, "--max-val-gap"))
    for metric, limit, flag in given:
        if limit is not None and not a.series(TAGS[metric]).keys() & b.series(TAGS[metric]).keys():
            raise RunError(f"{flag} cannot be checked: the runs have no {NAMES[metric]} at a common step.")


def _exceeded(pairs: dict[str, Pair], limits: Limits) -> tuple[str, ...]:
    lines = []
    if limits.loss is not None and not abs(pairs["loss"].smoothed[-1]) <= limits.loss:  # `not <=`: a nan gap fails
        lines.append(f"smoothed training loss gap {pairs['loss'].smoothed[-1]:+.6f} is beyond {limits.loss:g}")
    if limits.val_loss is not None and not abs(pairs["val_loss"].gap[-1]) <= limits.val_loss:
        lines.append(f"validation loss gap {pairs['val_loss'].gap[-1]:+.6f} is beyond {limits.val_loss:g}")
    return tuple(lines)
