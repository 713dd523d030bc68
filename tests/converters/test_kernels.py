"""The kernels without a GPU: Triton's interpreter runs those in Triton, and those in Gluon are compiled for sm90."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

pytest.importorskip("triton.experimental.gluon", reason="the GEMMs are written in Gluon (triton 3.6 or later)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from converters.backends import hopper
from converters.kernels import ops, swiglu
from converters.kernels.gemm_rows import rows_kernel
from converters.kernels.gemm_wgrad import wgrad_kernel
from converters.kernels.tiles import BK, ROWS, rows_tile, wgrad_tile
from tests.converters.interpreter import check_names, needs_interpreter, run_script

CHECKS = Path(__file__).with_name("kernel_checks.py")
SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm90
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_script(CHECKS)


@needs_interpreter
@pytest.mark.parametrize("name", check_names(CHECKS))
def test_kernel_in_the_interpreter_gives_the_bytes_of_its_twin(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


def _descriptor(type_: str, rows: int, columns: int, bits: int) -> str:
    return f"tensordesc<{type_}[{rows}, {columns}],{NVMMASharedLayout(128, bits, rank=2)!r}>"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("kernel", [rows_kernel, wgrad_kernel], ids=["rows", "wgrad"])
def test_gemm_compiles_for_hopper(kernel: object, precise: bool, dtype: torch.dtype) -> None:
    tile = (rows_tile if kernel is rows_kernel else wgrad_tile)(16384, 8192, 5120, 16, dtype.itemsize, precise)
    a, b = _descriptor("fp8e4nv", ROWS, BK, 8), _descriptor("fp8e4nv", tile.bn, BK, 8)
    c = _descriptor(TYPES[dtype], ROWS, tile.bn // tile.pieces, 8 * dtype.itemsize)
    types = {"xd": a, "ad": a, "wd": b, "bd": b, "yd": c, "od": c, "y": f"*{TYPES[dtype]}", "dw": f"*{TYPES[dtype]}"}
    types |= dict.fromkeys(("row_scale", "w_scale"), "*fp32") | dict.fromkeys(("a_scale", "b_scale"), "*bf16")
    constants = {"BN": tile.bn, "BK": BK, "STAGES": tile.stages, "PIECES": tile.pieces, "PROGRAMS": 132}
    constants |= {"PRECISE": precise}
    types |= dict.fromkeys(("spans", "tiles"), "*i32") | dict.fromkeys(("E", "N", "K", "order"), "i32")
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ("y", "dw", "N", "K")}
    source = GluonASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.bn}k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY


@pytest.mark.parametrize("H", [8192, 14336])
def test_a_row_is_read_before_its_gradient_is_written_over_it(H: int) -> None:
    """In the code for sm90: all loads, then a barrier, then the first store."""
    kernel, block = swiglu._dswiglu_kernel, triton.next_power_of_2(H)
    types = {"dh": "*bf16", "y13": "*bf16", "q": "*fp8e4nv", "scale": "*fp32", "H": "i32", "BLOCK": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n != "BLOCK"}
    source = ASTSource(kernel, types, {"BLOCK": block}, aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"].splitlines()
    at = {op: [i for i, line in enumerate(ptx) if op in line] for op in ("ld.global", "bar.sync", "st.global")}
    assert any(max(at["ld.global"]) < barrier < min(at["st.global"]) for barrier in at["bar.sync"])


def test_ops_have_fakes_that_agree_on_shape_and_dtype() -> None:
    with FakeTensorMode():
        x, offs = torch.empty(300, 64, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
        ws = [torch.empty(3, 48, 64), torch.empty(3, 48, 64)]
        g = hopper.groups(offs, 300)
        q, s = hopper.quantize_rows(x)
        w = hopper.quantize_weight(ws)
        y = hopper.gemm_rows(q, s, w.q, w.scale, g, torch.bfloat16)
        h, sh = hopper.swiglu_rows(y)
        dy, sdy = hopper.dswiglu_rows(torch.empty(300, 48), y)
        a, b = hopper.wgrad_operand(dy, sdy, g), hopper.wgrad_operand(q, s, g)
        dw = hopper.gemm_wgrad(a, b, g, torch.float32)
    assert (y.shape, y.dtype) == ((300, 96), torch.bfloat16)
    assert (h.shape, sh.shape, dy.shape) == ((300, 48), (300,), (300, 96))
    assert (a.q.shape, a.scale.shape) == ((96, 128 * (300 // 128 + 3)), (3, 96))
    assert (dw.shape, dw.dtype) == ((3, 96, 64), torch.float32)
    assert (w.q.shape, w.q_t.shape, w.scale.shape) == ((3, 96, 64), (3, 64, 96), (3,))


def test_rowwise_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_row = True .* use backend = 'reference'"):
        hopper.quantize_weight([torch.zeros(1, 16, 16)], per_row=True)


def test_operator_registers_function_and_fake() -> None:
    @ops.operator(lambda x: x.new_empty(x.shape[0]))
    def row_sums_for_a_test(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)

    assert torch.equal(row_sums_for_a_test(torch.ones(2, 3)), torch.full((2,), 3.0))
    opcheck(row_sums_for_a_test.op, (torch.randn(2, 3),), test_utils=("test_schema", "test_faketensor"))
