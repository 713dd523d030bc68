"""What torchtitan's step line lacks for somebody who comes from Megatron: one more line under it, and TensorBoard.

    step: 10  loss:  5.81216  grad_norm:  1.1932  memory: ...  tps: 3,120  tflops: 0.12  mfu: ...      torchtitan's
    step: 10  ms/step: 656.4  samples: 80  lr: 1.500e-03  batch: 8  zero grads: 4,096 (0.06%)  skipped: 0  non-finite: 0

Megatron's names: elapsed time per iteration, consumed samples, learning rate, global batch size, num zeros, skipped and
nan iterations. Loss, gradient norm and TFLOP/s a GPU are in torchtitan's own line.
"""

from dataclasses import dataclass

from torchtitan.tools.utils import Color, NoColor

from recipes.zero_gradients import ZeroCount

SKIPPED, NON_FINITE = "skipped_steps", "non_finite_steps"


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """The second line of a logged step.

    elapsed_ms: mean of the steps since the last logged one or validation, so neither validation nor a short interval
    (the first step, log_freq not dividing validation.freq) distorts it as it does torchtitan's end_to_end(s). The first
    also holds what comes between building the model and step 1: reading the validation data, or a checkpoint.
    samples: sequences of all steps so far, at this global batch size. learning_rate: the one this step was taken with.
    non_finite: loss or gradient norm is nan or inf; the run stops here, so no step is ever skipped.
    """

    step: int
    elapsed_ms: float
    global_batch_size: int
    learning_rate: float | None
    zeros: ZeroCount | None
    non_finite: bool

    @property
    def samples(self) -> int:
        """Sequences consumed."""
        return self.step * self.global_batch_size

    def metrics(self) -> dict[str, float]:
        """For TensorBoard, beside torchtitan's lr, n_tokens_seen and tflops."""
        counted = self.zeros
        zeros = {} if counted is None else {"zero_gradients": counted.zeros, "zero_gradients(%)": counted.percent}
        return {
            "time_metrics/elapsed_per_step(ms)": self.elapsed_ms,
            "n_samples_seen": self.samples,
            "global_batch_size": self.global_batch_size,
            **zeros,
            SKIPPED: 0,
            NON_FINITE: int(self.non_finite),
        }

    def text(self, color: Color | NoColor) -> str:
        """The line."""
        lr = "n/a" if self.learning_rate is None else f"{self.learning_rate:.3e}"
        zeros = "n/a" if self.zeros is None else f"{self.zeros.zeros:,} ({self.zeros.percent:.2f}%)"
        stop = "1 (the run stops here)" if self.non_finite else "0"
        return (
            f"{color.red}step: {self.step:2}  "
            f"{color.green}ms/step: {self.elapsed_ms:,.1f}  "
            f"{color.orange}samples: {self.samples:,}  "
            f"{color.turquoise}lr: {lr}  "
            f"{color.blue}batch: {self.global_batch_size:,}  "
            f"{color.cyan}zero grads: {zeros}  "
            f"{color.magenta}skipped: 0  non-finite: {stop}{color.reset}"
        )
