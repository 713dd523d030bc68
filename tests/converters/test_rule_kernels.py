"""The kernels of the emulated rules without a GPU: run by Triton's interpreter, and compiled for sm90."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from converters.kernels import fake, fake_groups, finish, swiglu_hp
from tests.converters.interpreter import check_names, needs_interpreter, run_script

CHECKS = Path(__file__).with_name("rule_checks.py")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_script(CHECKS)


@needs_interpreter
@pytest.mark.parametrize("name", check_names(CHECKS))
def test_kernel_in_the_interpreter_gives_the_bits_of_plain_torch(interpreted: dict[str, str], name: str) -> None:
    assert interpreted[name] == ""


POINTERS = {"out": "*bf16", "multiplier": "*fp32", "given": "*fp32", "factor": "*fp32", "h": "*fp32", "dy": "*fp32"}
POINTERS |= dict.fromkeys(("ids", "amax", "offs"), "*i32") | dict.fromkeys(("y", "dw", "y13", "dh"), "*bf16")
TILE = {"ROWS": 128, "COLS": 128}
KNOWN = {"WIDTH": 0, "KNOWN": True, "RAISE": False, "REPAIR": False}


def ptx(kernel: object, constants: dict[str, object], x: str = "*bf16", warps: int = 8) -> str:
    """As it is launched: pointers and sizes aligned to 16, an argument that is 1 or None as a constant."""
    types = POINTERS | {"x": x}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    aligned = [(i,) for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*" or n in ("K", "N", "H", "out_e")]
    source = ASTSource(kernel, signature, constants, {i: [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def accesses(code: str, what: str) -> tuple[int, int]:
    """Loads or stores of global memory: all, and those of 16 bytes."""
    found = re.findall(rf"\b{what}\.global[^;]*;", code)
    return len(found), len([f for f in found if ".v4." in f])


@pytest.mark.parametrize(("width", "whole"), [(1024, True), (8192, True), (128, False)])
@pytest.mark.parametrize("x", ["*bf16", "*fp32"])
def test_rows_compile(x: str, width: int, whole: bool) -> None:
    constants = {"ROWS": max(fake.TILE // width, 1), "WIDTH": width, "WHOLE": whole, "FIVE": x == "*bf16"}
    code = ptx(fake._rows_kernel, constants, x, 4)
    loads, wide = accesses(code, "ld")
    assert loads == wide > 0, "memory is read in words of 16 bytes"
    assert "fma" not in code
    assert ".ftz" not in code


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("width", [0, 1, 128])
def test_groups_compile(width: int, ragged: bool) -> None:
    constants = {"RAGGED": ragged, "WIDTH": width} | TILE | ({} if ragged else {"ids": None})
    ptx(fake_groups._amax_kernel, constants)
    powers = constants | {"FIVE": False, "KNOWN": False, "RAISE": False, "REPAIR": False, "multiplier": None}
    code = ptx(fake_groups._cast_kernel, powers | {"given": None})
    assert accesses(code, "st")[0] == accesses(code, "st")[1] > 0
    assert "fma" not in code
    assert ".ftz" not in code


@pytest.mark.parametrize("ragged", [True, False])
def test_known_multipliers_compile(ragged: bool) -> None:
    constants = {"RAGGED": ragged, "FIVE": True} | TILE | KNOWN | ({} if ragged else {"ids": None})
    single = dict.fromkeys(("N", "live", "across", "of_slice"), 1)  # Triton makes an argument that is 1 a constant
    for more in ({"amax": None, "given": None}, {"given": None, "RAISE": True}, {"amax": None, "REPAIR": True}):
        assert ".ftz" not in ptx(fake_groups._cast_kernel, constants | more, "*fp32")
        ptx(fake_groups._cast_kernel, constants | more | single)


def test_finishing_compiles() -> None:
    for factor in ({}, {"factor": None}):
        for single in ({}, {"M": 1, "E": 1}):
            modes = {"FACTOR": not factor, "IN_PLACE": bool(factor)} | factor | single
            tile = {"ROWS": 16, "COLS": 256}
            ptx(finish._rows_kernel, modes | tile, warps=4)
            modes.pop("M", None)
            ptx(finish._weights_kernel, modes | tile, warps=4)


def test_swiglu_compiles() -> None:
    tile = {"ROWS": 4, "COLS": 512}
    for kernel in (swiglu_hp._swiglu_kernel, swiglu_hp._dswiglu_kernel):
        code = ptx(kernel, tile, warps=4)
        assert len(re.findall(r"div\.rn\.f32", code)) > 0, "torch divides, it does not approximate"
        assert "div.full" not in code
