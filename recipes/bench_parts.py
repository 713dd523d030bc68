"""Time of each part of the FP8 expert MLP, in place: between events, while forward and backward run as a whole.

In place, because a kernel alone on a cool GPU is 10 to 20 % faster than the same kernel in a step at the power limit.
The parts are those of a cold step: the weights have changed, are quantized again, and each layout is used once. A warm
step has the same parts without `WEIGHTS`. A test holds them to the backend calls that a step of either kind makes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import dswiglu, swiglu
from converters.mlp_gradients import makes_both
from converters.numerics import Numerics
from converters.scaling import wgrad_gemm, wgrad_operand
from converters.weight_cache import fp8_weight
from recipes.bench_cases import Case, Inputs, change_weights

Mark = Callable[[str], None]
WEIGHTS = ("W13 to FP8", "W2 to FP8")  # what a warm step leaves out
WARM, COLD = "together, warm", "together, cold"
GEMMS = {"W13 forward": 2, "W2 forward": 1, "W2 dgrad": 1, "dW2": 1, "W13 dgrad": 2, "dW13": 2}  # in 2 * M * D * H


def run_parts(i: Inputs, n: Numerics, mark: Mark) -> None:
    """The MLP of converters/expert_mlp.py and mlp_gradients.py, spelled out: `mark` is called after each part, by its
    name. What forward and backward both do has one name: their times add up.
    """
    backend, M, w13, dtype = get_backend(n.backend), i.x.shape[0], [i.w1, i.w3], i.x.dtype
    x8, sx = backend.quantize_rows(i.x)
    mark("rows of x")
    groups = backend.groups(i.offs, M)
    mark("group tables")
    w = fp8_weight(w13, None, n, backward=False, both=makes_both(M, i.w1))
    mark("W13 to FP8")
    y13 = backend.gemm_rows(x8, sx, w.q, w.scale, groups, dtype, n.accumulate)
    mark("W13 forward")
    h8, sh = backend.swiglu_rows(y13)
    mark("SwiGLU, rows of h")
    w = fp8_weight([i.w2], None, n, backward=False)
    mark("W2 to FP8")
    backend.gemm_rows(h8, sh, w.q, w.scale, groups, dtype, n.accumulate)
    mark("W2 forward")
    groups = backend.groups(i.offs, M)
    mark("group tables")
    g8, sg = backend.quantize_rows(i.g)
    mark("rows of dout")
    w = fp8_weight([i.w2], None, n, backward=True)
    mark("W2 to FP8")
    dh = backend.gemm_rows(g8, sg, w.q_t, w.scale_t, groups, dtype, n.accumulate)
    mark("W2 dgrad")
    del w
    dy = h = None
    if n.wgrad_from_hp:
        dy, h = dswiglu(dh, y13).to(dtype), swiglu(y13).to(dtype)
        mark("dy, h in high precision")
    dy8, sdy = backend.dswiglu_rows(dh, y13)
    mark("dSwiGLU, rows of dy")
    del dh, y13
    columns = n.wgrad != "bf16"  # else the weight gradient takes high precision as it is

    def operand(q: Tensor, scale: Tensor, hp: Tensor | None) -> Any:
        return wgrad_operand((q, scale, hp), groups, n)

    sides = [operand(g8, sg, i.g), operand(h8, sh, h)]
    if columns:
        mark("columns of dout, h")
    wgrad_gemm(*sides, groups, i.w2.dtype, n)
    mark("dW2")
    del sides, g8, h8, h
    w = fp8_weight(w13, None, n, backward=True)
    mark("W13 to FP8")
    backend.gemm_rows(dy8, sdy, w.q_t, w.scale_t, groups, dtype, n.accumulate)
    mark("W13 dgrad")
    del w
    x = operand(x8, sx, i.x)
    halves = zip(dy8.chunk(2, dim=1), (None, None) if dy is None else dy.chunk(2, dim=1), strict=True)
    dys = [operand(q, sdy, hp) for q, hp in halves]
    if columns:
        mark("columns of dy, x")
    for side in dys:
        wgrad_gemm(side, x, groups, i.w1.dtype, n)
    mark("dW13")


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
        """ms of each part, of all that has its name."""
        out: dict[str, float] = {}
        for (_, a), (name, b) in zip(self.marks, self.marks[1:], strict=False):
            out[name] = out.get(name, 0.0) + (a.elapsed_time(b) if self.cuda else (b - a) * 1e3)
        return out


def parts(case: Case, i: Inputs, numerics: Numerics, steps: int = 12) -> dict[str, dict[str, float]]:
    """ms of each part, median of `steps`, and TFLOP/s of the GEMMs. Then their sums: `WARM` without the weights'
    quantization, `COLD` with it.
    """
    n = replace(numerics, cache=True, used_once=True)
    clocks = []
    for _ in range(2 + steps):  # two to warm up
        change_weights(i)
        clocks.append(_Clock(i.x.is_cuda))
        run_parts(i, n, clocks[-1])
    if i.x.is_cuda:
        torch.cuda.synchronize()
    runs = [c.times() for c in clocks[2:]]
    out = {}
    for name in runs[0]:
        ms = median(r[name] for r in runs)
        flops = GEMMS.get(name, 0) * 2 * case.M * case.D * case.H
        out[name] = {"ms": round(ms, 4)} | ({"tflops": float(f"{flops / ms / 1e9:.4g}")} if flops else {})
    cold = sum(part["ms"] for part in out.values())
    warm = cold - sum(out[name]["ms"] for name in WEIGHTS)
    return out | {WARM: {"ms": round(warm, 4)}, COLD: {"ms": round(cold, 4)}}
