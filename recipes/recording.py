"""What passes through a run's loggers, kept for its end table and run.json."""

import statistics
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torchtitan.components.metrics import BaseLogger, LoggerContainer, TensorBoardLogger

from recipes.run_info import Point
from recipes.step_line import NON_FINITE


class RecordingLogger(BaseLogger):
    """Passes metrics on to torchtitan's loggers and keeps what a run says at its end."""

    def __init__(self, inner: BaseLogger) -> None:
        self.inner = inner
        self.speeds: list[float] = []
        self.peak_memory_gib: float | None = None
        self.mfus: list[float] = []
        self.loss: Point | None = None
        self.val_loss: Point | None = None
        self.test_loss: Point | None = None
        self.non_finite_step: int | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Called with one dict each for torchtitan's step, ours, a validation and the test split."""
        self.inner.log(metrics, step)
        for key, value in metrics.items():
            if key.endswith("memory/max_reserved(GiB)"):
                self.peak_memory_gib = max(value, self.peak_memory_gib or 0.0)
        if "loss_metrics/global_avg_loss" in metrics:
            self.loss = Point(step, metrics["loss_metrics/global_avg_loss"])
            self.speeds.append(metrics["throughput(tps)"])
            self.mfus.append(metrics["mfu(%)"])
        if "validation_metrics/loss" in metrics:
            self.val_loss = Point(step, metrics["validation_metrics/loss"])
        if "test_metrics/loss" in metrics:
            self.test_loss = Point(step, metrics["test_metrics/loss"])
        if metrics.get(NON_FINITE):
            self.non_finite_step = step

    def log_at_once(self, metrics: dict[str, float], step: int) -> None:
        """Passes many metrics on that none of ours is among; TensorBoard gets them as one event, not one each."""
        for each in self._loggers():
            if isinstance(each, TensorBoardLogger):
                prefix = "" if each.tag is None else f"{each.tag}/"
                values = [Summary.Value(tag=prefix + name, simple_value=value) for name, value in metrics.items()]
                each.writer._get_file_writer().add_summary(Summary(value=values), step)
            else:
                each.log(metrics, step)

    def tokens_per_second(self) -> float | None:
        """Median of one device."""
        return _steady_median(self.speeds)

    def mfu_percent(self) -> float | None:
        """Median MFU as torchtitan computes it."""
        return _steady_median(self.mfus)

    def add_text(self, tag: str, text: str) -> None:
        """Shows `text` (Markdown) under TensorBoard's Text tab, where TensorBoard is on."""
        for each in self._loggers():
            if isinstance(each, TensorBoardLogger):
                each.writer.add_text(tag, text, 0)

    def _loggers(self) -> list[BaseLogger]:
        return self.inner._loggers if isinstance(self.inner, LoggerContainer) else [self.inner]

    def close(self) -> None:
        """Writes out and closes torchtitan's loggers."""
        self.inner.close()


def _steady_median(values: list[float]) -> float | None:
    """Without the first, which holds compilation and first-touch memory, if there are others."""
    steady = values[1:] or values
    return statistics.median(steady) if steady else None
