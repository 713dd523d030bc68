"""What a run's telemetry can be a symptom of. Each rule looks at one thing and says nothing when it is in order.

Damage orders findings and modules: dB of SQNR lost against what the format leaves. A note is nothing that FP8 did.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recipes.diagnose_remedies import Remedy, of_cold_scales, of_damage, of_loads, of_non_finite, of_stale_scales
from recipes.diagnose_view import View
from recipes.runs import Series
from recipes.telemetry_tags import GEMMS, GRADIENTS, OPERANDS, WEIGHTS

# The thresholds, each once. "Healthy" are 60 steps of recipes/llama4_fp8.toml by the rules tokenwise, blockwise and
# tensorwise: at most 0.24 % of an operand flushed, at most 0.5 dB of its SQNR lost. Delayed in the same model: at step
# 1 up to 100 % flushed, later gradients that outgrow the history (0.08 % saturated, 16 dB lost).
FLUSHED = 0.01
OPERAND_DB = 3.0  # as much noise again as rounding alone makes
GEMM_DB = 6.0  # sums that cancel lose 2 dB with sound operands (queries, keys and values of a new attention)
SATURATED = 0.0001  # what an operand that lost OPERAND_DB then lost it to
STALE_DB = 10.0  # of a weight with hardly a value flushed; at scale 1 flushing alone leaves it 25 dB
RECURS = 0.05  # of the settled steps, or one: fewer are an accident
BUSY = 4.0  # times the mean: one of 8 experts has half of all rows
# Loads of two healthy twins agree to 99 % at step 10 and, since small differences grow in a router, to 70 % at step 60;
# those of two seeds to 75 to 90 % at once.
AGREEMENT, EARLY = 0.9, 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong in a module, or with `note` only worth knowing."""

    kind: str
    module: str
    what: str
    damage: float = 0.0
    remedies: tuple[Remedy, ...] = ()
    note: bool = False


Rule = Callable[[View], Iterator[Finding]]


