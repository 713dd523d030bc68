"""After the last step: validation and the test split, each with its perplexity."""

import math
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS

from recipes.datasets import register_datasets
from recipes.final_evaluation import FinalEvaluation, build_validator
from recipes.job_config import DataConfig
from recipes.loader import build_dataloader
from recipes.run_info import perplexity
from tests.recipes.test_loader import TOKENIZER, Recorder, job, validator


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(TOKENIZER)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with mock.patch.dict(DATASETS):
        register_datasets(DataConfig())
        yield


def evaluation(folder: Path, tokenizer: HuggingFaceTokenizer, **data: object) -> FinalEvaluation:
    config = job(folder, **{"test_fraction": 0.1, **data})
    config.validation.freq, config.validation.steps, config.training.steps = 10, 3, 25
    build_dataloader(1, 0, tokenizer, config)
    return validator(config, tokenizer, build_validator)


def test_the_last_step_reads_the_test_split_once(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    evaluate, model = evaluation(tmp_path, tokenizer), Recorder()
    assert [step for step in range(1, 26) if evaluate.should_validate(step)] == [1, 10, 20, 25]
    evaluate.validate([model], 20)
    log = evaluate.metrics_processor
    assert not log.log_test.called
    tokens_before, validation = log.ntokens_since_last_log, torch.cat(model.take())
    evaluate.validate([model], 25)
    seen = torch.cat(model.take())
    assert torch.equal(seen[: len(validation)], validation)
    assert len(seen) == 2 * len(validation)
    assert not torch.equal(seen[len(validation) :], validation)
    loss, step = log.log_test.call_args.args
    assert (loss, step) == (pytest.approx(math.log(2048)), 25)
    assert log.log_validation.call_args.kwargs["step"] == 25
    assert log.ntokens_since_last_log == 2 * tokens_before  # those of the test split are not in the throughput


def test_without_a_test_split_there_is_validation_only(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    evaluate = evaluation(tmp_path, tokenizer, test_fraction=0.0)
    evaluate.validate([Recorder()], 25)
    assert evaluate.metrics_processor.log_validation.called
    assert not evaluate.metrics_processor.log_test.called


def test_torchtitans_c4_test_is_not_taken_for_a_split(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """It is a fixture of 2,000 documents under torchtitan's own tests, whose path an installed package lacks."""
    config = job(tmp_path)
    build_dataloader(1, 0, tokenizer, config)
    config.training.dataset, config.validation.steps = "c4", 1
    assert "c4_test" in DATASETS
    assert validator(config, tokenizer, build_validator)._test is None


@pytest.mark.parametrize(("loss", "value"), [(0.0, 1.0), (2.0, math.e**2), (1e4, math.inf), (math.inf, math.inf)])
def test_perplexity(loss: float, value: float) -> None:
    assert perplexity(loss) == pytest.approx(value)
    assert math.isnan(perplexity(math.nan))
