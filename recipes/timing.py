"""How is a call timed?  Shared by recipes.bench and recipes.bench_dense: clocks, turns, what is said of the machine.

elapsed_ms is as a user sees it, with the host's time where the host is slower; device_ms is of the GPU alone.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from converters.config import Numerics
from recipes.run_info import versions

CALLS = 8  # of some 30 launches, of a dense layer or of experts: a stream takes about a thousand, then the host waits
MAX_CLOCK_HZ = 2e9  # of any Hopper GPU: a wait counted in its cycles is at least as long as meant


def elapsed_ms(run: Callable[[], Any], seconds: float, cuda: bool) -> float:
    """Mean time of a call, over as many as fill `seconds`."""
    if not cuda:
        begin, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - begin < seconds:
            run()
            calls += 1
        return (time.perf_counter() - begin) * 1e3 / calls
    calls = max(3, int(seconds * 1e3 / events_ms(run, 1)))
    return events_ms(run, calls)


def events_ms(run: Callable[[], Any], calls: int) -> float:
    """Mean time of a call on the GPU, between events before the first and after the last of them."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(calls):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def device_ms(run: Callable[[], Any]) -> float:
    """Mean time of a call on the GPU, of CALLS whose launches are all there before the first of them starts."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    launching = time.perf_counter() - begin
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2 * launching * MAX_CLOCK_HZ))
    return events_ms(run, CALLS)


def in_turn(
    steps: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[Callable[[], Any]], float]
) -> dict[str, list[float]]:
    """Times in ms by name, one a round: A B C A B C, since only neighbours in time compare. clock: what times a call,
    after one that it does not see.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            times[name].append(clock(step))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """`name_ms` of each name."""
    return {f"{name}_ms": round(median(ms), 4) for name, ms in times.items()}


def peaks(device: torch.device) -> dict[str, float]:
    """TFLOP/s of dense 8192 x 8192 x 8192 products, as fast as torch makes them here for half a second."""
    if device.type != "cuda":
        return {}
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
    runs = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
    }
    return {name: round(2 * 8192**3 / elapsed_ms(run, 0.5, True) / 1e9, 1) for name, run in runs.items()}


def machine(environment: Mapping[str, Any]) -> str:
    """The GPU of an `environment`, in the words of a table."""
    return "without a GPU" if environment["gpu"] == "none" else environment["gpu"]


def environment(device: torch.device, numerics: Numerics, command: list[str]) -> dict[str, Any]:
    """Date, GPU, versions, command (words), backend, the measured peaks, and whether BF16 was compiled."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "versions": versions(),
        "command": " ".join(command),
        "numerics": str(numerics),
        "peak_tflops": peaks(device),
        "bf16": "compiled" if device.type == "cuda" else "eager",
    }