def percent(share: float) -> str:
    """Two digits of a share, so that 0.9999 is 100 %."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def lowest(series: Series) -> tuple[int, float]:
    """Step and value; a nan is lower than anything."""
    step = min(series, key=lambda s: -math.inf if math.isnan(series[s]) else series[s])
    return step, series[step]


def highest(series: Series) -> tuple[int, float]:
    """Step and value; nothing seen is a 0."""
    step = max(series, key=lambda s: series[s], default=0)
    return step, series.get(step, 0.0)


def recurs(series: Series, bad: Callable[[float], bool]) -> bool:
    """Whether it is more than an accident."""
    return sum(map(bad, series.values())) >= max(1, RECURS * len(series))


def non_finite(view: View) -> Iterator[Finding]:
    """An inf or nan in an operand: the earliest step tells where it came from."""
    for (module, key), figures in view.figures.items():
        if bad := figures.get("non_finite"):
            step = min(bad)
            what = f"{key} ({OPERANDS[key]}): {percent(bad[step])} inf or nan, first at step {step}"
            yield Finding(
                kind="inf or nan", module=module, what=what, damage=1000 - step / 1e6, remedies=of_non_finite()
            )


def stale_scales(view: View) -> Iterator[Finding]:
    """Payload and scale of a weight that do not belong together (TransformerEngine#1047)."""
    for (module, key), figures in view.figures.items():
        if key in WEIGHTS and (sqnr := figures.get("sqnr_db")):
            step, value = lowest(sqnr)
            flushed = figures.get("flushed", {}).get(step, 0.0)
            if value < STALE_DB and flushed < 0.5:
                what = f"{key}: SQNR {value:.1f} dB at step {step} with only {percent(flushed)} flushed to zero: "
                what += "its scale is not the one that it was quantized with"
                damage = view.expected_db(module, key) - value
                yield Finding(kind="stale scale", module=module, what=what, damage=damage, remedies=of_stale_scales())


def cold_scales(view: View) -> Iterator[Finding]:
    """Delayed scaling before it has seen anything: every scale is exactly 1."""
    for module in dict.fromkeys(m for m, _ in view.cold):
        until = {key: step for (m, key), step in view.cold.items() if m == module}
        flushed = {k: view.figures[module, k].get("flushed", {}).get(step, 0.0) for k, step in until.items()}
        worst = sorted((k for k in until if flushed[k] > FLUSHED), key=lambda k: -flushed[k])
        if worst:
            # what lies behind a gradient that is all zero has a scale, and figures, only later
            steps = sorted(set(until.values()))
            scales = "scales are" if steps[1:] else "every scale is"
            what = f"delayed scaling started cold: until step {steps[-1]} {scales} 1. Flushed to zero: "
            what += ", ".join(f"{k} {percent(flushed[k])}" for k in worst) + _gemms_then(view, module, steps)
            damage = max(_lost(view, module, k, step) for m, k in view.figures if m == module for step in steps)
            remedies = of_cold_scales(view, module)
            yield Finding(kind="cold scale", module=module, what=what, damage=damage, remedies=remedies)


def _gemms_then(view: View, module: str, cold: list[int]) -> str:
    """What that did to the gradients in the steps `cold`, and how the scales jump afterwards."""
    figures = {key: view.figures.get((module, key), {}).get("sqnr_db", {}) for key in GEMMS}
    gemms = {key: min(then) for key, f in figures.items() if (then := [v for s, v in f.items() if s in cold])}
    lost = [f"{k} {v:.1f} dB" for k, v in sorted(gemms.items(), key=lambda kv: kv[1])[:3] if v < 20]
    text = f". SQNR: {', '.join(lost)}" if lost else ""
    for key in GRADIENTS:
        later = {s: v for s, v in view.figures.get((module, key), {}).get("scale_max", {}).items() if s > cold[-1]}
        if later:
            return f"{text}. Scale of {key} at step {min(later)}: {later[min(later)]:.1e}"
    return text


def _lost(view: View, module: str, key: str, step: int) -> float:
    sqnr = view.figures[module, key].get("sqnr_db", {}).get(step, math.nan)
    return 0.0 if math.isnan(sqnr) else max(view.expected_db(module, key) - sqnr, 0.0)


def late_cold_scales(view: View) -> Iterator[Finding]:
    """One expert's scale is still 1 where the others' have settled: it had no token until now."""
    for (module, key), figures in view.figures.items():
        high, low = figures.get("scale_max", {}), figures.get("scale_min", {})
        steps = [s for s, v in high.items() if v == 1 and low.get(s, 1) < 0.01]
        if view.option(module, "recipe") == "delayed" and key not in WEIGHTS and steps:
            what = f"{key}: at step {steps[0]} the scale of an expert that had no token before is still 1, "
            what += f"and that of others {low[steps[0]]:.1e}"
            remedies = of_cold_scales(view, module)
            yield Finding(kind="cold scale", module=module, what=what, damage=OPERAND_DB, remedies=remedies)


def damaged_operands(view: View) -> Iterator[Finding]:
    """Flushed to zero, or an SQNR below what the format leaves."""
    for module, key in view.figures:
        sqnr, flushed = (view.settled(module, key, name) for name in ("sqnr_db", "flushed"))
        if key not in OPERANDS or not sqnr:
            continue
        expected, (step, value) = view.expected_db(module, key), lowest(sqnr)
        is_flushed = recurs(flushed, lambda share: share > FLUSHED)
        is_damaged = recurs(sqnr, lambda db, least=expected - OPERAND_DB: db < least)
        if (key in WEIGHTS and value < STALE_DB and not is_flushed) or not (is_flushed or is_damaged):
            continue
        at, saturated = highest(view.settled(module, key, "saturated"))
        cause = "flushed to zero" if is_flushed else "saturated" if saturated > SATURATED else "imprecise"
        what = f"{key} ({OPERANDS[key]}): SQNR {value:.1f} dB at step {step}, of {expected:.1f}"
        what += ", {1} flushed at step {0}".format(*_shown(highest(flushed))) if is_flushed else ""
        what += f", {percent(saturated)} saturated at step {at}" if saturated > SATURATED else ""
        noun = "gradient" if key in GRADIENTS else "weight" if key in WEIGHTS else "activation"
        remedies = of_damage(view, module, key, cause)
        yield Finding(
            kind=f"{noun} {cause}", module=module, what=what, damage=max(expected - value, 1), remedies=remedies
        )


def _shown(found: tuple[int, float]) -> tuple[int, str]:
    return found[0], percent(found[1])


def damaged_gemms(view: View) -> Iterator[Finding]:
    """A GEMM that is worse than its operands: columns of a weight gradient, or sums that cancel."""
    hurt = {f.module for rule in (damaged_operands, stale_scales) for f in rule(view)}
    for module, key in view.figures:
        sqnr = view.settled(module, key, "sqnr_db")
        if key not in GEMMS or module in hurt or not sqnr:
            continue
        expected, (step, value) = view.expected_db(module, key), lowest(sqnr)
        if recurs(sqnr, lambda db, least=expected - GEMM_DB: db < least):
            what = f"{key} ({GEMMS[key]}): SQNR {value:.1f} dB at step {step}, of {expected:.1f}, from sound operands"
            remedies = of_damage(view, module, key, "imprecise")
            yield Finding(kind="GEMM imprecise", module=module, what=what, damage=expected - value, remedies=remedies)


def routing(view: View) -> Iterator[Finding]:
    """A routing that left the twin's before rounding had time to grow; later that is only worth knowing."""
    for layer, series in view.series("twin_agreement").items():
        step = next((s for s, v in series.items() if v < AGREEMENT), None)
        if step is not None:
            what = f"at step {step} the loads of the experts agree with the twin's to {percent(series[step])}, "
            what += f"at the end to {percent(list(series.values())[-1])}"
            yield Finding(kind="routing differs", module=layer, what=what, damage=1.0, note=step > EARLY)


def loads(view: View) -> Iterator[Finding]:
    """Experts that get everything or nothing."""
    for layer, series in view.series("load_max_over_mean").items():
        if (value := statistics.median(series.values())) > BUSY:
            what = f"the busiest expert has {value:.1f} times the mean load (median of the measured steps)"
            yield Finding(kind="unbalanced", module=layer, what=what, remedies=of_loads(), note=True)
    for layer, series in view.series("empty_experts").items():
        if recurs(series, lambda count: count > 0):
            step, value = highest(series)
            what = f"an expert without a token in {percent(sum(v > 0 for v in series.values()) / len(series))} of the "
            what += f"measured steps; most at step {step}, {value:.0f}"
            yield Finding(kind="idle experts", module=layer, what=what, remedies=of_loads(), note=True)


RULES: tuple[Rule, ...] = (
    non_finite,
    stale_scales,
    cold_scales,
    late_cold_scales,
    damaged_operands,
    damaged_gemms,
    routing,
    loads,
)


def findings(view: View) -> list[Finding]:
    """All of them, the worst first."""
    return sorted((f for rule in RULES for f in rule(view)), key=lambda f: -f.damage)
