"""The converter `experts.sequential`: one loop over the experts with three matmuls each, as Megatron's SequentialMLP.

It exists to compare: the first public report of an FP8 gap (Megatron-LM #1152) had sequential experts. Alone it is the
BF16 twin of `[fp8.grouped_experts] experts = "sequential"`, which calls the FP8 MLP with one expert at a time. Slower
than grouped experts at every shape, and it waits for the host once a layer (the loop needs the group sizes).
"""

import logging

import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

from converters.expert_mlp import expert_mlp
from converters.group_ends import group_ends, spans
from converters.numerics import Numerics
from converters.rules.state import DelayedState

logger = logging.getLogger(__name__)


def is_sequential(module: nn.Module) -> bool:
    """Whether `run_sequentially` was called with it."""
    return getattr(module, "sequential", False)


def sequential_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    offs: Tensor,
    numerics: Numerics,
    state: DelayedState | None = None,
    first_expert: int = 0,
) -> Tensor:
    """`expert_mlp`, one call an expert: the same scales, since a scale never spans two experts."""
    sizes = [end - begin for begin, end in spans(group_ends(offs, x), x.shape[0])]
    rows = x.split([*sizes, x.shape[0] - sum(sizes)])
    outs = []
    for e, weights in enumerate(zip(w1.split(1), w2.split(1), w3.split(1), strict=True)):
        one = torch.full((1,), sizes[e], dtype=torch.int32, device=x.device)
        outs.append(expert_mlp(rows[e], *weights, one, numerics, state, first_expert + e))
    return torch.cat([*outs, torch.zeros_like(rows[-1], dtype=outs[0].dtype)])


def run_sequentially(module: nn.Module) -> None:
    """Makes torchtitan's GroupedExperts take its own loop over experts instead of grouped GEMMs."""
    module.use_grouped_mm, module.sequential = False, True


class SequentialExpertsConverter:
    """Routed experts one after the other instead of in grouped GEMMs; no change of precision."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        del job_config, parallel_dims

    @staticmethod
    def unavailable_reason() -> str | None:
        """Runs everywhere."""
        return None

    def convert(self, model: nn.Module) -> None:
        """Switches every GroupedExperts of `model`, in place.

        Raises:
            ValueError: there is none.
        """
        experts = [m for m in model.modules() if isinstance(m, GroupedExperts)]
        if not experts:
            raise ValueError("experts.sequential finds no GroupedExperts here: remove it from model.converters.")
        for module in experts:
            run_sequentially(module)
        logger.info("experts.sequential: %d expert modules run one expert at a time.", len(experts))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing to do."""
