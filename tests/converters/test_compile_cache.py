"""torch.compile's cache on disk: found again by another process, and never with the backward of other code."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import autograd_cache

from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight
from converters.fingerprint import CODE, fingerprint
from converters.gathered_weight import FP8GatheredWeight
from converters.linear_weight import FP8LinearWeight

ROOT = Path(__file__).parents[2]

# One FP8 product, compiled; prints what the cache did and the norm of the input's gradient.
COMPILE = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight

torch.manual_seed(0)
w = nn.Parameter(FP8ExpertWeight(torch.randn(2, 48, 32), Numerics()))
x, ends = torch.randn(8, 32, requires_grad=True), torch.tensor([3, 8], dtype=torch.int32)
torch.compile(lambda x, w: torch._grouped_mm(x, w.mT, ends), fullgraph=True)(x, w).backward(torch.ones(8, 48))
seen = counters["aot_autograd"]
print(seen["autograd_cache_hit"], seen["autograd_cache_miss"], x.grad.norm().item())
"""


def compile_in(tree: Path, seed: str) -> tuple[int, int, float]:
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(tree / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error:FP8ExpertWeight does not implement", "-c", COMPILE]
    done = subprocess.run(command, env=env, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    hits, misses, norm = done.stdout.split()
    return int(hits), int(misses), float(norm)


def test_a_graph_is_found_by_the_next_process_until_the_code_changes(tmp_path: Path) -> None:
    for name in ("converters", "parallel"):
        shutil.copytree(ROOT / name, tmp_path / name)
    hits, misses, norm = compile_in(tmp_path, "1")
    assert (hits, misses) == (0, 1)
    if hasattr(autograd_cache.AOTAutogradCachePickler, "_reduce_tensor_subclass"):  # asks for our hash
        assert compile_in(tmp_path, "2") == (1, 0, norm)
    formula = tmp_path / "converters" / "grouped_mm.py"
    text = formula.read_text()
    assert text.count("return dx, dw.transpose(1, 2)") == 1
    formula.write_text(text.replace("return dx, dw.transpose(1, 2)", "return 2 * dx, dw.transpose(1, 2)"))
    assert compile_in(tmp_path, "1") == (0, 1, pytest.approx(2 * norm))


def test_every_source_counts_and_keys_carry_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("c = 1\n")
    before = fingerprint([tmp_path])
    (tmp_path / "notes.txt").write_text("d")
    assert fingerprint([tmp_path]) == before
    (tmp_path / "a" / "b.py").write_text("c = 2\n")
    assert fingerprint([tmp_path]) != before
    numerics = Numerics(accumulate="precise", used_once=True)
    assert numerics.key.endswith(f"/{CODE}")
    assert Numerics.parse(numerics.key) == numerics
    assert Numerics.parse(numerics.temporary_key).temporary


BASE = torch.zeros(2, 4, 8)
OTHERS: dict[str, Callable[[], Tensor]] = {
    "class": lambda: FP8LinearWeight(BASE, Numerics()),
    "numerics": lambda: FP8ExpertWeight(BASE, Numerics(accumulate="precise")),
    "shape": lambda: FP8ExpertWeight(torch.zeros(2, 8, 4), Numerics()),
    "strides": lambda: FP8ExpertWeight(torch.zeros(2, 8, 4).mT, Numerics()),
    "offset": lambda: FP8ExpertWeight(torch.zeros(3, 4, 8)[1:], Numerics()),
    "dtype": lambda: FP8ExpertWeight(BASE.bfloat16(), Numerics()),
    "device": lambda: FP8ExpertWeight(BASE.to("meta"), Numerics()),
    "requires grad": lambda: nn.Parameter(FP8ExpertWeight(BASE, Numerics())),
    "gathered": lambda: gathered(torch.float32),
    "gathered for bfloat16": lambda: gathered(torch.bfloat16),
}


def gathered(dtype: torch.dtype) -> FP8GatheredWeight:
    return FP8GatheredWeight(BASE.to(torch.float8_e4m3fn), torch.ones(2), dtype, Numerics())


def test_weights_that_compile_alike_have_one_hash_and_others_have_others() -> None:
    weight = FP8ExpertWeight(BASE, Numerics())
    assert weight._stable_hash_for_caching() == FP8ExpertWeight(BASE + 1, Numerics())._stable_hash_for_caching()
    hashes = [make()._stable_hash_for_caching() for make in (lambda: weight, *OTHERS.values())]
    assert len(set(hashes)) == len(hashes)
