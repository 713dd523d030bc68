"""torchtitan's validator, made to measure the same thing every time, and to leave no trace in training.

Four things of torchtitan 0.2.2 are put right. It keeps the position of the validation loader between two validations:
with `validation.steps = N` each one reads the next N batches, so two losses differ also by their texts, and with -1 the
second finds nothing left and fails in `torch.stack`. And it asks every model for attention masks, where the trainer
asks only those with flex or varlen attention: Llama4 answers with masks and then refuses them under sdpa. And under
context parallelism it sums the loss over all ranks, but counts the tokens after the sequences were cut, those of one
rank: the loss it reports is larger by the degree, 16.06 for 8.03 with two ranks. And the tokens that it validates on
count for the routing bias as if they had been trained on, until the next step and in no checkpoint: a run went on
otherwise after a validation than without one, or than resumed there.
"""

import copy
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator

from parallel.buffers import buffers_kept
from recipes.loader import check_workers, end_workers, start_worker


class _NoMasks(nn.Module):
    """Stands in for a model without attention masks, which torchtitan's validator knows by this TypeError."""

    def get_attention_masks(self, **kwargs: Any) -> None:
        raise TypeError("sdpa attention takes no masks")


class _PerToken:
    """The metrics processor of a validator whose sum of losses is divided by the tokens of one of `ranks`.

    Each of them has as many tokens: sequences are packed, and cut into equal parts.
    """

    def __init__(self, processor: MetricsProcessor, ranks: int) -> None:
        self._processor, self._ranks = processor, ranks

    def log_validation(self, loss: float, step: int) -> None:
        self._processor.log_validation(loss=loss / self._ranks, step=step)

    @property
    def ntokens_since_last_log(self) -> int:
        return self._processor.ntokens_since_last_log

    @ntokens_since_last_log.setter
    def ntokens_since_last_log(self, count: int) -> None:
        self._processor.ntokens_since_last_log = count


class FixedValidator(Validator):
    """Validates on the first `validation.steps` batches of the validation dataset, or on all of it, every time."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.parallel_dims.cp_enabled:
            self.metrics_processor = _PerToken(self.metrics_processor, self.parallel_dims.cp)
        loader = self.validation_dataloader
        check_workers(loader.dataset, loader.num_workers, "validation")
        loader.worker_init_fn = start_worker
        self.start = copy.deepcopy(loader.dataset.state_dict())

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Inputs [B, S], labels [B, S], further inputs and keyword arguments of the model, as in the trainer."""
        attention = getattr(model_parts[0].model_args, "attn_type", "sdpa")
        masks_from = model_parts if attention in ("flex", "varlen") else [_NoMasks()]
        return super().post_dataloading_process(input_dict, labels, masks_from)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validation loss of `model_parts` at training step `step`, logged through the metrics processor.

        Training is the same bits with it and without: buffers, the experts' token counts among them, are put back.
        No worker outlives it: each would keep its batches until the next one, which begins anew.
        """
        loader = self.validation_dataloader
        loader.dataset.load_state_dict(copy.deepcopy(self.start))
        super(ParallelAwareDataloader, loader).load_state_dict({})  # the next iterator begins anew
        try:
            with buffers_kept(model_parts):
                super().validate(model_parts, step)
        finally:
            end_workers(loader)


def build_validator(**kwargs: Any) -> FixedValidator:
    """`build_validator_fn` of a train spec: takes the keyword arguments of torchtitan's `Validator`."""
    return FixedValidator(**kwargs)
