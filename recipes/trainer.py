"""torchtitan's trainer; it refuses unknown converters at once, waits neither for its batches (batches.py) nor for the
number of their tokens (token_count.py), and a polite kill (SIGTERM) ends it with a checkpoint.

Clusters send SIGTERM before they take a machine away, and recipes/parity.py sends it at the end of its budget; the same
command then goes on from that step. torchtitan 0.2.2 saves at fixed intervals only.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from types import FrameType

from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer as TorchTitanTrainer

from converters.registry import check_names
from converters.unread_sections import check_sections
from recipes.batches import Batch, host_batches
from recipes.loader import Loader
from recipes.resuming import check_resumable
from recipes.token_count import first_sum_on_device


class Trainer(TorchTitanTrainer):
    """SIGTERM: in runs of one process with `checkpoint.enable`. Any other is killed as ever: ranks would stop apart."""

    stop_asked = False

    def __init__(self, job_config: JobConfig) -> None:
        """As torchtitan's, which looks a converter up only after it has loaded the data.

        Raises:
            ValueError, ImportError, TypeError: a name in `model.converters` is no working converter, or one is missing
                for what [fp8] demands.
        """
        check_names(job_config.model.converters)
        check_sections(job_config)
        super().__init__(job_config)

    def train(self) -> None:
        """Trains until the last step, or until the first one that ends after a SIGTERM.

        Raises:
            ValueError: it cannot go on from the checkpoint that it finds.
        """
        check_resumable(self.checkpointer, self.job_config, self.parallel_dims)
        if not (self.checkpointer.enable and self.parallel_dims.world_size == 1):
            super().train()
            return
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            super().train()
        finally:
            signal.signal(signal.SIGTERM, before)

    def should_continue_training(self) -> bool:
        """torchtitan asks before each step."""
        if not self.stop_asked or self.step >= self.job_config.training.steps:
            return super().should_continue_training()
        saved = os.path.join(self.checkpointer._create_checkpoint_id(self.step), ".metadata")  # written last
        if self.step and not os.path.isfile(saved):
            self.checkpointer.interval = self.step  # torchtitan saves at multiples of it
            self.checkpointer.save(self.step)
        logger.info(f"Stopped by SIGTERM after step {self.step}: the same command goes on from there.")
        return False

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """torchtitan's step; the tokens of all ranks are counted on the device."""
        with first_sum_on_device(self.parallel_dims.dp_enabled):
            super().train_step(data_iterator)

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """torchtitan's batches, on the host; on their way to a GPU nobody waits for them."""
        batches = super().batch_generator(data_iterable)
        return host_batches(batches) if self.device.type == "cuda" else batches

    def close(self) -> None:
        """Also ends the worker that loads batches."""
        if isinstance(loader := getattr(self, "dataloader", None), Loader):
            loader.close()
        super().close()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.stop_asked = True
