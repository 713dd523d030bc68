"""torchtitan's validator, made to measure the same thing every time.

Two things of torchtitan 0.2.2 are put right. It keeps the position of the validation loader between two validations:
with `validation.steps = N` each one reads the next N batches, so two losses differ also by their texts, and with -1 the
second finds nothing left and fails in `torch.stack`. And it asks every model for attention masks, where the trainer
asks only those with flex or varlen attention: Llama4 answers with masks and then refuses them under sdpa.
"""

import copy
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import Validator


class _NoMasks(nn.Module):
    """Stands in for a model without attention masks, which torchtitan's validator knows by this TypeError."""

    def get_attention_masks(self, **kwargs: Any) -> None:
        raise TypeError("sdpa attention takes no masks")


class FixedValidator(Validator):
    """Validates on the first `validation.steps` batches of the validation dataset, or on all of it, every time."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = copy.deepcopy(self.validation_dataloader.dataset.state_dict())

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[nn.Module]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """Inputs [B, S], labels [B, S], further inputs and keyword arguments of the model, as in the trainer."""
        attention = getattr(model_parts[0].model_args, "attn_type", "sdpa")
        masks_from = model_parts if attention in ("flex", "varlen") else [_NoMasks()]
        return super().post_dataloading_process(input_dict, labels, masks_from)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validation loss of `model_parts` at training step `step`, logged through the metrics processor."""
        self.validation_dataloader.dataset.load_state_dict(copy.deepcopy(self.start))
        super().validate(model_parts, step)


def build_validator(**kwargs: Any) -> FixedValidator:
    """`build_validator_fn` of a train spec: takes the keyword arguments of torchtitan's `Validator`."""
    return FixedValidator(**kwargs)
