"""What does FSDP2 gather of an FP8 weight, and what comes out?

A shard is quantized before the gather with the scale of the whole weight, one power of two an expert (a linear layer's
weight [N, K] is one expert), so the gathered bytes are exactly what quantizing the gathered weight would have given, at
half of BF16's traffic and once per optimizer step. The unsharded weight stays FP8 and says it has the dtype that its
gradient shall have; expert_mlp and the dense ops take its payload and scale as they are.

The quantized shard is there from the optimizer step on, 1 byte a weight: for every gather, or, where a step uses each
weight once (`Numerics.used_once`), until backward has gathered it, before all gradients are there and memory peaks.
Where expert parallelism takes all data-parallel ranks a shard is the whole weight: 2.8 GiB of Scout's width in 3 layers
on two GPUs, by which FP8 was above BF16 (assets/results/e2e_h200x2.json).
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
from converters.telemetry_mlp import see_shard
from parallel.fsdp import ShardOf, amax_of_slices, fsdp_mesh, sharded_dim
from parallel.wrapped_weight import WrappedWeight

SHARED_SCALES = (("w1", "w3"), ("w2",))  # w1 and w3 are one GEMM, and one contraction in its input gradient
JOINED = "joined_layers"  # attribute of a linear layer: those whose weights are one GEMM with its own, itself included


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


def shard_of(module: nn.Module, name: str) -> ShardOf | None:
    """The FSDP2 shard of a module's weight; none where it is not sharded."""
    param = module._parameters.get(name)
    if not isinstance(param, DTensor) or not isinstance(param._local_tensor, WrappedWeight):
        return None
    mesh = fsdp_mesh(param)
    if mesh is None or param._local_tensor.device.type != mesh.device_type:  # when offloaded
        return None
    if param.dim() == 2:
        return ShardOf(param._local_tensor, 1, mesh, one_slice=True)
    return ShardOf(param._local_tensor, slices_of(param, mesh), mesh)


def _groups(modules: list[nn.Module]) -> list[list[ShardOf]]:
    """The shards of these experts modules and linear layers; those of one GEMM, which share their scales, together."""
    out: dict[int, list[ShardOf]] = {}
    for module in modules:
        layers = getattr(module, JOINED, None)
        named = [[(m, "weight") for m in layers]] if layers else [[(module, n) for n in ns] for ns in SHARED_SCALES]
        for members in named:
            if shards := [shard for m, name in members if (shard := shard_of(m, name)) is not None]:
                out[id(shards[0].local)] = shards
    return list(out.values())


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
    """Quantizes the FSDP2 shards of these experts modules and linear layers, all scales from one all-reduce.
    Collective over their ranks.
    """
    groups = _groups(modules)
    if not groups:
        return
    backend = get_backend(groups[0][0].local._context.backend)
    for shards, amax in zip(groups, amax_of_slices(groups, backend.amax_slices), strict=True):
        scale = pow2_scale(amax)
        for s in shards:
            mine = scale[s.begin : s.begin + s.data.shape[0]]
            q = backend.cast_slices(s.data, mine).view(s.local._data.shape)
            s.local.payload = Payload(s.local._data._version, q, scale)
            if (tap := getattr(s.local, "tap", None)) is not None:
                see_shard(tap, s.data, q, mine)


def quantize_changed_shards(parts: list[nn.Module]) -> None:
    """After an optimizer step: `quantize_shards` for all FP8 weights of these models that are gathered in FP8, experts
    and linear layers together. Whichever converter asks first does it for all; then none has changed any more.
    """
    modules = [m for part in parts for m in part.modules() if _gathers_fp8(m)]
    if any(_stale(shard.local) for shards in _groups(modules) for shard in shards):
        quantize_shards(modules)


def _gathers_fp8(module: nn.Module) -> bool:
    weights = [p._local_tensor for p in module.parameters(recurse=False) if isinstance(p, DTensor)]
    return any(isinstance(w, WrappedWeight) and w._context.fp8_all_gather for w in weights)


def _stale(local: WrappedWeight) -> bool:
    payload = getattr(local, "payload", None)
    return payload is None or payload.version != local._data._version


def payload_of(local: WrappedWeight, module: nn.Module) -> Payload | None:
    """The payload of a shard for FSDP2 to gather now, fresh: made now, with the weights that share its scale, if they
    have changed since. What backward gathers of a weight that is used once is given up.

    Every rank decides alike, since optimizers, loads and inits touch the shards of all ranks. None if `local` is not
    the module's own parameter, as with CPU offload, where FSDP2 gathers a copy.
    """
    current = [p._local_tensor for p in module._parameters.values() if isinstance(p, DTensor)]
    if not any(t is local for t in current):
        return None
    if _stale(local):
        quantize_shards([module])
    payload = local.payload
    if local._context.used_once and _within_backward():
        local.payload = None
        if payload.q.is_cuda:  # FSDP2 copies it on this stream; it was made on another, which would reuse its memory
            payload.q.record_stream(torch.cuda.current_stream())
    return payload


def _within_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
