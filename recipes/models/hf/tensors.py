"""Pieces of stacked expert weights, of plain tensors and of DTensors, without communication wherever that is possible.

A DTensor's local part is cut and its placements are rewritten; nothing is gathered. Letters: E experts, A and B the two
matrix dims of one expert.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

# What torch.distributed.checkpoint itself asks for a DTensor's part; torch has no public name for it.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def _on_dim(placement: Placement, dim: int) -> Placement:
    """The same sharding of another tensor dim. _StridedShard (FSDP over TP or EP) first: it may be a Shard too."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement shards, None for a replica."""
    if isinstance(placement, Replicate):
        return None
    if not isinstance(placement, (Shard, _StridedShard)):
        raise ValueError(f"A weight with placement {placement} cannot be exported: weights are sharded or replicated.")
    return placement.dim


def experts_of(weight: Tensor) -> dict[int, Tensor]:
    """Each expert of a weight [E, A, B] that this rank holds, by its number: views [A, B] of the local part.

    A mesh axis that shards experts, or replicates, is gone from a view; one that shards A or B stays, so a view is a
    DTensor only then.
    """
    if not isinstance(weight, DTensor):
        return dict(enumerate(weight.unbind(0)))
    mesh, placements = weight.device_mesh, weight.placements
    shape, offset = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    inner = [(i, p, d) for i, p in enumerate(placements) if (d := _sharded_dim(p)) not in (None, 0)]
    local = weight.to_local().unbind(0)
    assert len(local) == shape[0], (len(local), shape)
    if not inner:
        return {offset[0] + i: part for i, part in enumerate(local)}
    axes = mesh[tuple(mesh.mesh_dim_names[i] for i, _, _ in inner)]
    layout = [_on_dim(p, d - 1) for _, p, d in inner]
    A, B = weight.shape[1:]
    return {
        offset[0] + i: DTensor.from_local(part, axes, layout, run_check=False, shape=torch.Size((A, B)), stride=(B, 1))
        for i, part in enumerate(local)
    }


def transposed(weight: Tensor) -> Tensor:
    """[E, A, B] -> [E, B, A], contiguous: safetensors writes nothing else."""
    if not isinstance(weight, DTensor):
        return weight.transpose(1, 2).contiguous()
    swap = {None: None, 0: 0, 1: 2, 2: 1}
    dims = [swap[_sharded_dim(p)] for p in weight.placements]
    layout = [p if d is None else _on_dim(p, d) for p, d in zip(weight.placements, dims, strict=True)]
    E, A, B = weight.shape
    local = weight.to_local().transpose(1, 2).contiguous()
    shape, stride = torch.Size((E, B, A)), (A * B, A, 1)
    return DTensor.from_local(local, weight.device_mesh, layout, run_check=False, shape=shape, stride=stride)


def joined(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Two weights of one shape and placement side by side along `dim` (1 or 2).

    A mesh axis that shards `dim` is moved to the other matrix dim first (one all-to-all): a rank's part of the result
    would have a hole otherwise.
    """
    if not isinstance(left, DTensor):
        return torch.cat((left, right), dim)
    left, right = (_without_shards_of(w, dim) for w in (left, right))
    local = torch.cat((left.to_local(), right.to_local()), dim)
    shape = list(left.shape)
    shape[dim] *= 2
    stride = (shape[1] * shape[2], shape[2], 1)
    return DTensor.from_local(
        local, left.device_mesh, left.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def halves(weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The inverse of `joined`, for a weight that no mesh axis shards along `dim`."""
    if not isinstance(weight, DTensor):
        left, right = weight.chunk(2, dim)
        return left, right
    shape = list(weight.shape)
    shape[dim] //= 2
    stride = (shape[1] * shape[2], shape[2], 1)
    left, right = (
        DTensor.from_local(
            part, weight.device_mesh, weight.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        for part in weight.to_local().chunk(2, dim)
    )
    return left, right


def _without_shards_of(weight: DTensor, dim: int) -> DTensor:
    other = 3 - dim
    layout = [Shard(other) if _sharded_dim(p) == dim else p for p in weight.placements]
    return weight if tuple(layout) == tuple(weight.placements) else weight.redistribute(placements=layout)
