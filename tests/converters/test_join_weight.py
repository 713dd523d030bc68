"""Weights that are FP8 already: joined along N and transposed, byte for byte, on both backends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from converters.backends import reference

ROOT = Path(__file__).parents[2]
KERNEL = """
import torch
from converters.kernels.joined import join_transposed
torch.manual_seed(0)
for sizes in [(16, 160), (144,), (128, 128)]:
    parts = [torch.randn(3, n, 48).to(torch.float8_e4m3fn) for n in sizes]
    wanted = torch.cat([p.view(torch.uint8) for p in parts], 1).transpose(1, 2)
    assert torch.equal(join_transposed(parts).view(torch.uint8), wanted), sizes
print("same bytes")
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_joined_parts_equal_the_quantized_whole(transposed: bool) -> None:
    ws = [torch.randn(3, n, 48) for n in (16, 32)]
    whole = reference.quantize_weight(ws)
    parts = [reference.cast(w, whole.scale[:, None, None]) for w in ws]
    joined = reference.join_weight(parts, whole.scale, transposed)
    mine, wanted = (joined.q_t, whole.q_t) if transposed else (joined.q, whole.q)
    assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))
    assert (joined.q if transposed else joined.q_t).numel() == 0


def test_the_kernel_in_tritons_interpreter() -> None:
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "same bytes" in out.stdout
