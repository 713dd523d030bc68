"""Is FP8 faster than BF16 at as many rows as an expert will get?  Measured in assets/results/bench_h200.json.

An expert costs a fixed time (read the weights, quantize them, write their gradients) and a time a row:

    t(rows) = fixed + rows * slope        FP8 has the larger `fixed` and the smaller `slope`: few rows, and BF16 wins

Both parts grow with D * H. So it is times an expert and D * H that are interpolated, linearly in the rows and over all
measured shapes, and continued along the same line to fewer rows than any of them has.
"""

import json
import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

RESULTS = Path(__file__).parents[1] / "assets" / "results" / "bench_h200.json"


@dataclass(frozen=True)
class Measured:
    """One expert's forward and backward with `rows` rows, weights [H, D], in ms / (D * H); cold quantizes them."""

    rows: float
    D: int
    H: int
    E: int
    bf16: float
    cold: float
    warm: float


def load_measured(path: Path = RESULTS) -> list[Measured]:
    """The cases of a bench file; none if there is no such file.

    Raises:
        ValueError: the file is no bench result.
    """
    if not path.exists():
        return []
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        times = [[c[k] / (c["E"] * c["D"] * c["H"]) for k in ("bf16_ms", "cold_ms", "warm_ms")] for c in cases]
        measured = [Measured(c["M"] / c["E"], c["D"], c["H"], c["E"], *t) for c, t in zip(cases, times, strict=True)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of recipes.bench ({error!r}): measure again, or delete it.") from error
    return measured


def speed_ratio(measured: list[Measured], rows: float, D: int, H: int, E: int, micro_batches: int) -> float:
    """Time of BF16 over that of FP8; above 1 FP8 is faster. The first of an optimizer step's micro-batches is cold."""
    # Of cases with the same rows the last in order stays: the one of the nearest shape and expert count.
    far = {m: (abs(math.log(m.D * m.H / (D * H))), abs(math.log(m.E / E))) for m in measured}
    curve = {m.rows: m for m in sorted(measured, key=far.get, reverse=True)}.values()
    curve = sorted(curve, key=lambda m: m.rows)
    bf16 = _time([(m.rows, m.bf16) for m in curve], rows)
    return bf16 / _time([(m.rows, (m.cold + (micro_batches - 1) * m.warm) / micro_batches) for m in curve], rows)


def _time(curve: list[tuple[float, float]], rows: float) -> float:
    (first, t_first), (last, t_last) = curve[0], curve[-1]
    if rows >= last or len(curve) == 1:
        return t_last * rows / last  # far beyond the last the fixed part is nothing
    i = min(max(bisect([m for m, _ in curve], rows) - 1, 0), len(curve) - 2)
    (a, t_a), (b, t_b) = curve[i], curve[i + 1]
    line = t_a + (rows - a) * (t_b - t_a) / (b - a)
    return line if rows > first else max(line, t_first * rows / first)  # no fixed part is below zero


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a job sends through its experts at a time.

    tokens: that the expert-parallel ranks route together (a rank's own without EP). micro_batches: of an optimizer
    step. ep, tp: ranks among which experts, and the hidden dim of one, are divided. recomputes: whether backward runs
    forward passes again.
    """

    tokens: float
    micro_batches: int
    ep: int = 1
    tp: int = 1
    recomputes: bool = False

    @property
    def uses_once(self) -> bool:
        """Whether each weight meets one forward and one backward between two optimizer steps."""
        return self.micro_batches == 1 and not self.recomputes


def workload(job_config: JobConfig, dims: ParallelDims) -> Workload:
    """From batch and sequence length, and how ranks divide them."""
    training, ranks = job_config.training, dims.dp_replicate * dims.dp_shard
    local = job_config.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    batch = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * ranks
    borrows = dims.ep > 1 and dims.etp == 1  # EP's ranks are TP's too, and each of those has its part of the sequence
    tokens = local * training.seq_len * dims.ep / (dims.cp * (dims.tp if borrows else 1))
    tp, micro_batches = 1 if borrows else dims.tp, max(batch // (local * ranks), 1)
    recomputes = job_config.activation_checkpoint.mode != "none"
    return Workload(tokens=tokens, micro_batches=micro_batches, ep=dims.ep, tp=tp, recomputes=recomputes)


def below_break_even(
    model: nn.Module, experts: Mapping[str, nn.Module], work: Workload, measured: list[Measured], cache: bool = True
) -> dict[str, str]:
    """Which of `experts` (name -> module of `model`, unparallelized) are expected to be slower in FP8, and why.

    Judged are torchtitan's GroupedExperts behind a router with `top_k`. `cache`: only the first micro-batch is cold.
    """
    found = {}
    for fqn, module in experts.items():
        moe = model.get_submodule(fqn.rpartition(".")[0])
        top_k = getattr(getattr(moe, "router", None), "top_k", None)
        if not (measured and isinstance(module, GroupedExperts) and top_k):
            continue
        E, H, D = module.w1.shape
        rows, micro_batches = work.tokens * top_k / E, work.micro_batches if cache else 1
        ratio = speed_ratio(measured, rows, D, H // work.tp, max(E // work.ep, 1), micro_batches)
        if ratio < 1:
            found[fqn] = f"{rows:,.0f} rows an expert, where FP8 has {min(ratio, 0.99):.2f}x the speed of BF16"
    return found
