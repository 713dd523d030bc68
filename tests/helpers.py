"""What the tests share: a float64 reference, awkward groups, and processes that talk over gloo."""

import functools
import importlib
import os
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from parallel.device import prepare_device

DEVICE = prepare_device()  # "cpu" gets torchtitan's gaps filled; whole models run on DEVICE, plain functions on the CPU

# Sizes of the groups of rows, and what each of them has broken somewhere in public.
GROUPS = {
    "unaligned": (44, 1, 7, 0, 17),
    "all_on_one_expert": (0, 0, 69, 0),
    "one_expert": (37,),
    "last_empty": (5, 11, 0),
    "first_empty": (0, 3, 29),
    "more_experts_than_tokens": (0, 1, 0, 0, 1, 0, 1, 0),
    "no_token": (0, 0, 0),
}
NAMES = ("out", "x", "w1", "w2", "w3")  # the output, and whose gradient


def sqnr_db(reference: Tensor, actual: Tensor) -> float:
    """Signal to quantization noise in dB; 6 dB are one bit. inf when equal, nan when `actual` has a nan."""
    signal, noise = reference.double().norm(), (reference.double() - actual.double()).norm()
    return float("inf") if noise == 0 else (20 * torch.log10(signal / noise)).item()


def offsets(sizes: tuple[int, ...]) -> Tensor:
    """int32 [E], the ends of groups of these sizes."""
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).int()


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Inputs of an expert MLP: rows [M, D], weights (std 0.02), a random upstream gradient [M, D]."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    upstream: Tensor
    sizes: tuple[int, ...]

    @property
    def offs(self) -> Tensor:
        return offsets(self.sizes)

    @property
    def rows(self) -> int:
        """Rows that belong to an expert; the rest of the buffer is nobody's."""
        return sum(self.sizes)

    def only(self, e: int) -> "Experts":
        """Expert e with its rows, alone."""
        rows = slice(sum(self.sizes[:e]), sum(self.sizes[: e + 1]))
        w1, w2, w3 = (w[e : e + 1].clone() for w in (self.w1, self.w2, self.w3))
        x, upstream = self.x[rows].clone(), self.upstream[rows].clone()
        return Experts(x=x, upstream=upstream, w1=w1, w2=w2, w3=w3, sizes=self.sizes[e : e + 1])


def make_experts(sizes: tuple[int, ...], D: int = 64, H: int = 96, *, tail: int = 0, seed: int = 0) -> Experts:
    """Random normal experts; `tail` rows of the buffer lie past the last group."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    E, M = len(sizes), sum(sizes) + tail
    return Experts(
        x=randn(M, D),
        w1=randn(E, H, D) * 0.02,
        w2=randn(E, D, H) * 0.02,
        w3=randn(E, H, D) * 0.02,
        upstream=randn(M, D),
        sizes=sizes,
    )


def exact_mlp(experts: Experts) -> dict[str, Tensor]:
    """Output and all gradients in float64, by autograd over plain matmuls. Rows of nobody have zeros."""
    leaves = [t.double().requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
    x, w1, w2, w3 = leaves
    rows = x[: experts.rows].split(experts.sizes)
    groups = [(F.silu(r @ w1[e].t()) * (r @ w3[e].t())) @ w2[e].t() for e, r in enumerate(rows)]
    out = torch.cat([*groups, torch.zeros(len(x) - experts.rows, x.shape[1], dtype=torch.float64)])
    grads = torch.autograd.grad(out, leaves, experts.upstream.double())
    return dict(zip(NAMES, (out.detach(), *grads), strict=True))


def fp8_mlp(experts: Experts, numerics: Numerics) -> dict[str, Tensor]:
    """The same from `expert_mlp` with wrapped weights."""
    x = experts.x.clone().requires_grad_()
    w1, w2, w3 = (nn.Parameter(FP8ExpertWeight(w.clone(), numerics)) for w in (experts.w1, experts.w2, experts.w3))
    out = expert_mlp(x, w1, w2, w3, experts.offs, numerics)
    out.backward(experts.upstream)
    return dict(zip(NAMES, (out.detach(), x.grad, w1.grad, w2.grad, w3.grad), strict=True))


def with_tail(experts: Experts, value: float) -> Experts:
    """`experts` with every row of nobody filled with `value`, in x and in the upstream gradient."""
    x, upstream = experts.x.clone(), experts.upstream.clone()
    x[experts.rows :] = upstream[experts.rows :] = value
    return replace(experts, x=x, upstream=upstream)


def poison_freed_memory() -> None:
    """Fills memory with nan and frees it, so that whoever reads what it did not write reads nan."""
    sizes = [2**k for k in range(6, 22)] * 4
    for block in [torch.full((size // 4,), torch.nan) for size in sizes]:
        del block


def distributed(world_size: int, timeout_s: float = 180) -> Callable[[Callable], Callable]:
    """Runs the decorated test in `world_size` fresh processes, each a rank of a gloo group on the CPU.

    A rank that raises ends all of them, and its traceback is the failure; so does running past `timeout_s`.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            _spawn(world_size, timeout_s, (test.__module__, test.__qualname__, args, kwargs))

        return run

    return decorate


def _spawn(world_size: int, timeout_s: float, work: tuple) -> None:
    context = torch.multiprocessing.get_context("spawn")
    # Port 0: the store is bound to a free port before anybody hears of it, so no other process can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, store.port, timeout_s, work, results), daemon=True)
        for rank in range(world_size)
    ]
    with _environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        for process in ranks:
            process.start()
    try:
        _collect(ranks, results, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(ranks: list, results: Any, deadline: float) -> None:
    waiting = set(range(len(ranks)))
    while waiting:
        try:
            rank, error = results.get(timeout=1)
        except queue.Empty:
            dead = [r for r in waiting if ranks[r].exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died without a word: exit codes {[ranks[r].exitcode for r in dead]}"
            assert time.monotonic() < deadline, f"ranks {sorted(waiting)} hang"
            continue
        assert error is None, f"rank {rank}:\n{error}"
        waiting.remove(rank)


class _environment:
    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _rank(rank: int, world_size: int, port: int, timeout_s: float, work: tuple, results: Any) -> None:
    module, name, args, kwargs = work
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise
    results.put((rank, None))
    dist.destroy_process_group()
