"""Is FP8 faster than BF16 for a dense layer of this size?  Measured in assets/results/dense_h200.json.

What a layer costs, forward and backward, with T tokens, K inputs and N outputs (of an MLP N is its hidden dim):

    t = a + b * T*K*N + c * K*N + d * T*(K + N)      launches, products, bytes of the weight, bytes of activations

None of them is negative, and each is fitted to the measured cases by least squares of relative errors, for BF16 and for
FP8 with weights quantized now (cold) or before (warm). FP8 halves b and has larger a, c and d: small layers lose.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.break_even import workload
from converters.dense_selection import Unit

RESULTS = Path(__file__).parents[1] / "assets" / "results" / "dense_h200.json"
PRECISIONS = ("bf16_ms", "cold_ms", "warm_ms")


@dataclass(frozen=True)
class Measured:
    """Forward and backward of one layer in ms. kind: "linear" (any projection, alone or joined) or "mlp"."""

    kind: str
    T: int
    K: int
    N: int
    bf16_ms: float
    cold_ms: float
    warm_ms: float


@dataclass(frozen=True, kw_only=True)
class DenseWork:
    """What a job sends through its dense layers: tokens at a time on a rank, micro-batches of an optimizer step, ranks
    of tensor parallelism that cut a layer, and whether a step uses each weight once.
    """

    tokens: int
    micro_batches: int
    tp: int = 1
    uses_once: bool = False


def dense_work(job_config: JobConfig, dims: ParallelDims) -> DenseWork:
    """From batch and sequence length, and how ranks divide them."""
    training, pipeline = job_config.training, job_config.parallelism
    batch = pipeline.pipeline_parallel_microbatch_size if dims.pp > 1 else training.local_batch_size
    work = workload(job_config, dims)
    tokens = batch * training.seq_len // dims.cp
    return DenseWork(tokens=tokens, micro_batches=work.micro_batches, tp=dims.tp, uses_once=work.uses_once)


def load_measured(path: Path = RESULTS) -> list[Measured]:
    """The cases of a file of measurements; none if there is no such file.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return []
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return [Measured(**{name: c[name] for name in Measured.__dataclass_fields__}) for c in cases]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold measured dense layers ({error!r}): measure again, or delete it."
        ) from error


def _terms(T: float, K: float, N: float) -> list[float]:
    return [1.0, T * K * N, K * N, T * (K + N)]


def _fit(cases: Sequence[Measured], precision: str) -> np.ndarray:
    """[4], the costs a, b, c, d."""
    times = np.array([getattr(c, precision) for c in cases])
    terms = np.array([_terms(c.T, c.K, c.N) for c in cases]) / times[:, None]
    used = list(range(4))
    while True:  # a cost below zero is none
        costs = np.linalg.lstsq(terms[:, used], np.ones(len(cases)), rcond=None)[0]
        if len(used) == 1 or costs.min() >= 0:
            break
        del used[int(costs.argmin())]
    out = np.zeros(4)
    out[used] = costs
    return out


def speed_ratio(cases: Sequence[Measured], T: int, K: int, N: int, micro_batches: int) -> float:
    """Time of BF16 over that of FP8 for one layer; above 1 FP8 is faster. The first of the micro-batches is cold."""
    bf16, cold, warm = (float(np.dot(_fit(cases, p), _terms(T, K, N))) for p in PRECISIONS)
    return bf16 / ((cold + (micro_batches - 1) * warm) / micro_batches)


def too_small(units: Sequence[Unit], work: DenseWork, measured: Sequence[Measured], cache: bool) -> dict[str, str]:
    """Which units, by name, are expected to be slower in FP8, and why. `cache`: only the first micro-batch is cold."""
    found = {}
    for unit in units:
        cases = [m for m in measured if (m.kind == "mlp") == (unit.kind == "mlp")]
        cut_inputs = unit.kind == "linear" and unit.fqn.rpartition(".")[2] == "wo"  # the others' outputs are cut
        K, N = (unit.K // work.tp, unit.N) if cut_inputs else (unit.K, unit.N // work.tp)
        if cases:
            ratio = speed_ratio(cases, work.tokens, K, N, work.micro_batches if cache else 1)
            if ratio < 1:
                size = f"{work.tokens:,} tokens x {K} x {N}"
                found[unit.fqn] = f"{size}, where FP8 has {min(ratio, 0.99):.2f}x the speed of BF16"
    return found
