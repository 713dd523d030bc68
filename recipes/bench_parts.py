"""Time of each part of the FP8 expert MLP, in place: between events, while forward and backward run as a whole.

In place, because a kernel alone on a cool GPU is 10 to 20 % faster than the same kernel in a step at the power limit.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from converters.backends import get_backend
from converters.weight_cache import quantize
from recipes.bench_cases import Case, Inputs

Mark = Callable[[str], None]


def run_parts(i: Inputs, weights: tuple[Any, Any], backend: Any, mark: Mark) -> None:
    """The MLP of converters/expert_mlp.py, spelled out: `mark` is called after each part."""
    (w13, w2), dtype = weights, i.x.dtype
    groups = backend.groups(i.offs, i.x.shape[0])
    mark("group tables")
    x8, sx = backend.quantize_rows(i.x)
    mark("rows of x")
    y13 = backend.gemm_rows(x8, sx, w13.q, w13.scale, groups, dtype)
    mark("W13 forward")
    h8, sh = backend.swiglu_rows(y13)
    mark("SwiGLU, rows of h")
    backend.gemm_rows(h8, sh, w2.q, w2.scale, groups, dtype)
    mark("W2 forward")
    g8, sg = backend.quantize_rows(i.g)
    mark("rows of dout")
    dh = backend.gemm_rows(g8, sg, w2.q_t, w2.scale_t, groups, dtype)
    mark("W2 dgrad")
    operands = backend.wgrad_operand(g8, sg, groups), backend.wgrad_operand(h8, sh, groups)
    mark("columns of dout, h")
    backend.gemm_wgrad(*operands, groups, dtype)
    mark("dW2")
    dy8, sdy = backend.dswiglu_rows(dh, y13)
    mark("dSwiGLU, rows of dy")
    backend.gemm_rows(dy8, sdy, w13.q_t, w13.scale_t, groups, dtype)
    mark("W13 dgrad")
    x = backend.wgrad_operand(x8, sx, groups)
    dys = [backend.wgrad_operand(half, sdy, groups) for half in dy8.chunk(2, dim=1)]
    mark("columns of dy, x")
    for dy in dys:
        backend.gemm_wgrad(dy, x, groups, dtype)
    mark("dW13")


GEMMS = {"W13 forward": 2, "W2 forward": 1, "W2 dgrad": 1, "dW2": 1, "W13 dgrad": 2, "dW13": 2}  # in 2 * M * D * H


class _Clock:
    """Marks in the stream of a GPU, or on the host's clock."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.marks = cuda, []
        self("start")

    def __call__(self, name: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((name, event))

    def times(self) -> dict[str, float]:
        """ms of each part."""
        out = {}
        for (_, a), (name, b) in zip(self.marks, self.marks[1:], strict=False):
            out[name] = a.elapsed_time(b) if self.cuda else (b - a) * 1e3
        return out


def parts(case: Case, i: Inputs, numerics: Any, steps: int = 12) -> dict[str, dict[str, float]]:
    """ms of each part, median of `steps`, and TFLOP/s of the GEMMs; "together", their sum."""
    backend = get_backend(numerics.backend)
    weights = quantize([i.w1, i.w3], numerics), quantize([i.w2], numerics)
    for _ in range(2):
        run_parts(i, weights, backend, lambda name: None)
    clocks = []
    for _ in range(steps):
        clocks.append(_Clock(i.x.is_cuda))
        run_parts(i, weights, backend, clocks[-1])
    if i.x.is_cuda:
        torch.cuda.synchronize()
    runs = [c.times() for c in clocks]
    out = {}
    for name in runs[0]:
        ms = median(r[name] for r in runs)
        flops = GEMMS.get(name, 0) * 2 * case.M * case.D * case.H
        out[name] = {"ms": round(ms, 4)} | ({"tflops": float(f"{flops / ms / 1e9:.4g}")} if flops else {})
    return out | {"together": {"ms": round(sum(part["ms"] for part in out.values()), 4)}}
