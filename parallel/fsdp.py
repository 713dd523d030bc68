"""How does a weight cross FSDP2's all-gather in fewer bytes?  One small tensor a shard, and scales as metadata.

    after optimizer.step   local maxima of all weights  --one all-reduce MAX a group of ranks-->  maxima a slice,
    everywhere pre_all_gather         shard, maxima -> payload (half of BF16), the same scales on every rank
    post_all_gather        payload and scales -> the unsharded weight, which stays small

A slice is one index of dim 0 (an expert). A shard holds whole slices (Shard(0)) or a piece of each (Shard(1)); a
maximum over the ranks is right for both. What a payload is, the weight's own class decides
(converters/gathered_weight.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from parallel.wrapped_weight import WrappedWeight

OTHER_AXES = {"ep", "etp", "tp", "cp", "pp"}  # torchtitan's names of the axes that are not FSDP2's


@dataclass(frozen=True)
class ShardOf:
    """One weight's shard on this rank. slices: of the whole weight, as FSDP2 gathers it; mesh: the ranks it lies on.

    one_slice: the whole weight is one slice and has no dim of slices.
    """

    local: WrappedWeight
    slices: int
    mesh: DeviceMesh
    one_slice: bool = False

    @property
    def data(self) -> Tensor:
        """The shard [s, ...], s slices or a piece of each."""
        return self.local._data.unsqueeze(0) if self.one_slice else self.local._data

    @property
    def begin(self) -> int:
        """The first slice of this shard; 0 where every rank has a piece of each."""
        whole = self.one_slice or self.local.shape[0] == self.slices
        return 0 if whole else min(self.mesh.get_local_rank() * -(-self.slices // self.mesh.size()), self.slices)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that a placement cuts, None if it cuts none. FSDP2's _StridedShard is no Shard, and both have
    `dim`.
    """
    return getattr(placement, "dim", None)


def fsdp_mesh(param: DTensor) -> DeviceMesh | None:
    """The mesh axis along which FSDP2 shards `param`, None if there is none. EP and TP shard along other axes."""
    mesh = param.device_mesh
    names = mesh.mesh_dim_names
    cut = [axis for axis, p in enumerate(param.placements) if sharded_dim(p) is not None]
    if names is None or len(names) == 1:
        return mesh if cut and (names is None or names[0] not in OTHER_AXES) else None
    fsdp = [names[axis] for axis in cut if names[axis] not in OTHER_AXES]
    return mesh[fsdp[0]] if fsdp else None


@torch.no_grad()
def amax_of_slices(groups: Iterable[list[ShardOf]], amax_slices: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """For each group of weights that share their scales, float32 [slices]: the largest |value| of each slice over all
    its weights and all ranks. One all-reduce a mesh, whatever the number of weights.

    amax_slices: [s, ...] -> float32 [s], the same on this rank.
    """
    groups = list(groups)
    by_ranks: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    out = []
    for i, shards in enumerate(groups):
        by_ranks[shards[0].mesh.get_group()].append(i)
        out.append(_local_amax(shards, amax_slices))
    for ranks, members in by_ranks.items():
        if ranks.size() > 1:
            flat = torch.cat([out[i] for i in members])
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=ranks)
            for i, part in zip(members, flat.split([out[i].numel() for i in members]), strict=True):
                out[i] = part
    return out


def _local_amax(shards: list[ShardOf], amax_slices: Callable[[Tensor], Tensor]) -> Tensor:
    first = shards[0]
    amax = torch.zeros(first.slices, dtype=torch.float32, device=first.local._data.device)
    for shard in shards:
        data = shard.data
        if data.numel():
            mine = amax[shard.begin : shard.begin + data.shape[0]]
            torch.maximum(mine, amax_slices(data), out=mine)
    return amax
