"""What holds for the hopper backend on a GPU, each a function of backend and device; the values: gpu_checks.py."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from converters import weight_cache
from converters.backends import get_backend, reference
from converters.config import SQNR_FLOOR_DB, Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from tests.converters.gpu_checks import (
    BF16,
    FP32,
    Sizes,
    dequantized,
    dswiglu_undecided,
    exact_rows,
    exact_wgrad,
    experts_on,
    host_waits,
    mlp_figures,
    offs_of,
    operand_rows,
    poison,
    rows_of,
    run_mlp,
    same,
    same_operand,
    swiglu_undecided,
)
from tests.helpers import NAMES, sqnr_db

# dB between an MLP and its twin, whose GEMMs sum otherwise. 42 to 45 in BF16, for sums with 70 dB of noise on a CPU.
TWIN_DB = 38


def check_quantizers(backend: str, device: str, sizes: Sizes, M: int, D: int = 208) -> None:
    b, live, x = get_backend(backend), sum(sizes), rows_of(M, D, sum(sizes), device)
    g, rg = (module.groups(offs_of(sizes, device), M) for module in (b, reference))
    for dtype in (BF16, FP32):
        poison(device)
        ours, theirs = b.quantize_rows(x.to(dtype)), reference.quantize_rows(x.to(dtype))
        assert all(same(a[:live], t[:live]) for a, t in zip(ours, theirs, strict=True))
    assert same_operand(b.wgrad_operand(*ours, g), reference.wgrad_operand(*theirs, rg), g)
    assert same_operand(b.wgrad_operand_hp(x, g), reference.wgrad_operand_hp(x, rg), g)
    whole = operand_rows(b.wgrad_operand(*ours, g), g)  # halves as they lie: what they are in the whole
    halves = [operand_rows(b.wgrad_operand(half, ours[1], g), g) for half in ours[0].chunk(2, dim=1)]
    for name in ("q", "scale"):
        assert same(torch.cat([getattr(h, name).float() for h in halves], dim=1), getattr(whole, name).float())


def check_weights(backend: str, device: str, E: int, Ns: tuple[int, ...], K: int, dtype: torch.dtype) -> None:
    """Cold, and carried from right and from wrong scales."""
    ws = [(torch.randn(E, N, K, device=device) * 0.02).to(dtype) for N in Ns]
    theirs = reference.quantize_weight(ws)
    wrong = theirs.scale * torch.exp2(torch.arange(E, device=device).float() % 4 - 2)
    for previous in (None, theirs, replace(theirs, scale=wrong), replace(theirs, scale=wrong * math.nan)):
        poison(device)
        ours = get_backend(backend).quantize_weight(ws, previous=previous)
        assert all(same(getattr(ours, name), getattr(theirs, name)) for name in ("q", "q_t", "scale"))


def check_gemm_rows(
    backend: str,
    device: str,
    sizes: Sizes,
    M: int,
    width: tuple[int, int],
    dtype: torch.dtype,
    accumulate: str,
    floor: float,
) -> None:
    """width: N, K."""
    b, live, (N, K) = get_backend(backend), sum(sizes), width
    q, s = b.quantize_rows(rows_of(M, K, live, device))
    w = b.quantize_weight([torch.randn(len(sizes), N, K, device=device) * 0.02])
    g = b.groups(offs_of(sizes, device), M)
    poison(device)
    y = b.gemm_rows(q, s, w.q, w.scale, g, dtype, accumulate)
    assert not y[live:].any()
    expected = exact_rows(q.float().nan_to_num(), s.nan_to_num(), w.q, w.scale, sizes)
    assert sqnr_db(expected, y) > floor


def check_gemm_wgrad(
    backend: str,
    device: str,
    sizes: Sizes,
    M: int,
    width: tuple[int, int],
    dtype: torch.dtype,
    accumulate: str,
    floor: float,
) -> None:
    """From operands that were row-scaled."""
    b, offs = get_backend(backend), offs_of(sizes, device)
    g = b.groups(offs, M)
    rows = [b.quantize_rows(rows_of(M, D, sum(sizes), device)) for D in width]
    poison(device)
    operands = [b.wgrad_operand(*r, g) for r in rows]
    dw = b.gemm_wgrad(*operands, g, dtype, accumulate)
    assert not dw[torch.tensor(sizes, device=device) == 0].any()
    left, right = (dequantized(reference.wgrad_operand(*r, reference.groups(offs, M)), sizes) for r in rows)
    assert sqnr_db(exact_wgrad(left, right, sizes), dw) > floor


def check_gemm_wgrad_hp(
    backend: str, device: str, sizes: Sizes, M: int, width: tuple[int, int], dtypes: tuple[torch.dtype, ...]
) -> None:
    """dtypes: of a, of b (which hopper casts to a's), of dw."""
    b, live, (N, K), (of_a, of_b, out) = get_backend(backend), sum(sizes), width, dtypes
    a, x = rows_of(M, N, live, device, of_a), rows_of(M, K, live, device, of_b)
    g = b.groups(offs_of(sizes, device), M)
    poison(device)
    dw = b.gemm_wgrad_hp(a, x, g, out)
    assert (dw.shape, dw.dtype) == ((len(sizes), N, K), out)
    assert not dw[torch.tensor(sizes, device=device) == 0].any()
    assert sqnr_db(exact_wgrad(a, x, sizes), dw) > (80 if of_a == of_b and out == FP32 else 48)


def check_swiglu(backend: str, device: str, M: int, H: int) -> None:
    """See `undecided`: by bits, but for values in the middle between two FP8 numbers."""
    b = get_backend(backend)
    y13, dh = (torch.randn(M, n, device=device).bfloat16() for n in (2 * H, H))
    poison(device)
    few = 2e-3 + 2 / dh.numel()  # 0.1 % are expected
    assert swiglu_undecided(b.swiglu_rows(y13), y13) < few
    assert dswiglu_undecided(b.dswiglu_rows(dh.clone(), y13), dh, y13) < few


def check_mlp(backend: str, device: str, sizes: Sizes, M: int, way: tuple[str, str], weights: torch.dtype) -> None:
    """Output and every gradient, against float64 and against the reference backend."""
    e, (wgrad, accumulate) = experts_on(device, sizes, M, weights), way
    n = Numerics(backend=backend, wgrad=wgrad, accumulate=accumulate)
    poison(device)
    found, twin = run_mlp(e, n), run_mlp(e, replace(n, backend="reference"))
    db = mlp_figures(e, found)
    assert min(db.values()) > SQNR_FLOOR_DB["tokenwise"], db
    db = {name: sqnr_db(twin[name], found[name]) for name in NAMES}
    assert min(db.values()) > TWIN_DB, db


def check_changed_weights(backend: str, device: str, n: Numerics, weights: torch.dtype) -> None:
    """An optimizer writes into the weights: they are quantized anew, right, and nothing waits for the host."""
    n, e = replace(n, backend=backend), experts_on(device, [100, 0, 77], 200, weights)
    params, x, offs = [nn.Parameter(w) for w in (e.w1, e.w2, e.w3)], e.x.requires_grad_(), e.offs.to(device)
    optimizer = torch.optim.SGD(params, lr=0.1)
    last = torch.zeros_like(x)
    # The first two compile, for weights without a past and with one, and may wait; `True`: forget the past once more.
    for mode, forget in (("default", True), ("default", False), ("error", False), ("error", True)):
        if forget:
            weight_cache.clear()
        before = [p.detach().clone() for p in params]
        with host_waits(device, mode):
            out = expert_mlp(x, *params, offs, n)
            out.backward(e.upstream)
            optimizer.step()
            optimizer.zero_grad()
        fresh = expert_mlp(x.detach(), *before, offs, replace(n, cache=False))
        assert torch.equal(out, fresh)
        assert not torch.equal(out, last)
        last = out.detach()
    assert all(p.isfinite().all() for p in params)


def check_grouped_mm(backend: str, device: str, sizes: Sizes, M: int, n: Numerics, weights: torch.dtype) -> None:
    """Alone, plain and wrapped, in both orientations of memory; with a bias [E, N] and [N]."""
    (N, K), E, live, n = (336, 208), len(sizes), sum(sizes), replace(n, backend=backend)
    x, upstream = (rows_of(M, D, live, device) for D in (K, N))
    w, offs = (torch.randn(E, N, K, device=device) * 0.02).to(weights), offs_of(sizes, device)
    as_it_lies = w.transpose(1, 2).contiguous()  # [E, K, N]
    wrapped = nn.Parameter(FP8ExpertWeight(w.clone(), n))
    biases = [torch.randn(*shape, device=device) for shape in ((E, N), (N,))]
    for leaf in (x, w, as_it_lies, *biases):
        leaf.requires_grad_()
    poison(device)
    for mode in ("default", "error"):  # the first compiles, and may wait
        with host_waits(device, mode):
            outs = [grouped_mm(x, w.transpose(1, 2), offs, n), grouped_mm(x, as_it_lies, offs, n)]
            outs += [torch._grouped_mm(x, wrapped.mT, offs, bias=bias) for bias in biases]
            leaves = [x, w], [x, as_it_lies], *([x, wrapped, bias] for bias in biases)
            grads = [torch.autograd.grad(out, of, upstream) for out, of in zip(outs, leaves, strict=True)]
    (out, other, *biased), ((dx, dw), (dx2, dw2), *of_biased) = outs, grads
    one = torch.ones((), device=device)
    expected = (
        exact_rows(x.detach(), one.expand(M), w.detach(), one.expand(E), sizes),
        exact_rows(upstream, one.expand(M), as_it_lies.detach(), one.expand(E), sizes),
        exact_wgrad(upstream, x.detach(), sizes),
    )
    _check_products(expected, (out.detach(), dx, dw), sizes)
    assert torch.equal(out, other)
    assert torch.equal(dx, dx2)
    assert torch.equal(dw, dw2.transpose(1, 2))
    experts = torch.arange(E, device=device).repeat_interleave(torch.tensor(sizes, device=device))
    for y, (dxb, dwb, db), bias in zip(biased, of_biased, biases, strict=True):
        rows = bias.detach().expand(E, N)[experts].to(BF16).double()
        assert sqnr_db(out[:live].double() + rows, y.detach()[:live]) > 45
        assert not y[live:].any()
        assert torch.equal(dxb, dx)
        assert torch.equal(dwb, dw)
        sums = exact_wgrad(torch.ones(M, 1, device=device), upstream, sizes)[:, 0]
        assert sqnr_db(sums if bias.dim() == 2 else sums.sum(0), db) > 60


def _check_products(expected: tuple[Tensor, ...], found: tuple[Tensor, ...], sizes: Sizes) -> None:
    """y, dx, dw of one grouped product in FP8: two E4M3 operands of 31.5 dB each give 28.5, one row alone 26.6 too."""
    for name, wanted, got in zip(("y", "dx", "dw"), expected, found, strict=True):
        assert got.isfinite().all(), name
        assert name == "dw" or not got[sum(sizes) :].any(), name
        assert sqnr_db(wanted, got) > 25, name
