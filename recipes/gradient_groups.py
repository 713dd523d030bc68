"""Gradient norms by part of the model: in which part does a gap between two runs begin?"""

import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from converters.selection import clean_fqn
from recipes.finite import GradNorms

# group -> which parameter names belong to it; the first that matches. Norms first: q_norm lies within attention.
GROUPS = {
    "norms": r"norm",
    "embedding": r"^tok_embeddings\.",
    "head": r"^output\.",
    "router": r"\.router\.",
    "shared_expert": r"\.shared_experts?\.",
    "experts": r"\.experts\.",
    "attention": r"\.attention\.",
    "dense_ffn": r"\.feed_forward\.",
    "other": r"",
}
NAMES = tuple(GROUPS)


def group_of(fqn: str) -> str:
    """The group of a parameter, by its name."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, fqn))


def _counted(parameter: nn.Parameter, owns_plain: bool) -> bool:
    """Whether this rank counts its part: of copies of the same values one does."""
    if not isinstance(parameter, DTensor):
        return owns_plain
    at = parameter.device_mesh.get_coordinate()
    copies = [i for i, p in zip(at, parameter.placements, strict=True) if p.is_replicate() or p.is_partial()]
    return not any(copies)


class GradientGroups:
    """Sums of squares by group, from the norms that clipping has computed anyway."""

    def __init__(self, model_parts: list[nn.Module], owns_plain: bool) -> None:
        named = [(clean_fqn(fqn), p) for part in model_parts for fqn, p in part.named_parameters()]
        of = [(NAMES.index(group_of(fqn)), _counted(p, owns_plain)) for fqn, p in named]
        self._group = [group if counted else len(NAMES) for group, counted in of]

    def squares(self, norms: GradNorms | None, device: torch.device) -> torch.Tensor:
        """float64 [groups] on the device: this rank's part of each group's sum of squares."""
        out = torch.zeros(len(NAMES) + 1, dtype=torch.float64, device=device)  # the last: what another rank counts
        if norms is not None and norms.indices:
            where = torch.tensor([self._group[i] for i in norms.indices]).to(device, non_blocking=True)
            out.index_add_(0, where, norms.norms.double().square().to(device))
        return out[: len(NAMES)]
