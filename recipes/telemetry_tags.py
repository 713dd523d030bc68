"""Names and figures of telemetry: TensorBoard's tags under `fp8/`, and what the sums of a measured step say.

fp8/layers.1.moe.experts/x/flushed     operand: amax, scale_min, scale_max, flushed, saturated, sqnr_db, non_finite
fp8/layers.1.moe.experts/y13/sqnr_db   GEMM
fp8/layers.1.moe/load/03               share of the layer's rows that expert 3 got, in the whole step
fp8/layers.1.moe/load_max_over_mean    also empty_experts, twin_agreement
fp8/grad_norm/router                   before clipping
"""

import math
from collections.abc import Sequence

ROOT = "fp8/"
GRAD_NORM = "fp8/grad_norm/"
MAX_SQNR_DB = 200.0  # what "no error at all" is recorded as

OPERANDS = {
    "x": "input rows",
    "h": "hidden rows, input of w2",
    "g": "gradient of the output",
    "dy13": "gradient of w1's and w3's outputs",
    "w13": "w1 and w3",
    "w2": "w2",
    "w": "weight",
}
GEMMS = {
    "y13": "outputs of w1 and w3",
    "y": "output",
    "out": "output of w2",
    "dh": "input gradient of w2",
    "dx": "input gradient",
    "dw13": "weight gradients of w1 and w3",
    "dw2": "weight gradient of w2",
    "dw": "weight gradient",
}
GRADIENTS = ("g", "dy13")
WEIGHTS = ("w13", "w2", "w")


def sqnr_db(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), of sums of squares; None without a signal, nan where one is not finite."""
    if signal == 0 and noise == 0:
        return None
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise <= signal * 10 ** (-MAX_SQNR_DB / 10):
        return MAX_SQNR_DB
    return max(10 * math.log10(signal / noise), -MAX_SQNR_DB) if signal > 0 else -MAX_SQNR_DB


def operand_figures(record: Sequence[float]) -> dict[str, float]:
    """The figures of an operand's record (telemetry_records.OPERAND); none where nothing was measured."""
    amax, scale_max, minus_min, flushed, nonzero, saturated, finite, non_finite, signal, noise = record
    if finite + non_finite == 0:
        return {}
    figures = {"amax": amax, "flushed": flushed / max(nonzero, 1), "saturated": saturated / max(finite, 1)}
    if math.isfinite(scale_max) or scale_max > 0:  # -inf: every row is zero
        figures |= {"scale_min": -minus_min, "scale_max": scale_max}
    sqnr = sqnr_db(signal, noise)
    figures |= {} if sqnr is None else {"sqnr_db": sqnr}
    return figures | ({"non_finite": non_finite / (finite + non_finite)} if non_finite else {})


def gemm_figures(record: Sequence[float]) -> dict[str, float]:
    """The figures of a GEMM's record; none where nothing was measured."""
    sqnr = sqnr_db(*record)
    return {} if sqnr is None else {"sqnr_db": sqnr}


def load_figures(counts: Sequence[float], twin: Sequence[float] | None) -> dict[str, float]:
    """counts: rows of each expert; twin: the shares of another run at the same step."""
    total = sum(counts)
    if total <= 0:
        return {}
    shares = [count / total for count in counts]
    width = len(str(len(shares) - 1))
    figures = {f"load/{e:0{width}}": share for e, share in enumerate(shares)}
    figures |= {"load_max_over_mean": max(shares) * len(shares), "empty_experts": float(shares.count(0))}
    if twin is not None and len(twin) == len(shares):
        figures["twin_agreement"] = agreement(shares, twin)
    return figures


def agreement(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of the rows that two distributions over the same experts have in common: 1 - their total variation.

    At most that share of the tokens goes to the same experts; two tokens that swap places are not seen.
    """
    return 1 - sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


def parse(tag: str) -> tuple[str, str, str] | None:
    """(module, operand or GEMM, figure) of a tag of theirs; None for any other."""
    parts = tag.removeprefix(ROOT).split("/")
    known = tag.startswith(ROOT) and len(parts) == 3 and (parts[1] in OPERANDS or parts[1] in GEMMS)
    return (parts[0], parts[1], parts[2]) if known else None


def loads(scalars: dict[str, dict[int, float]]) -> dict[str, dict[int, list[float]]]:
    """MoE layer -> step -> share of each expert, of a run's scalars."""
    found: dict[str, dict[int, list[float]]] = {}
    for tag in sorted(tag for tag in scalars if tag.startswith(ROOT) and "/load/" in tag):
        layer = tag.removeprefix(ROOT).partition("/load/")[0]
        for step, share in scalars[tag].items():
            found.setdefault(layer, {}).setdefault(step, []).append(share)
    return found
