"""The converter `experts.sequential`: one loop over the experts with three matmuls each, as Megatron's SequentialMLP.

It exists to compare: the first public report of an FP8 gap (Megatron-LM #1152) had sequential experts. Alone it is the
BF16 twin of `[fp8.grouped_experts] experts = "sequential"`, which does the same and runs the matmuls in FP8. Slower
than grouped experts at every shape, and it waits for the host once a layer (the loop needs the group sizes).
"""

import logging

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

logger = logging.getLogger(__name__)


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
