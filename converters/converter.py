"""What the FP8 converters share: how one is built from a job, and what happens after each optimizer step."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.capability import torchao_problem
from converters.delayed_config import DelayedConfig
from converters.gathered_weight import quantize_changed_shards
from converters.rules.attach import end_step

logger = logging.getLogger(__name__)


class FP8Converter:
    """torchtitan's ModelConverter, but for `convert`. name: its entry point, and its section of the config."""

    name: ClassVar[str]

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        if problem := self.unavailable_reason():
            raise ValueError(problem)
        if not hasattr(job_config, "fp8"):
            raise ValueError(
                f"{self.name} reads the job-config section [fp8], which this run does not have: add "
                "--job.custom_config_module=recipes.job_config (or job.custom_config_module in the TOML)."
            )
        self.config: Any = getattr(job_config.fp8, self.name.removeprefix("fp8."))
        self.delayed: DelayedConfig = job_config.fp8.delayed
        self.job_config, self.parallel_dims = job_config, parallel_dims

    @staticmethod
    def unavailable_reason() -> str | None:
        """Why this machine cannot run the converter, in one sentence, or None."""
        return torchao_problem()

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Quantizes the FSDP2 shards for the next step: one all-reduce of the maxima of all FP8 weights. Ends a step
        of delayed scaling.
        """
        parts = model if isinstance(model, list) else [model]
        quantize_changed_shards(parts)
        end_step(parts)


def warn_slow(converter: str, slow: Mapping[str, str], say: str, keep: bool, results: Path) -> None:
    """One warning for each reason why FP8 would be slower. slow: name -> reason; say: what joins the two."""
    for reason in dict.fromkeys(slow.values()):
        names = [fqn for fqn, why in slow.items() if why == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        remedy = "kept in BF16" if keep else "train with more tokens at a time, or set below_break_even = 'bf16'"
        logger.warning("%s: %s%s%s%s (%s): %s.", converter, names[0], more, say, reason, results.name, remedy)
