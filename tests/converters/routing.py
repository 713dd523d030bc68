"""Tokens with their choices of experts, the routed MLP in float64, and what torchtitan's layer makes of it in FP8."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.backends.reference_tokens import slots_of
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.routed_mlp import routed_mlp

NAMES = ("out", "x", "scores", "base", "w1", "w2", "w3")  # the output, and whose gradient


@dataclass(frozen=True, kw_only=True)
class Routed:
    """x, base and upstream [T, D], chosen [T, k] expert ids, top_scores [T, k], weights (std 0.02)."""

    x: Tensor
    base: Tensor
    upstream: Tensor
    chosen: Tensor
    top_scores: Tensor
    weights: tuple[Tensor, Tensor, Tensor]

    @property
    def order(self) -> Tensor:
        """int64 [M], by expert, as torchtitan's reorderer gives it."""
        return self.chosen.flatten().argsort(stable=True)

    @property
    def counts(self) -> Tensor:
        return self.chosen.flatten().bincount(minlength=self.weights[0].shape[0])

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """x, scores [M] in the order of the rows (float32, as a router's are), base, w1, w2, w3 in `dtype`."""
        scores = self.top_scores.flatten()[self.order].to(torch.promote_types(dtype, torch.float32))
        w1, w2, w3 = self.weights
        others = [t.to(dtype, copy=True) for t in (self.x, self.base, w1, w2, w3)]
        return [t.requires_grad_() for t in (others[0], scores.clone(), *others[1:])]


def make_routed(T: int, k: int, E: int = 10, D: int = 64, H: int = 96, live: int | None = None) -> Routed:
    """Random tokens whose k choices are among the first `live` experts of E; the others get none."""
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    chosen = randn(T, live or E).topk(k, dim=1).indices if T else torch.empty((0, k), dtype=torch.int64)
    return Routed(
        x=randn(T, D).bfloat16(),
        base=(0.003 * randn(T, D)).bfloat16(),
        upstream=randn(T, D).bfloat16(),
        chosen=chosen,
        top_scores=torch.sigmoid(2 * randn(T, k)),
        weights=tuple((randn(shape) * 0.02).bfloat16() for shape in ((E, H, D), (E, D, H), (E, H, D))),
    )


def _by_hand(
    x: Tensor, scores: Tensor, base: Tensor, experts: Callable[[Tensor], Tensor], r: Routed, before: bool
) -> Tensor:
    """torchtitan's layer line by line, with its roundings to x's dtype."""
    (T, k), wide, s = r.chosen.shape, scores.dtype, scores[:, None]
    rows = x[r.order // k]
    o = experts((rows.to(wide) * s).to(x.dtype) if before else rows)
    o = o if before else o.to(wide) * s
    return base + torch.zeros_like(o).index_copy(0, r.order, o).view(T, k, x.shape[1]).sum(1).to(x.dtype)


def _grads(out: Tensor, leaves: list[Tensor], r: Routed) -> dict[str, Tensor]:
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, r.upstream.to(out.dtype))), strict=True))


def exact(r: Routed, before: bool) -> dict[str, Tensor]:
    """Output and all gradients in float64."""
    leaves = r.leaves(torch.float64)
    x, scores, base, w1, w2, w3 = leaves

    def experts(rows: Tensor) -> Tensor:
        groups = enumerate(rows.split(r.counts.tolist()))
        return torch.cat([(F.silu(g @ w1[e].t()) * (g @ w3[e].t())) @ w2[e].t() for e, g in groups])

    return _grads(_by_hand(x, scores, base, experts, r, before), leaves, r)


def unfused(r: Routed, before: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """FP8 experts in torchtitan's own token path."""
    leaves = r.leaves(dtype)
    x, scores, base, *ws = leaves
    offs = r.counts.cumsum(0).int()
    return _grads(_by_hand(x, scores, base, lambda rows: expert_mlp(rows, *ws, offs, Numerics()), r, before), leaves, r)


def fused(r: Routed, before: bool, dtype: torch.dtype = torch.bfloat16, wrapped: bool = False) -> dict[str, Tensor]:
    """`routed_mlp`, with plain or wrapped weights."""
    leaves = r.leaves(dtype)
    if wrapped:
        leaves[3:] = [nn.Parameter(FP8ExpertWeight(w.detach(), Numerics())) for w in leaves[3:]]
    x, scores, base, *ws = leaves
    slots = slots_of(r.order, *r.chosen.shape)
    out = routed_mlp(x, scores, slots, base, *ws, r.counts.cumsum(0).int(), before, Numerics())
    return _grads(out, leaves, r)
