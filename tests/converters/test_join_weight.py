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


SHARD_KERNELS = """
import torch
from converters.backends import hopper, reference
torch.manual_seed(0)
for shape, dtype in [((3, 16, 48), torch.float32), ((2, 7, 33), torch.bfloat16), ((0, 4, 4), torch.float32)]:
    w = torch.randn(shape).to(dtype)
    if len(w):
        w[0] *= 1e-4
    amax = hopper.amax_slices(w)
    assert torch.equal(amax, reference.amax_slices(w)), shape
    scale = reference.pow2_scale(amax)
    mine, wanted = hopper.cast_slices(w, scale), reference.cast_slices(w, scale)
    assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)), shape
assert hopper.amax_slices(torch.tensor([[1.0, float("nan")]])).isnan().all()
print("same bytes")
"""


def test_the_shard_kernels_in_tritons_interpreter() -> None:
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", SHARD_KERNELS], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "same bytes" in out.stdout
