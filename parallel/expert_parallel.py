"""How does a routed row travel to the rank of its expert, and back?

    M rows here, by expert  --to_experts-->  R rows there, by local expert  --MLP-->  R rows  --from_experts-->  M rows

`to_experts` sends several tensors of one row each (FP8 values and their scales) as bytes in one all-to-all, and sorts
what arrives from rank-major to expert-major order. `from_experts` is the way back. Neither is differentiable: the
caller's autograd function sends gradients along the same `Dispatch`, which is a value and lives nowhere else. Each has
a first half that starts the all-to-all and a second that needs it to be over; on a GPU what is computed between the two
hides it.

Groups are not padded: R is the number of rows that arrive, 0 included.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.expert_parallel import ExpertParallel

ROW_ALIGNMENT = 16  # bytes: rows of the packed buffer start where a 16-byte load may


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Where the rows of one MoE layer go in one step.

    Attributes:
        sent, received: rows to and from each rank of the group, on the host (all-to-all needs them there).
        order: int64 [R], for each expert-major row its place among the received, rank-major rows.
        offs: int32 [E_local], ends of the local experts' groups among the R rows.
    """

    group: dist.ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor
    offs: Tensor


def _start(rows: Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(rows, list(received), list(sent), group.group_name)


def arrived(rows: Tensor) -> Tensor:
    """`rows` of a collective that was started; what follows on this stream waits for it, the host does not."""
    return torch.ops._c10d_functional.wait_tensor(rows)


@torch.no_grad()
def plan(num_tokens_per_expert: Tensor, group: dist.ProcessGroup) -> Dispatch:
    """Agrees with the other ranks on who sends what. num_tokens_per_expert: [E], rows here for each of all experts.

    Waits for the host once, as torchtitan's dispatch does: the sizes of an all-to-all are host numbers.
    """
    ranks, device = group.size(), num_tokens_per_expert.device
    counts = num_tokens_per_expert.to(torch.int64).view(ranks, -1)  # [to rank, its expert]
    arriving = arrived(_start(counts, (1,) * ranks, (1,) * ranks, group))  # [from rank, local expert]
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    experts = torch.arange(arriving.shape[1], device=device).repeat(ranks)
    expert_of_row = torch.repeat_interleave(experts, arriving.flatten(), output_size=sum(received))
    return Dispatch(
        group=group,
        sent=tuple(sent),
        received=tuple(received),
        order=torch.argsort(expert_of_row, stable=True),
        offs=torch.cumsum(arriving.sum(0), 0, dtype=torch.int32),
    )


def _as_bytes(t: Tensor) -> Tensor:
    return t.reshape(t.shape[0], math.prod(t.shape[1:])).contiguous().view(torch.uint8)  # -1 is unknown without rows


def packed_width(widths: Iterable[int]) -> int:
    """Bytes of a row that holds one part after the other, each of so many bytes."""
    return -(-sum(widths) // ROW_ALIGNMENT) * ROW_ALIGNMENT


def pack(tensors: list[Tensor]) -> Tensor:
    """Tensors [M, ...] -> their rows side by side, as bytes [M, packed_width]."""
    parts = [_as_bytes(t) for t in tensors]
    widths = [p.shape[1] for p in parts]
    padding = packed_width(widths) - sum(widths)
    return torch.cat([*parts, parts[0].new_zeros((parts[0].shape[0], padding))], dim=1)


def start_to_experts(packed: Tensor, dispatch: Dispatch) -> Tensor:
    """Bytes [M, W] -> [R, W], on their way: for `at_experts` and for nothing else."""
    return _start(packed, dispatch.received, dispatch.sent, dispatch.group)


def at_experts(arriving: Tensor, like: list[tuple[torch.dtype, tuple[int, ...]]], dispatch: Dispatch) -> list[Tensor]:
    """What `start_to_experts` gave -> each part [R, ...], rows sorted by local expert.

    like: dtype and shape of a row, of each part.
    """
    packed, out, at = arrived(arriving), [], 0
    for dtype, shape in like:
        width = math.prod(shape) * dtype.itemsize
        rows = packed[:, at : at + width].index_select(0, dispatch.order)
        out.append(rows.view(dtype).view(-1, *shape))
        at += width
    return out


def to_experts(tensors: list[Tensor], dispatch: Dispatch) -> list[Tensor]:
    """Each tensor [M, ...] -> [R, ...], rows sorted by local expert; all in one all-to-all."""
    like = [(t.dtype, tuple(t.shape[1:])) for t in tensors]
    return at_experts(start_to_experts(pack(tensors), dispatch), like, dispatch)


def start_from_experts(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """[R, D] sorted by local expert -> [M, D] in the order of `to_experts`' input, on their way: for `arrived`."""
    back = torch.empty_like(rows).index_copy_(0, dispatch.order, rows)
    return _start(back, dispatch.sent, dispatch.received, dispatch.group)


def from_experts(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """The same, arrived. Travels in rows' own dtype."""
    return arrived(start_from_experts(rows, dispatch))


def dispatches_itself(module: nn.Module) -> bool:
    """Whether an experts module sends its rows in its own forward; `ep_group` is then the group it does so over."""
    return getattr(module, "ep_dispatch", False)


def let_experts_dispatch() -> None:
    """Teaches torchtitan's ExpertParallel to leave modules alone that dispatch in their own forward. Idempotent.

    torchtitan's models build that style themselves inside their parallelize functions, ExpertTensorParallel and
    DualPipe's wrapper call it, and none takes another. So the one class learns one more case, for every model that
    uses it; modules without `ep_dispatch` see torchtitan's own code.
    """
    dispatch, combine = ExpertParallel._token_dispatch, ExpertParallel._token_combine
    if hasattr(dispatch, "__wrapped__"):
        return

    @functools.wraps(dispatch)
    def token_dispatch(self: ExpertParallel, module: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        if not dispatches_itself(module):
            return dispatch(self, module, inputs, device_mesh)
        module.ep_group = device_mesh.get_group()
        return inputs

    @functools.wraps(combine)
    def token_combine(self: ExpertParallel, module: nn.Module, rows: Tensor, device_mesh: DeviceMesh) -> Tensor:
        return rows if dispatches_itself(module) else combine(self, module, rows, device_mesh)

    ExpertParallel._token_dispatch, ExpertParallel._token_combine = token_dispatch, token_combine
