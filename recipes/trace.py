"""Where did the time and the bytes of one step go?  Reads a torch.profiler trace (Chrome JSON) of one rank.

Of the kernels that the step launched: at its begin the GPU may still be busy with the step before. Times overlap where
streams do, so they may add up to more than the step; communication is exposed while nothing else runs. Bytes are those
that a collective hands to a rank (all-gather, all-to-all: its output; reduce-scatter: its input), by NCCL's own record.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

ELEMENT_BYTES = {"Byte": 1, "Char": 1, "Float8_e4m3fn": 1, "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8}
KINDS = (  # first match wins; kernel names of torch 2.11 to 2.13 on sm90, and of converters/kernels
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|attention|cudnn_generated"),
    ("gemm", r"gemm|cutlass|nvjet|matmul|wgrad_kernel|wgrad_hp_kernel|^rows_kernel"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("quantize", r"^_?(amax|cast|rows|to_rows|to_tokens|swiglu|dswiglu|repair|tables|transpose|shard_cast)_kernel"),
)


def kind_of(kernel: str) -> str:
    """gemm, attention, communication, optimizer, quantize (ours) or other."""
    name = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")


def read_trace(path: Path) -> dict:
    """-> split_ms {kind: ms, communication_exposed, step}, and {all_gather, all_to_all, reduce_scatter}_bytes."""
    events = json.loads(path.read_text())["traceEvents"]
    kernels = step_kernels(events)
    split: dict[str, float] = defaultdict(float)
    moved: dict[str, int] = defaultdict(int)
    for e in kernels:
        split[kind_of(e["name"])] += e["dur"] / 1000
        args = e.get("args", {})
        name = str(args.get("Collective name", ""))
        if name:
            size = ELEMENT_BYTES.get(str(args.get("dtype")), 0)
            moved[_collective(name)] += size * int(
                args.get("Out msg nelems" if "reduce" not in name else "In msg nelems", 0)
            )
    if kernels:
        talk = [kind_of(e["name"]) == "communication" for e in kernels]
        if any(talk):
            everything = _busy_us(kernels)
            compute = _busy_us([e for e, t in zip(kernels, talk, strict=True) if not t])
            split["communication_exposed"] = (everything - compute) / 1000
        begin, end = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
        split["step"] = (end - begin) / 1000
    return {
        "split_ms": {k: round(v, 2) for k, v in split.items()},
        **{f"{k}_bytes": moved.get(k, 0) for k in ("all_gather", "all_to_all", "reduce_scatter")},
        "kernels": top_kernels(kernels),
    }


def step_kernels(events: list[dict]) -> list[dict]:
    """The kernels launched within the last profiled step; all, if the trace has no mark of one."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    if not marks:
        return kernels
    mark = max(marks, key=lambda e: e["ts"])
    launched = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]
    }
    return [e for e in kernels if e["args"].get("correlation") in launched]


def _busy_us(kernels: list[dict]) -> float:
    """Microseconds in which at least one of them runs."""
    busy, until = 0.0, -math.inf
    for e in sorted(kernels, key=lambda e: e["ts"]):
        begin, end = max(e["ts"], until), e["ts"] + e["dur"]
        busy, until = busy + max(0.0, end - begin), max(until, end)
    return busy


def _collective(name: str) -> str:
    for part, kind in (("allgather", "all_gather"), ("all_to_all", "all_to_all"), ("alltoall", "all_to_all")):
        if part in name:
            return kind
    return "reduce_scatter" if "reduce_scatter" in name or "reducescatter" in name else "other"


def short_name(kernel: str) -> str:
    """A kernel's name cut to 90 characters; of torch's own kernels, which are templates, the operation inside.

    `void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., at::native::LpNormFunctor<float, ...>>` is
    `multi_tensor_apply_kernel LpNormFunctor`.
    """
    outer = re.search(r"(\w+)<", kernel)
    inner = re.search(r"(\w*(?:Functor|Ops|_kernel_cuda|_kernel_impl)\w*)", kernel[outer.end() :]) if outer else None
    return (f"{outer[1]} {inner[1]}" if inner else kernel)[:90]


def top_kernels(kernels: list[dict], count: int = 40) -> list[dict]:
    """The kernels that took most time: name (short_name), ms, calls."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for e in kernels:
        entry = total[short_name(e["name"])]
        entry[0] += e["dur"] / 1000
        entry[1] += 1
    ranked = sorted(total.items(), key=lambda item: -item[1][0])[:count]
    return [{"name": name, "ms": round(ms, 2), "calls": int(calls)} for name, (ms, calls) in ranked]
