"""What a converted GroupedExperts runs instead of torchtitan's forward."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts

from converters.dispatched_mlp import dispatched_mlp
from converters.expert_mlp import expert_mlp
from converters.rules.attach import STATE, first_expert
from converters.sequential_experts import is_sequential, sequential_mlp
from converters.token_path import Routes, experts_forward
from parallel.expert_parallel import dispatches_itself, plan


def _local(w: Tensor) -> Tensor:
    return w.to_local() if isinstance(w, DTensor) else w


def fp8_experts_forward(
    self: GroupedExperts, x: Tensor, num_tokens_per_expert: Tensor, routes: Routes | None = None
) -> Tensor:
    """Stands in for `GroupedExperts.forward`.

    x [M, D] is grouped by expert, num_tokens_per_expert counts the rows of each. Under expert parallelism either
    torchtitan has dispatched them before (local experts, groups padded with zero rows, which change no scale and no
    gradient), or they are dispatched here, in FP8. With routes x are tokens, [T, D], and so is the result
    (token_path.py).
    """
    w1, w2, w3 = _local(self.w1), _local(self.w2), _local(self.w3)
    if routes is not None:
        group = self.ep_group if dispatches_itself(self) else None
        return experts_forward(x, num_tokens_per_expert, routes, (w1, w2, w3), group, w1._context)
    if dispatches_itself(self) and self.ep_group is not None:
        dispatch = plan(num_tokens_per_expert, self.ep_group)
        return dispatched_mlp(x, w1, w2, w3, dispatch, w1._context).type_as(x)
    offs = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
    state = getattr(self, STATE, None)
    first = 0 if state is None else first_expert(self.w1)
    run = sequential_mlp if is_sequential(self) else expert_mlp
    return run(x, w1, w2, w3, offs, w1._context, state, first).type_as(x)


def takes_our_forward(module: nn.Module) -> bool:
    """Whether it runs torchtitan's forward, or ours: neither a subclass's nor one set on the module itself."""
    forward = getattr(module.forward, "__func__", None)
    return isinstance(module, GroupedExperts) and forward in (GroupedExperts.forward, fp8_experts_forward)


def is_one_op(module: nn.Module) -> bool:
    """Whether all its experts are one op, which may have FP8 wires: our forward, and no loop over experts."""
    return takes_our_forward(module) and not is_sequential(module)
