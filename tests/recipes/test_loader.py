"""Our datasets in torchtitan's own loader and validator: ranks, position, options, the same validation every time."""

import contextlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from recipes.datasets import SOURCES, register_datasets
from recipes.job_config import DataConfig
from recipes.loader import build_dataloader
from recipes.validation import FixedValidator, build_validator
from tests.helpers import DEVICE

TOKENIZER = str(Path(__file__).parents[2] / "assets" / "tokenizer")
DOCUMENTS = [f"Document {i}: " + "ninety-nine bottles of beer on the wall, " * (1 + i % 5) for i in range(100)]


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(TOKENIZER)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """torchtitan's registry as it was: a test binds it to its own [data]."""
    with mock.patch.dict(DATASETS):
        register_datasets(DataConfig())
        yield


def job(folder: Path, key: str = "text", **data: object) -> TitanJobConfig:
    """A job on a jsonl file of DOCUMENTS: batches of 2 sequences of 32 tokens, training and validation."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps({key: text}) + "\n" for text in DOCUMENTS))
    config = TitanJobConfig()
    for section in (config.training, config.validation):
        section.dataset_path, section.local_batch_size, section.seq_len = str(file), 2, 32
    config.training.dataset, config.validation.dataset = "jsonl", "jsonl_validation"
    config.data = DataConfig(**{"validation_fraction": 0.1, "test_fraction": 0.0} | data)
    return config


def test_every_source_has_three_names() -> None:
    names = {f"{name}{suffix}" for name in SOURCES for suffix in ("", "_validation", "_test")}
    assert len(names) == 15
    assert names <= set(DATASETS)
    assert {"c4", "c4_test"} <= set(DATASETS)  # torchtitan's own stay


def test_labels_are_the_next_tokens_of_whole_documents(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = job(tmp_path)
    config.training.seq_len = 256
    inputs, labels = next(iter(build_dataloader(1, 0, tokenizer, config)))
    inputs = inputs["input"]
    assert inputs.shape == labels.shape == (2, 256)
    assert torch.equal(inputs[0, 1:], labels[0, :-1])
    assert inputs[0, 0] == tokenizer.bos_id
    tokens = inputs[0].tolist()
    assert tokenizer.decode(tokens[1 : tokens.index(tokenizer.eos_id)]) in DOCUMENTS


def test_ranks_share_the_documents(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = job(tmp_path)
    shards = [list(build_dataloader(3, rank, tokenizer, config).dataset._data["text"]) for rank in range(3)]
    whole = list(build_dataloader(1, 0, tokenizer, config).dataset._data["text"])
    assert [text for shard in shards for text in shard] == whole
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_fewer_documents_than_ranks_is_refused_on_every_rank(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    for rank in (0, 99):
        with pytest.raises(ValueError, match="documents for 100 data-parallel ranks"):
            build_dataloader(100, rank, tokenizer, job(tmp_path))


@pytest.mark.parametrize("taken", [1, 7, 60])  # 60 batches: in the second epoch
def test_position_is_resumed(taken: int, tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = job(tmp_path)
    first = build_dataloader(2, 1, tokenizer, config)
    stream = iter(first)
    for _ in range(taken):
        next(stream)
    state = first.state_dict()
    second = build_dataloader(2, 1, tokenizer, config)
    second.load_state_dict(state)
    for (a, _), (b, _) in zip(islice(stream, 5), islice(second, 5), strict=True):
        assert torch.equal(a["input"], b["input"])


def test_data_section_reaches_training_and_validation(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    config = job(tmp_path, key="body", text_column="body", validation_fraction=0.5)
    train = build_dataloader(1, 0, tokenizer, config).dataset._data
    validation = validator(config, tokenizer).validation_dataloader.dataset._data
    assert len(train) + len(validation) == len(DOCUMENTS)
    assert min(len(train), len(validation)) > 30


def test_a_later_job_replaces_the_options_of_an_earlier_one(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    build_dataloader(1, 0, tokenizer, job(tmp_path, validation_fraction=0.5))
    assert len(build_dataloader(1, 0, tokenizer, job(tmp_path, validation_fraction=0.0)).dataset._data) == 100


# Validation


class Recorder(nn.Module):
    """Scores every token alike and remembers what it was asked; like Llama4, refuses attention masks under sdpa."""

    def __init__(self) -> None:
        super().__init__()
        self.model_args = SimpleNamespace(attn_type="sdpa")
        self.seen: list[Tensor] = []

    def get_attention_masks(self, **kwargs: object) -> str:
        return "masks"

    def forward(self, tokens: Tensor, attention_masks: object = None) -> Tensor:
        assert attention_masks is None, "sdpa takes no masks"
        assert not self.training
        assert tokens.device.type == DEVICE
        self.seen.append(tokens)
        return torch.zeros(*tokens.shape, 2048, device=tokens.device)

    def take(self) -> list[Tensor]:
        seen, self.seen = self.seen, []
        return seen


def validator(config: TitanJobConfig, tokenizer: HuggingFaceTokenizer, make: type = build_validator) -> Validator:
    def loss_sum(pred: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum")

    flags = {"dp_enabled": False, "cp_enabled": False, "pp_enabled": False, "dp_cp_enabled": False}
    return make(
        job_config=config,
        dp_world_size=1,
        dp_rank=0,
        tokenizer=tokenizer,
        parallel_dims=SimpleNamespace(**flags),
        loss_fn=loss_sum,
        validation_context=contextlib.nullcontext,
        maybe_enable_amp=contextlib.nullcontext(),
        metrics_processor=mock.Mock(ntokens_since_last_log=0),
    )


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("steps", [3, -1])
def test_validation_sees_the_same_batches_every_time(
    steps: int, workers: int, persistent: bool, tmp_path: Path, tokenizer: HuggingFaceTokenizer
) -> None:
    config, model = job(tmp_path), Recorder()
    build_dataloader(1, 0, tokenizer, config)
    config.validation.steps, config.validation.dataloader.num_workers = steps, workers
    config.validation.dataloader.persistent_workers = persistent
    validate = validator(config, tokenizer)
    seen = []
    for step in (1, 10, 20):
        validate.validate([model], step)
        seen.append(model.take())
        assert model.training
        loss = validate.metrics_processor.log_validation.call_args.kwargs["loss"]
        assert loss == pytest.approx(torch.log(torch.tensor(2048.0)).item())
    assert len(seen[0]) == steps or (steps == -1 and len(seen[0]) > 3)
    for again in seen[1:]:
        assert torch.equal(torch.cat(seen[0]), torch.cat(again))


def test_torchtitans_own_validator_still_needs_ours(tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
    """When this fails, torchtitan has changed: FixedValidator can lose a part, or go."""
    config, model = job(tmp_path), Recorder()
    build_dataloader(1, 0, tokenizer, config)
    config.validation.steps = 2
    with pytest.raises(AssertionError, match="sdpa takes no masks"):
        validator(config, tokenizer, Validator).validate([model.train()], 1)

    class MaskFree(FixedValidator):
        def validate(self, model_parts: list[nn.Module], step: int) -> None:
            Validator.validate(self, model_parts, step)

    moving = validator(config, tokenizer, MaskFree)
    moving.validate([model], 1)
    first = model.take()
    moving.validate([model], 10)
    assert not torch.equal(torch.cat(first), torch.cat(model.take()))
