"""What the tests of the hopper backend share. Backend and device are arguments: test_gpu_checks.py runs it on a CPU."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from converters.backends import reference
from converters.backends.reference import FP8, WgradOperand, pow2_scale
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from tests.helpers import NAMES, Experts, exact_mlp, make_experts, poison_freed_memory, sqnr_db, with_tail

Sizes = list[int]
BF16, FP32 = torch.bfloat16, torch.float32

# Sizes, and rows of the buffer: no alignment, empty groups, one expert, all rows on one, no rows at all, many experts.
GROUPS: dict[str, tuple[Sizes, int]] = {
    "unaligned": ([44, 1, 7, 0, 17], 100),
    "all_on_one": ([0, 0, 300, 0], 300),
    "about_a_tile": ([64, 65, 128, 129, 63, 1], 512),
    "one_expert": ([1000], 1000),
    "no_token": ([0, 0], 48),
    "long": ([700, 900, 3], 2000),
    "many_experts": ([16, 0] * 96, 1600),
}

# Weight gradient and accumulation; with wgrad "bf16" precise_wgrad has nothing to say.
WAYS = [(w, a) for w in ("fp8", "fp8_columns", "bf16") for a in ("fast", "precise_wgrad", "precise")]
WAYS.remove(("bf16", "precise_wgrad"))

# dB of a GEMM. The tensor core sums to about 14 bits, over all of the contraction or (precise) 128 of it: 73 to 79 dB.
# A result in BF16: 50.
PRODUCTS = [(BF16, "fast", 48), (FP32, "fast", 60), (FP32, "precise", 70)]
# The kernels' sigmoid and the order of their products, relative: exp in 2 units of 2**-23 and |x| * 2**-24, a division
# in 2 units, and what the gradient makes of it.
SWIGLU_EPS = 2.0**-17


def poison(device: str) -> None:
    """Memory that the allocator hands out next is full of 0xff, a nan in every dtype: an element nobody wrote shows.

    On a GPU largest first: smaller blocks fill what larger ones leave. Up to 1 MiB (2**20) they have a pool of their
    own. Without the caching allocator (under compute-sanitizer) nothing comes back, and there is nothing to do.
    """
    if device == "cpu":
        poison_freed_memory()
    elif os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        sizes = [2**k for k in range(28, 8, -1) for _ in range(4 if k > 20 else 16)]
        for block in [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]:
            del block


@contextmanager
def host_waits(device: str, mode: str) -> Iterator[None]:
    """mode: "default", or "error": on a GPU, torch raises where the host would wait for it."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def offs_of(sizes: Sizes, device: str) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def rows_of(M: int, D: int, live: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    """Of 16 magnitudes, and nan past the first `live`: rows of nobody."""
    x = torch.randn(M, D, device=device) * torch.exp2(torch.randint(-8, 8, (M, 1), device=device).float())
    x[live:] = math.nan
    return x.to(dtype)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal bits; any nan is any other."""
    a, b = (t.view(torch.uint8) if t.dtype == FP8 else t for t in (ours, theirs))
    return a.shape == b.shape and bool(((a == b) | (ours.float().isnan() & theirs.float().isnan())).all())


