"""The expert MLP in many sizes: what `[fp8.grouped_experts] below_break_even` reads.  python -m recipes.bench --sizes

The time of the GPU alone, as of recipes.bench_dense --sizes: launched one by one, small experts take the host longer,
which says nothing of a training step, where the host is ahead. The file is assets/results/experts_h200.json
(converters/break_even.py). BF16 is compiled once for each weight [H, D], for any number of rows and experts: rows are
dynamic in torchtitan too (models/llama4/infra/parallelize.py), and a compilation a case would take minutes.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, product
from typing import Any

import torch

from converters.config import Numerics
from recipes.bench_cases import Case, bf16, expert_function, forget_weights, make_inputs, ours, steps
from recipes.timing import in_turn, medians

SHAPES = ((512, 1024), (1024, 2048), (2048, 768), (2048, 4096), (5120, 8192))  # D, H; the third as of Qwen3-30B-A3B
EXPERTS = (8, 32, 128)
ROWS = (16, 64, 256, 1024)  # an expert: a fixed part and a slope, and what bends between them
MAX_PRODUCTS = 16384 * 5120 * 8192  # Scout's, 22 ms in BF16 (bench_h200.json); more would take long, and says no more
MAX_WEIGHTS = 32 * 5120 * 8192  # maverick/4's: 8 GB in BF16, the same of gradients, and FP8 in two layouts


def sizes() -> list[Case]:
    """All sizes within the limits, those of one [H, D] together."""
    grid = [Case(f"{E} x {rows}", E * rows, D, H, E) for (D, H), E, rows in product(SHAPES, EXPERTS, ROWS)]
    return [c for c in grid if c.M * c.D * c.H <= MAX_PRODUCTS and c.E * c.D * c.H <= MAX_WEIGHTS]


def measure_sizes(
    cases: Iterable[Case],
    device: torch.device,
    numerics: Numerics,
    seed: int,
    rounds: int,
    clock: Callable[[Callable[[], Any]], float],
) -> Iterator[dict[str, Any]]:
    """The entries of `cases`, one by one as they are measured: M, D, H, E, and bf16_ms, cold_ms, warm_ms by `clock`."""
    for _, alike in groupby(cases, key=lambda case: (case.D, case.H)):
        run = expert_function(device.type == "cuda", dynamic=None)
        for case in alike:
            forget_weights()
            i = make_inputs(case, device, seed)
            variants = [bf16(i, run), ours(i, numerics, cold=True), ours(i, numerics, cold=False)]
            row = {"case": case.name, "M": case.M, "D": case.D, "H": case.H, "E": case.E}
            yield row | medians(in_turn(steps(variants, i.g), rounds, clock))
            del i, variants  # before the next ones are made
