"""What a run says of itself: a table before the first step, two lines at each logged step, a table at the end.

`build_metrics_processor` goes into a train spec. Beyond torchtitan's own processor it adds a line to
torchtitan's (step_line.py), writes run.json (run_info.py), shows a progress bar on a terminal (progress.py), and stops
the run at a nan or inf (finite.py).
"""

import atexit
import json
import math
import os
import sys
import time
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.metrics import _get_metrics_rank as metrics_rank_of  # the rank whose events hold the loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.logging import logger

from recipes.end_table import RunSummary, end_table
from recipes.finite import GradientWatch, NonFiniteError
from recipes.progress import ProgressBar
from recipes.recording import RecordingLogger
from recipes.run_info import add_results, describe_run, perplexity, sequences_per_step, write_run_info
from recipes.start_table import start_table
from recipes.step_line import NON_FINITE, SKIPPED, StepLine

# Where the output is no terminal: a log file, a pipe of torchrun.
FILE_WIDTH = 120

# torchtitan's get_peak_flops answers with an A100's peak for every device it does not know.
A100_FLOPS = 312e12


class ReportingMetricsProcessor(MetricsProcessor):
    """torchtitan's MetricsProcessor with tables, a progress bar, run.json and a stop at the first nan.

    One rank speaks: the one whose log holds the loss, which is rank 0 except under most pipeline schedules.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None) -> None:
        self._watch: GradientWatch | None = None
        self._model_parts: list[nn.Module] | None = None
        super().__init__(job_config, parallel_dims, tag)
        self.logger: RecordingLogger = RecordingLogger(self.logger)
        self._speaks = torch.distributed.get_rank() == metrics_rank_of(parallel_dims, job_config)
        self._steps_done = 0
        self._steps_timed = 0  # since time_last_log
        self._closed = False
        self._bar = ProgressBar(job_config.training.steps, no_color=job_config.metrics.disable_color_printing)
        if self._speaks:
            self._write_run_info()
        # Ctrl-C ends torchtitan's main() without a close(): the terminal must get its cursor back all the same.
        atexit.register(self.close)

    @property
    def model_parts(self) -> list[nn.Module] | None:
        """The trainer sets it once, when the model is built, parallelized and initialized."""
        return self._model_parts

    @model_parts.setter
    def model_parts(self, model_parts: list[nn.Module] | None) -> None:
        self._model_parts = model_parts
        if model_parts is None:
            return
        self._watch = GradientWatch(model_parts, owns_plain=self._owns_plain())
        self._watch.install()
        self.time_last_log = time.perf_counter()  # building and initializing the model was no step
        if self._speaks:
            self._print(start_table(model_parts))
            self._bar.start()

    def _due(self, step: int) -> bool:
        """torchtitan's steps, and the last one: a run that ends with an older loss ends with a wrong one."""
        return super().should_log(step) or step == self.job_config.training.steps

    def should_log(self, step: int) -> bool:
        """Whether `step` is logged. The trainer asks once a step, after the optimizer and before a checkpoint.

        Raises:
            NonFiniteError: see finite.py. A step that is logged is left to `log`, which knows its loss.
        """
        self._steps_done = step
        self._steps_timed += 1
        due = self._due(step)
        if self._watch is not None:
            soon = self._due(step + 1)
            try:
                self._watch.end_step(step, look_now=not due and self._must_be_finite(step), count_next=soon)
            except NonFiniteError as error:  # of a step that does not log
                self.logger.log({SKIPPED: 0, NON_FINITE: 1}, error.step)
                raise
        if self._speaks:
            self._bar.advance(step)
        return due

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """torchtitan's step line and events, ours; then an error if the loss or the gradient norm is nan or inf."""
        since = self.time_last_log
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        line = StepLine(
            step=step,
            elapsed_ms=1000 * (self.time_last_log - since) / max(self._steps_timed, 1),
            global_batch_size=self._global_batch_size(),
            learning_rate=(extra_metrics or {}).get("lr"),
            zeros=None if self._watch is None else self._watch.zeros(step),
            non_finite=not (math.isfinite(global_avg_loss) and math.isfinite(grad_norm)),
        )
        self._steps_timed = 0
        self.logger.log(line.metrics(), step)
        logger.info(line.text(self.color))
        self._bar.show_loss(global_avg_loss)
        if self._watch is not None:
            self._watch.check(step, global_avg_loss, grad_norm)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """torchtitan's validation line, and the perplexity. At a nan (one empty batch is enough) training goes on."""
        metrics = {"validation_metrics/perplexity": perplexity(loss), **(extra_metrics or {})}
        super().log_validation(loss, step, metrics)
        self._steps_timed = 0
        self._say_perplexity("validate", "validation", step, loss)

    def log_test(self, loss: float, step: int) -> None:
        """The same for the test split, with no throughput or memory, which were those of a validation."""
        self.logger.log({"test_metrics/loss": loss, "test_metrics/perplexity": perplexity(loss)}, step)
        self.time_last_log, self._steps_timed = time.perf_counter(), 0
        self._say_perplexity("test", "test", step, loss)

    def _say_perplexity(self, verb: str, name: str, step: int, loss: float) -> None:
        color = self.color
        logger.info(
            f"{color.yellow}{verb} step: {step:2}  {color.green}loss: {loss:7.4f}  "
            f"{color.orange}perplexity: {perplexity(loss):,.4f}{color.reset}"
        )
        if not math.isfinite(loss):
            logger.error(f"Step {step}: the {name} loss is {loss}.")

    def close(self) -> None:
        """Ends the bar, writes out the logs and prints the end table. Also after an exception, and more than once."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._bar.stop()
        if self._watch is not None:
            self._watch.remove()
        super().close()
        if self._speaks:
            summary = self._summary()
            add_results(self.job_config.job.dump_folder, summary.results())
            self._print(end_table(summary))

    def _print(self, renderable: Any) -> None:
        width = None if sys.stdout.isatty() else FILE_WIDTH
        no_color = self.job_config.metrics.disable_color_printing or None
        (self._bar.console or Console(width=width, no_color=no_color)).print(renderable)

    def _owns_plain(self) -> bool:
        """Whether plain gradients are counted here: DDP alone copies them, and counts them on its first rank."""
        dims = self.parallel_dims
        return not dims.dp_replicate_enabled or dims.get_mesh("dp_replicate").get_local_rank() == 0

    def _global_batch_size(self) -> int:
        training, dims = self.job_config.training, self.parallel_dims
        degree = dims.dp_replicate * dims.dp_shard
        return sequences_per_step(training.global_batch_size, training.local_batch_size, degree)

    def _must_be_finite(self, step: int) -> bool:
        """Whether step is the last one or saves a checkpoint (as CheckpointManager._should_save)."""
        checkpoint = self.job_config.checkpoint
        first = step == 1 and checkpoint.enable_first_step_checkpoint
        saves = checkpoint.enable and not checkpoint.load_only and (first or step % checkpoint.interval == 0)
        return saves or step == self.job_config.training.steps

    def _write_run_info(self) -> None:
        dims, config = self.parallel_dims, self.job_config
        info = describe_run(
            config.to_dict(),
            device=self.device_memory_monitor.device_name,
            world_size=dims.world_size,
            batch_degree=dims.dp_replicate * dims.dp_shard,
            metrics_rank=metrics_rank_of(dims, config),
            mfu_peak=mfu_peak(self.gpu_peak_flops, self.device_memory_monitor.device_name),
        )
        logger.info(f"This run is described in {write_run_info(config.job.dump_folder, info)}")
        self.logger.add_text("run", f"```json\n{json.dumps(info, indent=2, default=str)}\n```")

    def _summary(self) -> RunSummary:
        seen, config = self.logger, self.job_config
        return RunSummary(
            steps_done=self._steps_done,
            steps_planned=config.training.steps,
            loss=seen.loss,
            val_loss=seen.val_loss,
            test_loss=seen.test_loss,
            non_finite_step=seen.non_finite_step,
            tokens_per_second=seen.tokens_per_second(),
            peak_memory_gib=seen.peak_memory_gib,
            mfu=self._mfu(),
            folder=config.job.dump_folder,
            tensorboard=os.path.join(config.job.dump_folder, config.metrics.save_tb_folder),
            converters=tuple(config.model.converters),
        )

    def _mfu(self) -> str:
        peak = mfu_peak(self.gpu_peak_flops, self.device_memory_monitor.device_name)
        mfu = self.logger.mfu_percent()
        if peak is None or mfu is None:
            return "n/a (no known peak of this device)" if peak is None else "n/a"
        return f"{mfu:.2f} % of {peak[0] / 1e12:,.0f} TFLOP/s ({peak[1]})"


def mfu_peak(flops: float, device: str) -> tuple[float, str] | None:
    """The peak that torchtitan's MFU refers to, in FLOP/s, and what it is; None when it is invented or infinite.

    It is the dense BF16 peak also while FP8 runs, whose own peak is twice that: an FP8 run may pass 100 %.
    """
    unknown = flops == A100_FLOPS and "A100" not in device
    return None if unknown or not math.isfinite(flops) else (flops, "dense BF16 peak, FP8 or not")


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> ReportingMetricsProcessor:
    """The `build_metrics_processor_fn` of a train spec."""
    return ReportingMetricsProcessor(job_config, parallel_dims, tag)
