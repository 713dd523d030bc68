"""FP8ExpertWeight: a weight whose products run in FP8, in whatever way a module spells them.

`__torch_function__` sees a product before autograd does and hands it to `grouped_mm`, our autograd function:

    torch._grouped_mm, nn.functional.grouped_mm     A [M, K] @ W [E, K, N], offs         as it is
    bmm, and the two above without offs             A [E, M, K] @ W [E, K, N]            E groups of M rows
    matmul, mm, @, nn.functional.linear             A [..., K] @ W [K, N]                one group

Views of a weight (w[e], w.transpose(-2, -1), w.chunk(2, dim=1)) are FP8ExpertWeights too, so w[e].t() works. Everything
else a tensor can do is storage: parallel/wrapped_weight.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from converters.backends.reference import FP8
from converters.config import Numerics
from converters.gathered_weight import FP8GatheredWeight, payload_of
from converters.group_bias import add_group_bias
from converters.grouped_mm import grouped_mm
from converters.telemetry import Tap, claim
from parallel.wrapped_weight import WrappedWeight, padded_shard


class FP8ExpertWeight(WrappedWeight):
    """`FP8ExpertWeight(data, numerics)`; data [E, N, K] or a view of such a weight."""

    _context: Numerics
    tap: Tap | None = None  # measures what is computed with it (telemetry.py)

    def rewrap(self, data: Tensor) -> Self:
        """A copy owns its data: what is quantized from it may be kept."""
        return type(self)(data, replace(self._context, temporary=False))

    def partial(self, data: Tensor) -> Self:
        """Not cached: nobody counts a view's versions, and a cache would outlive what FSDP2 gathers."""
        return type(self)(data, replace(self._context, temporary=True))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], Tensor | None]:
        """What FSDP2 gathers: the shard in FP8, with the scales of all experts as metadata, or in high precision."""
        payload = payload_of(self, module) if self._context.fp8_all_gather else None
        if payload is None:
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        # As bytes: gloo gathers no FP8 dtype, and to NCCL it is the same.
        return (padded_shard(payload.q.view(torch.uint8), mesh, outer_size),), (payload.scale, outer_size)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, torch.Size] | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The unsharded weight: see `WrappedWeight`, or around the gathered FP8 bytes."""
        if self.tap is not None:
            claim(outputs[0], self.tap)
        if metadata is None:
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)
        (data,), (scale, size) = outputs, metadata
        if out is None:
            # Gathered along dim 1, the bytes have the right order and still the shape of shards in a row; along dim 0
            # the last shards may be padded.
            whole = data.view(FP8).flatten()[: size.numel()].view(size)
            context = replace(self._context, temporary=True)
            return FP8GatheredWeight(whole, scale, param_dtype, context), (data,)
        local = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(local, FP8GatheredWeight), type(local)
        local._scale = scale
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if handler := PRODUCT_HANDLERS.get(func):
            return handler(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _require_weight_right(a: Tensor, w: Tensor, spelling: str) -> Numerics:
    if not isinstance(w, FP8ExpertWeight) or isinstance(a, FP8ExpertWeight):
        raise NotImplementedError(
            f"{spelling}: the FP8 expert weight must be the right operand and the activations the left one; "
            f"got {type(a).__name__} and {type(w).__name__}. Write x @ w.transpose(-2, -1)."
        )
    return w._context


def _grouped(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    numerics = _require_weight_right(mat_a, mat_b, "grouped_mm")
    if offs is None:
        return add_group_bias(_in(_batched(mat_a, mat_b), out_dtype), bias, None, mat_b.shape[0])
    if mat_a.dim() != 2 or mat_b.dim() != 3:
        raise NotImplementedError(
            f"grouped_mm with offs and an FP8 weight takes A [M, K] and W [E, K, N]; got {tuple(mat_a.shape)} and "
            f"{tuple(mat_b.shape)}."
        )
    out = _in(grouped_mm(mat_a, mat_b, offs, numerics), out_dtype)
    return add_group_bias(out, bias, offs, mat_b.shape[0])


def _batched(a: Tensor, w: Tensor) -> Tensor:
    numerics = _require_weight_right(a, w, "bmm")
    if a.dim() != 3 or w.dim() != 3 or a.shape[0] != w.shape[0]:
        raise ValueError(f"bmm takes A [E, M, K] and W [E, K, N]; got {tuple(a.shape)} and {tuple(w.shape)}.")
    E, M, K = a.shape
    offs = torch.arange(1, E + 1, dtype=torch.int32, device=a.device) * M
    return grouped_mm(a.reshape(E * M, K), w, offs, numerics).reshape(E, M, w.shape[2])


def _one_group(a: Tensor, w: Tensor) -> Tensor:
    numerics = _require_weight_right(a, w, "matmul")
    rows = a.reshape(-1, a.shape[-1])
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=a.device)
    return grouped_mm(rows, w.unsqueeze(0), offs, numerics).reshape(*a.shape[:-1], w.shape[-1])


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    _require_weight_right(input, other, "matmul")
    if other.dim() == 3 and input.dim() == 3:
        return _batched(input, other)
    if other.dim() != 2:
        raise NotImplementedError(
            f"matmul with an FP8 weight takes W [K, N], or A [E, M, K] and W [E, K, N]; got {tuple(input.shape)} and "
            f"{tuple(other.shape)}."
        )
    return _one_group(input, other)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _require_weight_right(input, weight, "linear")
    out = _one_group(input, weight.transpose(-2, -1))
    if bias is not None and bias.shape != out.shape[-1:]:
        raise ValueError(f"linear with an FP8 weight takes a bias [{out.shape[-1]}]; got {tuple(bias.shape)}.")
    return out if bias is None else out + bias.to(out.dtype)


def _in(out: Tensor, dtype: torch.dtype | None) -> Tensor:
    return out if dtype is None else out.to(dtype)


# Handlers are called with the callers' keywords, so each has the argument names of the functions it stands for.
def _aten_grouped(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _grouped(input, mat2, offs, bias, out_dtype)


def _mm(input: Tensor, mat2: Tensor) -> Tensor:
    return _matmul(input, mat2)


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    return _batched(input, mat2)


PRODUCT_HANDLERS: dict[Callable, Callable] = {
    torch._grouped_mm: _aten_grouped,
    F.grouped_mm: _grouped,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    F.linear: _linear,
}
