"""How many elements of all gradients are exact zeros: Megatron's num_zeros.

A dead expert, an FP8 underflow or a detached parameter shows here before it shows in the loss. Only steps that log are
counted. On a CPU core that is 0.8 ms for a million gradients, 0.7 % of a logged step of the debug model; on a GPU one
read of the gradients. So there is no switch for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.tools import utils


@dataclass(frozen=True)
class ZeroCount:
    """Exact zeros among all elements of all gradients of a step."""

    zeros: int
    elements: int

    @property
    def percent(self) -> float:
        """100 * zeros / elements; 0 without a gradient."""
        return 100 * self.zeros / max(self.elements, 1)


@torch.no_grad()
def count_zeros(grads: Iterable[torch.Tensor], *, owns_plain: bool) -> torch.Tensor:
    """int64 [2] on the device: zeros and elements of the gradients of all ranks, each global element counted once.

    Collective over the world; does not wait for the device.

    Args:
        grads: this rank's gradients; of a DTensor each shard counts on the first of its replicas.
        owns_plain: whether plain tensors count here. Ranks that hold copies of them (DDP) leave that to one.
    """
    owned = [local for grad in grads if (local := _owned(grad, owns_plain)) is not None]
    device = owned[0].device if owned else torch.device(utils.device_type)
    nonzero = torch.stack([_nonzero(t) for t in owned]).sum() if owned else torch.zeros((), device=device)
    elements = sum(t.numel() for t in owned)
    counts = torch.stack([elements - nonzero.long(), torch.full_like(nonzero, elements, dtype=torch.int64)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return counts


def _nonzero(t: torch.Tensor) -> torch.Tensor:
    """int64: elements of t that are not zero; nan is not.

    The norm of order zero is one read of t; by rows, because float32 counts to 2**24 and no further. count_nonzero
    writes a boolean and an int64 an element first: 31 ms against 5 for 4.7 billion gradients on an H200.
    """
    if t.dim() == 0 or t.shape[-1] > 2**24:
        return torch.count_nonzero(t)
    return torch.linalg.vector_norm(t, 0, dim=-1, dtype=torch.float32).sum(dtype=torch.int64)


def _owned(grad: torch.Tensor, owns_plain: bool) -> torch.Tensor | None:
    """The part of `grad` that this rank counts."""
    if not isinstance(grad, DTensor):
        return grad if owns_plain else None
    if any(p.is_partial() for p in grad.placements):  # zeros of a summand are no zeros of the sum
        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    at = grad.device_mesh.get_coordinate()
    copies = [i for i, p in zip(at, grad.placements, strict=True) if p.is_replicate()]
    return None if any(copies) else grad.to_local()
