"""How does a module get a state for delayed scaling, and who keeps it in step with the training loop?"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from converters.delayed_config import DelayedConfig
from converters.numerics import Numerics
from converters.rules.checkpoint import let_checkpoints_lack_state
from converters.rules.state import DelayedState
from parallel.fsdp import sharded_dim

STATE = "delayed"  # name of the child module; checkpoints hold `<module>.delayed.{fwd,bwd}.{amax_history,multiplier}`


def give_state(module: nn.Module, numerics: Numerics, gemms: int, experts: int, config: DelayedConfig) -> None:
    """Makes a `DelayedState` a child of `module` if the rule is delayed. experts: of all ranks; 1 for a dense layer."""
    if numerics.recipe != "delayed":
        return
    with torch.device(next(module.parameters()).device):
        state = DelayedState(gemms, experts, numerics.gradients, config)
    module.add_module(STATE, state)


def first_expert(weight: Tensor) -> int:
    """The number of a weight's first local expert among all of them: not 0 under expert parallelism only."""
    if not isinstance(weight, DTensor):
        return 0
    mesh, local = weight.device_mesh, weight._local_tensor.shape[0]
    ranks = [mesh.get_local_rank(axis) for axis, p in enumerate(weight.placements) if sharded_dim(p) == 0]
    return ranks[0] * local if ranks else 0


def states(parts: Iterable[nn.Module]) -> list[DelayedState]:
    """All states in these modules."""
    return [m for part in parts for m in part.modules() if isinstance(m, DelayedState)]


def connect(model: nn.Module, dims: ParallelDims) -> None:
    """To be called once on a converted model: all ranks that hold a part of it, or a copy, reduce their maxima, and
    checkpoints of runs without state load. Collective over the world; nothing where no module has a state.
    """
    if not (found := states([model])):
        return
    let_checkpoints_lack_state()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    group = dist.group.WORLD
    if dims.pp > 1:  # torchtitan's outermost axis: each stage has a model of its own
        stages = torch.arange(dist.get_world_size()).view(dims.pp, -1).tolist()
        group, _ = dist.new_subgroups_by_enumeration(stages)
    for state in found:
        state.group = group.group_name


def end_step(parts: Iterable[nn.Module]) -> None:
    """To be called after the optimizer's step."""
    for state in states(parts):
        state.end_step()
