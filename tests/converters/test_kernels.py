"""The kernels in Triton without a GPU: run by Triton's interpreter. Compiled for sm90: test_kernels_compile.py."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

pytest.importorskip("triton.experimental.gluon", reason="the GEMMs are written in Gluon (triton 3.6 or later)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from converters.backends import hopper
from converters.kernels import ops, swiglu
from tests.converters.interpreter import check_names, needs_interpreter, run_script

CHECKS = Path(__file__).with_name("kernel_checks.py")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_script(CHECKS)


@needs_interpreter
@pytest.mark.parametrize("name", check_names(CHECKS))
def test_kernel_in_the_interpreter_gives_the_bytes_of_its_twin(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


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