def operand_rows(a: Any, groups: Any) -> WgradOperand:
    """A backend's operand as the reference has it: q [M, D], zero for rows of nobody, scale [E, D], 1 for no rows."""
    if isinstance(a, WgradOperand):
        return a
    q, columns = a.q.new_zeros((groups.M, a.q.shape[0]), dtype=torch.uint8), a.q.view(torch.uint8).t()
    for begin, end, tile, _ in groups.spans[:-1].tolist():
        padded = columns[128 * tile : 128 * (tile + -(-(end - begin) // 128))]
        q[begin:end] = padded[: end - begin]
        assert not padded[end - begin :].any(), "padding is not zero"
    empty = groups.spans[:-1, 0] == groups.spans[:-1, 1]
    return WgradOperand(q=q.view(FP8), scale=a.scale.float().masked_fill(empty[:, None], 1))


def same_operand(ours: Any, theirs: WgradOperand, groups: Any) -> bool:
    a = operand_rows(ours, groups)
    return same(a.q, theirs.q) and same(a.scale, theirs.scale)


def exact_rows(q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, sizes: Sizes) -> Tensor:
    """`gemm_rows` in float64: q [M, K], w [E, N, K]; rows of nobody are zeros."""
    x, live = q.double() * s[:, None], sum(sizes)
    groups = zip(x[:live].split(sizes), w, w_scale, strict=True)
    y = torch.cat([rows @ (weight.double() * scale).t() for rows, weight, scale in groups])
    return torch.cat([y, y.new_zeros(len(x) - live, y.shape[1])])


def exact_wgrad(a: Tensor, b: Tensor, sizes: Sizes) -> Tensor:
    """a [M, N], b [M, K] -> a_e^T @ b_e in float64, [E, N, K]."""
    live = sum(sizes)
    groups = zip(a[:live].double().split(sizes), b[:live].double().split(sizes), strict=True)
    return torch.stack([left.t() @ right for left, right in groups])


def dequantized(a: WgradOperand, sizes: Sizes) -> Tensor:
    """[M, D] in float64: each row times the scales of its expert."""
    experts = torch.arange(len(sizes), device=a.q.device).repeat_interleave(torch.tensor(sizes, device=a.q.device))
    return a.q[: sum(sizes)].double() * a.scale[experts]


def undecided(found: tuple[Tensor, Tensor], exact: Tensor, size: Tensor) -> float:
    """Quantized rows (q, scale) against the values that were quantized, known to `size` * SWIGLU_EPS.

    They cannot be compared by bits with a twin whose sigmoid rounds elsewhere: a value in the middle between two FP8
    numbers goes to either. So each is held between the casts of the least and the largest value it may have had.

    Returns:
        The share of elements for which these differ; the others have the only bits that are right.
    """
    (q, scale), slack = found, size * SWIGLU_EPS
    least = pow2_scale((exact.abs() - slack).clamp_min(0).amax(1))
    assert ((least <= scale) & (scale <= pow2_scale((exact.abs() + slack).amax(1)))).all(), "scale"
    low, high = (reference.cast(t, scale[:, None]).float() for t in (exact - slack, exact + slack))
    assert ((low <= q.float()) & (q.float() <= high)).all(), "cast"
    return float((low != high).float().mean()) if q.numel() else 0.0


def swiglu_undecided(found: tuple[Tensor, Tensor], y13: Tensor) -> float:
    """`undecided` of swiglu_rows(y13)."""
    h = reference.swiglu(y13)
    return undecided(found, h, h.abs())


def dswiglu_undecided(found: tuple[Tensor, Tensor], dh: Tensor, y13: Tensor) -> float:
    """`undecided` of dswiglu_rows(dh, y13): 1 + a * (1 - sigmoid) is small where its terms are not."""
    a, b = y13.float().chunk(2, dim=1)
    sigmoid = torch.sigmoid(a)
    size = [dh.float() * b * sigmoid * (1 + a.abs() * (1 - sigmoid)), dh.float() * a * sigmoid]
    return undecided(found, reference.dswiglu(dh, y13), torch.cat(size, dim=1).abs())


def experts_on(device: str, sizes: Sizes, M: int, weights: torch.dtype, D: int = 208, H: int = 336) -> Experts:
    """Rows in BF16, nan past the last group; weights in their dtype."""
    e = with_tail(make_experts(tuple(sizes), D, H, tail=M - sum(sizes)), math.nan)
    rows = {name: getattr(e, name).to(device, BF16) for name in ("x", "upstream")}
    return replace(e, **rows, **{name: getattr(e, name).to(device, weights) for name in ("w1", "w2", "w3")})


def run_mlp(e: Experts, n: Numerics) -> dict[str, Tensor]:
    """Output and all gradients of `expert_mlp`."""
    leaves = [t.clone().requires_grad_() for t in (e.x, e.w1, e.w2, e.w3)]
    out = expert_mlp(*leaves, e.offs.to(e.x.device), n)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, e.upstream)), strict=True))


def mlp_figures(e: Experts, found: dict[str, Tensor]) -> dict[str, float]:
    """dB against float64 of output and gradients, which are all finite, and zero where nothing was."""
    dtypes = dict.fromkeys(NAMES, e.w1.dtype) | dict.fromkeys(("out", "x"), BF16)
    assert {name: t.dtype for name, t in found.items()} == dtypes
    assert all(t.isfinite().all() for t in found.values()), "not finite"
    assert not any(found[name][e.rows :].any() for name in ("out", "x")), "rows of nobody"
    empty = torch.tensor(e.sizes) == 0
    assert not any(found[name][empty.to(e.x.device)].any() for name in ("w1", "w2", "w3")), "experts without a token"
    with torch.device(e.x.device):
        exact = exact_mlp(e)
    return {name: sqnr_db(exact[name], found[name]) for name in NAMES}
