"""After the last step a run is validated once more, and evaluated on the test split.

The test split is that of the training dataset, `NAME_test` of recipes/datasets.py, read with the sizes of the
[validation] section. Without one (a dataset of torchtitan's, or [data] test_fraction = 0) there is validation only.
TensorBoard has the result as test_metrics/loss and test_metrics/perplexity.
"""

import copy
from typing import Any

from torch import nn
from torchtitan.tools.logging import logger

from recipes.datasets import SOURCES
from recipes.reporting import ReportingMetricsProcessor
from recipes.validation import FixedValidator


class _LogsTest:
    """The metrics processor of the validator that reads the test split."""

    def __init__(self, processor: ReportingMetricsProcessor) -> None:
        self._processor = processor
        self.ntokens_since_last_log = 0  # counted by the validator

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self._processor.log_test(loss, step)


class FinalEvaluation(FixedValidator):
    """Validates as ever, also after the last step, and then on the test split."""

    def __init__(self, *, metrics_processor: ReportingMetricsProcessor, job_config: Any, **kwargs: Any) -> None:
        super().__init__(metrics_processor=metrics_processor, job_config=job_config, **kwargs)
        self._test: FixedValidator | None = None
        trained = job_config.training.dataset
        # By our names, not those registered: torchtitan's c4_test is a fixture of its own tests, not a split of c4.
        if trained not in SOURCES or job_config.data.test_fraction == 0:
            logger.info(f"{trained} has no test split here: validation only.")
            return
        test_config = copy.deepcopy(job_config)
        test_config.validation.dataset = f"{trained}_test"
        test_config.validation.dataset_path = job_config.training.dataset_path
        self._test = FixedValidator(metrics_processor=_LogsTest(metrics_processor), job_config=test_config, **kwargs)

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
