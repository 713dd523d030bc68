"""Is FP8 faster than BF16 for a dense layer of this size?  Measured in assets/results/dense_h200.json.

What a layer costs, forward and backward, with T tokens, K inputs and N outputs (of an MLP N is its hidden dim):

    t = a + b * T*K*N + c * K*N + d * T*(K + N)      launches, products, bytes of the weight, bytes of activations

None of them is negative (measured_cost.py). FP8 halves b and has larger a, c and d: small layers lose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.break_even import workload
from converters.dense_selection import Unit
from converters.measured_cost import fit_all, fp8_speed, load_cases

RESULTS = Path(__file__).parents[1] / "assets" / "results" / "dense_h200.json"


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
    return load_cases(path, Measured, "dense layers")


def _terms(T: float, K: float, N: float) -> list[float]:
    return [1.0, T * K * N, K * N, T * (K + N)]


def costs_of(cases: Sequence[Measured]) -> np.ndarray:
    """What each term costs, by PRECISIONS."""
    return fit_all([_terms(c.T, c.K, c.N) for c in cases], cases)


def speed_ratio(costs: np.ndarray, T: int, K: int, N: int, micro_batches: int) -> float:
    """Time of BF16 over that of FP8 for one layer; above 1 FP8 is faster. The first of the micro-batches is cold."""
    return fp8_speed(costs, _terms(T, K, N), micro_batches)


def too_small(units: Sequence[Unit], work: DenseWork, measured: Sequence[Measured], cache: bool) -> dict[str, str]:
    """Which units, by name, are expected to be slower in FP8, and why. `cache`: only the first micro-batch is cold."""
    found = {}
    kinds = {is_mlp: [m for m in measured if (m.kind == "mlp") == is_mlp] for is_mlp in (True, False)}
    costs = {is_mlp: costs_of(cases) for is_mlp, cases in kinds.items() if cases}
    for unit in units:
        is_mlp = unit.kind == "mlp"
        cut_inputs = unit.kind == "linear" and unit.fqn.rpartition(".")[2] == "wo"  # the others' outputs are cut
        K, N = (unit.K // work.tp, unit.N) if cut_inputs else (unit.K, unit.N // work.tp)
        if is_mlp in costs:
            ratio = speed_ratio(costs[is_mlp], work.tokens, K, N, work.micro_batches if cache else 1)
            if ratio < 1:
                size = f"{work.tokens:,} tokens x {K} x {N}"
                found[unit.fqn] = f"{size}, where FP8 has {min(ratio, 0.99):.2f}x the speed of BF16"
    return found
