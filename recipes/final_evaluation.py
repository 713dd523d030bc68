"""Perplexity beside every validation loss, and at the last step the loss and perplexity of the test split as well.

The test split is that of the training dataset, `NAME_test` (recipes/datasets.py makes one for each of ours); a dataset
without one is validated only. TensorBoard has them as validation_metrics/perplexity, test_metrics/loss and
test_metrics/perplexity.
"""

import copy
import math
from typing import Any

from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

from recipes.validation import FixedValidator


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is too large for a float."""
    return math.exp(loss) if loss < 709 else math.inf  # exp(709.8) is the largest


class _WithPerplexity:
    """A metrics processor for the validator, whose `log_validation` adds the perplexity."""

    def __init__(self, inner: MetricsProcessor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = self if name == "_inner" else self._inner
        object.__setattr__(target, name, value)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """The validation line, then its perplexity."""
        ppl = perplexity(loss)
        self._inner.log_validation(loss, step, {"validation_metrics/perplexity": ppl, **(extra_metrics or {})})
        logger.info(f"validate step: {step:2}  perplexity: {ppl:.4f}")


class _AsTest(_WithPerplexity):
    """The same for the test split, under its own names."""

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """A line and two values; throughput and memory were those of a validation."""
        ppl = perplexity(loss)
        self._inner.logger.log({"test_metrics/loss": loss, "test_metrics/perplexity": ppl}, step)
        logger.info(f"test step: {step:2}  loss: {loss:7.4f}  perplexity: {ppl:.4f}")
        self._inner.ntokens_since_last_log = 0


class FinalEvaluation(FixedValidator):
    """Validates as ever, also after the last step, and then on the test split."""

    def __init__(self, *, metrics_processor: MetricsProcessor, job_config: Any, **kwargs: Any) -> None:
        super().__init__(metrics_processor=_WithPerplexity(metrics_processor), job_config=job_config, **kwargs)
        self._test: FixedValidator | None = None
        name = f"{job_config.training.dataset}_test"
        if name not in DATASETS:
            logger.info(f"The dataset {job_config.training.dataset} has no test split: validation only.")
            return
        test_config = copy.deepcopy(job_config)
        test_config.validation.dataset = name
        test_config.validation.dataset_path = job_config.training.dataset_path
        self._test = FixedValidator(metrics_processor=_AsTest(metrics_processor), job_config=test_config, **kwargs)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or step == self.job_config.training.steps

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validation of `model_parts` after training step `step`; after the last one the test split too."""
        super().validate(model_parts, step)
        if self._test is not None and step == self.job_config.training.steps:
            self._test.validate(model_parts, step)


def build_validator(**kwargs: Any) -> FinalEvaluation:
    """`build_validator_fn` of a train spec: takes the keyword arguments of torchtitan's `Validator`."""
    return FinalEvaluation(**kwargs)
