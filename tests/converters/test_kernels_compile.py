"""Every kernel compiled for sm90 as its operator launches it, without a GPU: ptxas comes with Triton.

Operators run on meta tensors, which have the sizes of a Llama4 layer and no memory. What they launch is recorded, and
compiled by `JITFunction.warmup`: types, alignment and arguments that become constants are those of the launch.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon", reason="the GEMMs are written in Gluon (triton 3.6 or later)")

import triton
from triton.backends.compiler import GPUTarget

from converters.backends import hopper
from converters.kernels import grouped, tokens
from converters.rules import fused
from converters.rules.delayed import Delayed
from converters.rules.formats import E4M3, E5M2, Format
from converters.rules.ragged import Ragged
from converters.rules.rule import STATELESS, Rule
from tests.converters.interpreter import ROOT

SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm90
BF16, FP32, FP8, INT32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32
E, M, D, H, LONG = 16, 16384, 5120, 8192, 14336  # experts, rows and tokens, widths; Mixtral's H
STACK = {"long rows": 8}  # bytes a thread that Triton 3.6 spills (3.9: none); the others have none


def _missing_ptxas() -> str:
    try:
        return "" if triton.knobs.nvidia.ptxas.path else "no path"
    except RuntimeError as error:
        return str(error)


pytestmark = pytest.mark.skipif(bool(_missing_ptxas()), reason=f"this triton has no ptxas: {_missing_ptxas()}")


def _t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _groups(experts: int = E) -> hopper.Groups:
    spans, tiles, chunks = (_t(n, 4, dtype=INT32) for n in (experts + 1, M // 128 + experts + 1, M // 512 + experts))
    return hopper.Groups(offs=_t(experts, dtype=INT32), M=M, spans=spans, tiles=tiles, chunks=chunks)


def _gemm_rows(dtype: torch.dtype, accumulate: str) -> None:
    x, w = _t(M, D, dtype=FP8), _t(E, 2 * H, D, dtype=FP8)
    hopper.gemm_rows(x, ROW_SCALE, w, FACTOR, _groups(), dtype, accumulate)


def _gemm_wgrad(dtype: torch.dtype, accumulate: str) -> None:
    a, b = (hopper.WgradOperand(q=_t(d, M + 128 * E, dtype=FP8), scale=_t(E, d)) for d in (2 * H, D))
    hopper.gemm_wgrad(a, b, _groups(), dtype, accumulate)


def _weight_again(w: Tensor) -> None:
    before = hopper.QuantizedWeight(q=w, scale=_t(len(w), dtype=FP32), q_t=w, scale_t=_t(len(w), dtype=FP32))
    hopper.quantize_weight([w, w], previous=before)


def _emulated(rule: Rule, fmt: Format) -> None:
    rule.both(_t(M, D), fmt, RAGGED, 0)
    rule.weight([W, W], 2, 1)


ROW_SCALE, W, W32 = _t(M, dtype=FP32), _t(E, H, D), _t(E, H, D, dtype=FP32)
FACTOR, SLOTS, SLOTS2 = _t(E, dtype=FP32), _t(M, 1, dtype=INT32), _t(M // 2, 2, dtype=INT32)
RAGGED = Ragged(_t(E, dtype=INT32), _t(M, dtype=torch.int64))
RULES = {name: (rule(fused), E5M2 if name == "tensorwise" else E4M3) for name, rule in STATELESS.items()}
RULES["delayed"] = Delayed(_t(2, 2, E, dtype=FP32), 0, fused), E5M2
GEMMS = {"rows": _gemm_rows, "wgrad": _gemm_wgrad}
OTHERS: dict[str, Callable[[], object]] = {  # one group, one expert: Triton makes an argument that is 1 a constant
    "groups": lambda: hopper.groups(_t(E, dtype=INT32), M),
    "one group": lambda: hopper.groups(_t(1, dtype=INT32), M),
    "rows": lambda: hopper.quantize_rows(_t(M, D)),
    "long rows": lambda: hopper.quantize_rows(_t(M, 5 * H, dtype=FP32), _t(M, dtype=INT32)),
    "swiglu": lambda: hopper.swiglu_rows(_t(M, 2 * H)),
    "long swiglu": lambda: hopper.swiglu_rows(_t(M, 2 * LONG)),
    "dswiglu": lambda: hopper.dswiglu_rows(_t(M, H), _t(M, 2 * H)),
    "long dswiglu": lambda: hopper.dswiglu_rows(_t(M, LONG), _t(M, 2 * LONG)),
    "columns": lambda: hopper.wgrad_operand(_t(M, D, dtype=FP8), ROW_SCALE, _groups()),
    "columns of one expert": lambda: hopper.wgrad_operand_hp(_t(M, D), _groups(1)),
    "weight": lambda: hopper.quantize_weight([W, W]),
    "weight forward": lambda: hopper.quantize_weight([W32], backward=False),
    "weight backward": lambda: hopper.quantize_weight([W], forward=False),
    "weight again": lambda: _weight_again(W),
    "weight of one expert again": lambda: _weight_again(W32[:1]),
    "amax of shards": lambda: hopper.amax_slices(W32),
    "cast of shards": lambda: hopper.cast_slices(W32, FACTOR),
    "joined": lambda: hopper.join_weight([_t(E, H, D, dtype=FP8)] * 2, FACTOR, True),
    "wgrad bfloat16": lambda: hopper.gemm_wgrad_hp(_t(M, H), _t(M, D), _groups(), BF16),
    "wgrad float32": lambda: hopper.gemm_wgrad_hp(_t(M, H, dtype=FP32), _t(M, D), _groups(), FP32),
    "to rows": lambda: tokens.to_rows(_t(M, D), SLOTS, M, ROW_SCALE, _t(M, D)),
    "to packed rows": lambda: tokens.to_packed_rows(_t(M // 2, D), SLOTS2, M),
    "to tokens": lambda: tokens.to_tokens(_t(M, D), SLOTS, BF16, ROW_SCALE, _t(M, D)),
    "to tokens and dots": lambda: tokens.to_tokens(_t(M, D), SLOTS2, FP32, ROW_SCALE, None, _t(M // 2, D)),
    **{f"emulated {name}": partial(_emulated, *rule) for name, rule in RULES.items()},
    "finished rows": lambda: fused.finish_rows(_t(M, D), RAGGED, FACTOR, FP32),
    "finished rows in place": lambda: fused.finish_rows(_t(M, D), RAGGED, None, BF16),
    "finished weights": lambda: fused.finish_weights(W, RAGGED, FACTOR, BF16, 2),
    "finished weights in place": lambda: fused.finish_weights(W, RAGGED, None, BF16, 1),
    "emulated swiglu": lambda: fused.swiglu(_t(M, 2 * H)),
    "emulated dswiglu": lambda: fused.dswiglu(_t(M, H), _t(M, 2 * H)),
}


class Launch(NamedTuple):
    """kernel[grid](*args, **kwargs)."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched from now on, instead of launching it."""
    made = []

    def recorder(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: made.append(Launch(kernel, args, kwargs))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", recorder)
    monkeypatch.setattr(grouped, "programs", lambda device: 132)
    return made


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All that Triton asks a driver before it compiles; kernels are kept by device, apart from those of a real one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "sm90",
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    yield
    triton.runtime.driver.set_active(None)  # the real one is looked for when it is needed; a CPU has none to go back to


def compiled(launch: Launch, folder: Path, stack: int = 0) -> Any:
    """The kernel; it fits a streaming multiprocessor, and a thread spills no more than `stack` bytes."""
    kernel = launch.kernel.warmup(*launch.args, grid=(1,), **launch.kwargs)
    assert kernel.metadata.shared <= SHARED_MEMORY
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.check_output([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    assert int(re.search(r"\bSTACK:(\d+)", usage)[1]) <= stack, usage
    return kernel


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_fast_gemm_compiles(gemm: str, dtype: torch.dtype, launches: list[Launch], tmp_path: Path) -> None:
    GEMMS[gemm](dtype, "fast")
    assert "QGMMA.64x256x32.F32.E4M3.E4M3" in compiled(launches[0], tmp_path).asm["sass"]


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_precise_gemm_compiles(gemm: str, dtype: torch.dtype, launches: list[Launch], tmp_path: Path) -> None:
    GEMMS[gemm](dtype, "precise")
    ptx = compiled(launches[0], tmp_path).asm["ptx"]  # disassembling takes 0.8 s
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_compile(name: str, launches: list[Launch], tmp_path: Path) -> None:
    OTHERS[name]()
    assert launches
    for launch in launches:
        compiled(launch, tmp_path, STACK.get(name, 0))


def test_every_kernel_is_launched_here(launches: list[Launch]) -> None:
    modules = [import_module(f"converters.kernels.{p.stem}") for p in (ROOT / "converters/kernels").glob("*.py")]
    defined = [f for m in modules for f in vars(m).values() if isinstance(f, triton.JITFunction)]
    for operator in [*(partial(gemm, BF16, "fast") for gemm in GEMMS.values()), *OTHERS.values()]:
        operator()
    launched = {(launch.kernel.__module__, launch.kernel.__name__) for launch in launches}
    wanted = {(f.__module__, f.__name__) for f in defined if f.__name__.endswith("_kernel")}
    assert launched == wanted, "a kernel needs a case in OTHERS"
