"""What does FSDP2 gather of an FP8 expert weight, and what comes out?

A shard is quantized before the gather with the scale of the whole weight, one power of two an expert, so the gathered
bytes are exactly what quantizing the gathered weight would have given, at half of BF16's traffic and once per
optimizer step. The unsharded weight stays FP8 and says it has the dtype that its gradient shall have; expert_mlp takes
its payload and scale as they are.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from converters.backends import get_backend
from converters.backends.reference import pow2_scale
from converters.config import Numerics
from parallel.fsdp import ShardOf, amax_of_slices, fsdp_mesh, sharded_dim
from parallel.wrapped_weight import WrappedWeight

SHARED_SCALES = (("w1", "w3"), ("w2",))  # w1 and w3 are one GEMM, and one contraction in its input gradient


@dataclass(frozen=True)
class Payload:
    """A quantized shard. q: E4M3, the shard's shape; scale: float32 [E] of the whole weight; version: of what it was
    made from.
    """

    version: int
    q: Tensor
    scale: Tensor


class FP8GatheredWeight(WrappedWeight):
    """An unsharded weight as FSDP2 holds it: payload [E, N, K] in E4M3, scale [E], and the dtype it stands for."""

    _scale: Tensor

    @staticmethod
    def __new__(cls: type[Self], data: Tensor, scale: Tensor, dtype: torch.dtype, context: Numerics) -> Self:
        return Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=dtype,
            device=data.device,
        )

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype, context: Numerics) -> None:
        self._data, self._scale, self._context = data, scale, context

    def rewrap(self, data: Tensor) -> Self:
        """The same weight around the same bytes, or a copy of them."""
        if data.dtype != self._data.dtype or data.shape != self._data.shape:
            raise NotImplementedError(
                f"a gathered FP8 weight {tuple(self.shape)} goes to the expert MLP as it is; got a view or copy "
                f"{tuple(data.shape)}, {data.dtype}. Set [fp8.grouped_experts] fsdp_fp8_all_gather = 'off'."
            )
        return type(self)(data, self._scale, self.dtype, self._context)

    def partial(self, data: Tensor) -> Self:
        """See `rewrap`."""
        return self.rewrap(data)

    def _view(self, data: Tensor) -> Self:
        return self.rewrap(data)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "_scale"], {"context": self._context, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], size: Any, stride: Any) -> Self:
        return cls(inner["_data"], inner["_scale"], meta["dtype"], meta["context"])


def _shards(module: nn.Module, names: tuple[str, ...]) -> list[ShardOf]:
    """The FSDP2 shards of these weights of an experts module; none where it is not sharded."""
    out = []
    for name in names:
        param = module._parameters.get(name)
        if isinstance(param, DTensor) and isinstance(param._local_tensor, WrappedWeight):
            mesh = fsdp_mesh(param)
            if mesh is not None and param._local_tensor.device.type == mesh.device_type:  # not so when offloaded
                out.append(ShardOf(param._local_tensor, slices_of(param, mesh), mesh))
    return out


def slices_of(param: DTensor, fsdp: DeviceMesh) -> int:
    """How many experts the gathered weight has: all of them, or this rank's share under expert parallelism."""
    slices = param.shape[0]
    for axis, placement in enumerate(param.placements):
        names = param.device_mesh.mesh_dim_names
        is_fsdp = param.device_mesh.ndim == 1 or names[axis] == fsdp.mesh_dim_names[0]
        if sharded_dim(placement) == 0 and not is_fsdp:
            slices //= param.device_mesh.size(axis)
    return slices


def quantize_shards(modules: list[nn.Module]) -> None:
    """Quantizes the FSDP2 shards of these experts modules, all scales from one all-reduce. Collective over their
    ranks.
    """
    groups = [shards for m in modules for names in SHARED_SCALES if (shards := _shards(m, names))]
    if not groups:
        return
    backend = get_backend(groups[0][0].local._context.backend)
    for shards, amax in zip(groups, amax_of_slices(groups, backend.amax_slices), strict=True):
        scale = pow2_scale(amax)
        for s in shards:
            data = s.local._data
            mine = scale[s.begin : s.begin + data.shape[0]]
            s.local.payload = Payload(data._version, backend.cast_slices(data, mine), scale)


def payload_of(local: WrappedWeight, module: nn.Module) -> Payload | None:
    """The payload of a shard, fresh: made now, with its module's other weights, if the weights have changed since.

    Every rank decides alike, since optimizers, loads and inits touch the shards of all ranks. None if `local` is not
    the module's own parameter, as with CPU offload, where FSDP2 gathers a copy.
    """
    current = [p._local_tensor for p in module._parameters.values() if isinstance(p, DTensor)]
    if not any(t is local for t in current):
        return None
    payload = getattr(local, "payload", None)
    if payload is None or payload.version != local._data._version:
        quantize_shards([module])
        payload = local.payload
    return payload
