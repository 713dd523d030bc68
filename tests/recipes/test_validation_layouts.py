"""A validation loss is per token in every layout: torchtitan 0.2.2 multiplies it by the context-parallel degree."""

import contextlib
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims

from recipes.datasets import register_datasets
from recipes.final_evaluation import build_validator
from recipes.job_config import DataConfig
from recipes.loader import build_dataloader
from tests.helpers import distributed
from tests.recipes.test_loader import TOKENIZER, job

VOCABULARY = 2048


class Even(nn.Module):
    """Scores every token alike: its loss is log(VOCABULARY), whatever it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.model_args = SimpleNamespace(attn_type="sdpa")
        self.register_buffer("freqs_cis", torch.zeros(32, 1))

    def get_attention_masks(self, **kwargs: object) -> None:
        raise TypeError("takes no masks")

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return torch.zeros(*tokens.shape, VOCABULARY)


def losses(folder: str, make: type, **degrees: int) -> tuple[float, float | None]:
    """Of validation and of the test split, after the last step, with a validator that `make` makes."""
    register_datasets(DataConfig())
    own = Path(folder) / os.environ["RANK"]  # `job` writes a file
    own.mkdir(exist_ok=True)
    config = job(own, test_fraction=0.1)
    config.validation.steps, config.training.steps = 2, 5
    dims = ParallelDims(**{"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees)
    dims.build_mesh()
    tokenizer = HuggingFaceTokenizer(TOKENIZER)
    rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    ranks = dims.dp_replicate * dims.dp_shard
    build_dataloader(ranks, rank, tokenizer, config)
    log = mock.Mock(ntokens_since_last_log=0)
    validator = make(
        job_config=config,
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=tokenizer,
        parallel_dims=dims,
        loss_fn=lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten(), reduction="sum"),
        validation_context=contextlib.nullcontext,
        maybe_enable_amp=contextlib.nullcontext(),
        metrics_processor=log,
    )
    validator.validate([Even()], 5)
    assert log.ntokens_since_last_log == 2 * 2 * 32
    test = log.log_test.call_args
    return log.log_validation.call_args.kwargs["loss"], None if test is None else test.args[0]


@distributed(2)
def check_per_token(folder: str) -> None:
    expected = pytest.approx(math.log(VOCABULARY))
    for degrees in ({"cp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}):
        assert losses(folder, build_validator, world_size=2, **degrees) == (expected, expected), degrees
    # When this fails, torchtitan has changed: FixedValidator can lose a part.
    assert losses(folder, Validator, world_size=2, cp=2)[0] == pytest.approx(2 * math.log(VOCABULARY))


def test_a_validation_loss_is_per_token(tmp_path: Path) -> None:
    check_per_token(str(tmp_path))
