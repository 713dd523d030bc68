"""The metrics processor of a run that measures itself: `[fp8.telemetry] every` above 0.

It adds to ReportingMetricsProcessor: scalars under `fp8/` at measured steps, logged or not, and a table
at the end. Without telemetry `build_metrics_processor` returns that class itself.
"""

import torch
from torch import nn
from torchtitan.components.metrics import _get_metrics_rank as metrics_rank_of
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.logging import logger

from recipes.reporting import ReportingMetricsProcessor
from recipes.runs import RunError, read_run
from recipes.telemetry import Loads, Telemetry
from recipes.telemetry_table import TelemetrySummary, telemetry_table
from recipes.telemetry_tags import loads


class MeasuringMetricsProcessor(ReportingMetricsProcessor):
    """Every rank measures; the one that speaks writes."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None) -> None:
        self._telemetry: Telemetry | None = None
        self._seen = TelemetrySummary()
        speaks = torch.distributed.get_rank() == metrics_rank_of(parallel_dims, job_config)
        self._twin = twin_loads(job_config) if speaks else {}  # first, so that a wrong one leaves no run behind
        super().__init__(job_config, parallel_dims, tag)

    @property
    def model_parts(self) -> list[nn.Module] | None:
        """See ReportingMetricsProcessor."""
        return self._model_parts

    @model_parts.setter
    def model_parts(self, model_parts: list[nn.Module] | None) -> None:
        ReportingMetricsProcessor.model_parts.fset(self, model_parts)
        if model_parts is not None:
            every = self.job_config.fp8.telemetry.every
            self._telemetry = Telemetry(model_parts, every, owns_plain=self._owns_plain(), twin=self._twin)
            self._watch.before_clipping = self._telemetry.before_clipping

    def should_log(self, step: int) -> bool:
        """See ReportingMetricsProcessor; measured first, so that a step that ends the run is seen too."""
        if self._telemetry is not None:
            figures = self._telemetry.end_step(step, self._watch.latest)
            if figures is not None and self._speaks:
                self.logger.log_at_once(figures, step)
                self._seen.add(step, figures)
        return super().should_log(step)

    def close(self) -> None:
        """Also prints the table of what was measured."""
        if self._closed:
            return
        if self._telemetry is not None:
            self._telemetry.remove()
        super().close()
        if self._speaks and self._seen.steps:
            self._print(telemetry_table(self._seen, self.job_config.job.dump_folder))


def twin_loads(job_config: JobConfig) -> Loads:
    """The loads that `[fp8.telemetry] twin` has recorded; none without a twin.

    Raises:
        ValueError: it is no run, or recorded none.
    """
    folder = job_config.fp8.telemetry.twin
    if not folder:
        return {}
    try:
        run = read_run(folder)
    except RunError as error:
        raise ValueError(f"[fp8.telemetry] twin: {error}") from error
    found = loads(run.scalars)
    if not found:
        raise ValueError(
            f"[fp8.telemetry] twin = {folder!r} has recorded no loads of its experts: train it with "
            f"--fp8.telemetry.every {job_config.fp8.telemetry.every}, which needs no converter."
        )
    if run.info and run.info.get("seed") != job_config.debug.seed:
        logger.warning(
            f"[fp8.telemetry] twin = {folder!r} has seed {run.info.get('seed')} and this run {job_config.debug.seed}: "
            "agreement between them says little."
        )
    return found


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> ReportingMetricsProcessor:
    """The `build_metrics_processor_fn` of a train spec."""
    fp8 = getattr(job_config, "fp8", None)
    measures = fp8 is not None and fp8.telemetry.every > 0
    return (MeasuringMetricsProcessor if measures else ReportingMetricsProcessor)(job_config, parallel_dims, tag)
