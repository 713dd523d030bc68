"""Is FP8 faster than BF16 for experts of this size?  Measured in assets/results/experts_h200.json.

What the MLP of E experts costs a rank, forward and backward, with M routed rows, model dim D and hidden dim H:

    t = a + b * M*D*H + c * E*D*H + d * M*(D + H) + e * E

launches, products, bytes of the weights (read, quantized, their gradients written), bytes of the activations, and what
every expert begins anew. None of them is negative (measured_cost.py). FP8 halves b and has larger a, c and d: small
experts lose, and so do few rows an expert.

The file is of `python -m recipes.bench --sizes`, the time of the GPU alone. That of `python -m recipes.bench`,
bench_h200.json, is of other times (a host that launches while the GPU works) and of large shapes alone: not mixed in.

Weights are measured in BF16, whole. Two things in FP8's favour are left out: from float32 parameters BF16 casts as well
(4 bytes read, 2 written), and under FSDP2 the ranks divide what is quantized. So a ratio just below 1 may be 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

from converters.measured_cost import fit_all, fp8_speed, load_cases

RESULTS = Path(__file__).parents[1] / "assets" / "results" / "experts_h200.json"


@dataclass(frozen=True)
class Measured:
    """Forward and backward of the MLP of E experts in ms: M rows in all, weights [E, H, D] and [E, D, H]."""

    M: int
    D: int
    H: int
    E: int
    bf16_ms: float
    cold_ms: float
    warm_ms: float


def load_measured(path: Path = RESULTS) -> list[Measured]:
    """The cases of a file of measurements; none if there is no such file.

    Raises:
        ValueError: the file holds something else.
    """
    return load_cases(path, Measured, "experts")


def _terms(M: float, D: int, H: int, E: int) -> list[float]:
    return [1.0, M * D * H, E * D * H, M * (D + H), E]


def costs_of(cases: Sequence[Measured]) -> np.ndarray:
    """What each term costs, by PRECISIONS."""
    return fit_all([_terms(c.M, c.D, c.H, c.E) for c in cases], cases)


def speed_ratio(costs: np.ndarray, rows: float, D: int, H: int, E: int, micro_batches: int) -> float:
    """Time of BF16 over that of FP8 for E experts with `rows` rows each; above 1 FP8 is faster. The first of an
    optimizer step's micro-batches is cold.
    """
    return fp8_speed(costs, _terms(rows * E, D, H, E), micro_batches)


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
    model: nn.Module, experts: Mapping[str, nn.Module], work: Workload, measured: Sequence[Measured], cache: bool = True
) -> dict[str, str]:
    """Which of `experts` (name -> module of `model`, unparallelized) are expected to be slower in FP8, and why.

    Judged are torchtitan's GroupedExperts behind a router with `top_k`. `cache`: only the first micro-batch is cold.
    """
    found = {}
    if not measured:
        return found
    costs = costs_of(measured)
    for fqn, module in experts.items():
        moe = model.get_submodule(fqn.rpartition(".")[0])
        top_k = getattr(getattr(moe, "router", None), "top_k", None)
        if not (isinstance(module, GroupedExperts) and top_k):
            continue
        E, H, D = module.w1.shape
        rows, micro_batches = work.tokens * top_k / E, work.micro_batches if cache else 1
        ratio = speed_ratio(costs, rows, D, H // work.tp, max(E // work.ep, 1), micro_batches)
        if ratio < 1:
            found[fqn] = f"{rows:,.0f} rows an expert, where FP8 has {min(ratio, 0.99):.2f}x the speed of BF16"
    return found
