"""Training takes no notice of validation: losses and all that is saved are the same bits with it and without.

torchtitan's MoE counts the tokens of each expert in every forward, and the next step moves the routing bias by these
counts; a checkpoint does not have them. So a validated run would differ from one without validation, and from itself
where it was stopped after a validation and resumed.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from recipes.runs import TAGS, read_run
from tests.recipes.test_finetune import ROOT, train, write_documents

STEPS, STOP = 6, 3
OPTIONS = {
    "training.steps": STEPS,
    "training.local_batch_size": 4,
    "training.seq_len": 64,
    "training.dataset": "jsonl",
    "lr_scheduler.warmup_steps": 1,
    "validation.dataset": "jsonl_validation",
    "validation.local_batch_size": 4,
    "validation.seq_len": 64,
    "validation.steps": 8,  # more tokens than a step trains on
    "validation.freq": 1,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
    "metrics.log_freq": 1,
    "model.hf_assets_path": ROOT / "assets" / "tokenizer",
}
Outcome = tuple[dict[int, float], dict[str, Tensor]]


def run(folder: Path, name: str, *more: str) -> Outcome:
    """Loss by step, and what the last checkpoint has of model and optimizer."""
    options = {**OPTIONS, "job.dump_folder": folder / name}
    options |= {f"{section}.dataset_path": folder / "documents.jsonl" for section in ("training", "validation")}
    given = [f"--job.config_file={ROOT / 'recipes' / 'llama4_fp8.toml'}", *(f"--{k}={v}" for k, v in options.items())]
    train([*given, "--checkpoint.enable", "--checkpoint.no-last_save_model_only", *more], folder)
    dcp_to_torch_save(folder / name / "checkpoint" / f"step-{STEPS}", folder / f"{name}.pt")
    saved = torch.load(folder / f"{name}.pt", weights_only=False)
    tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
    assert sum("expert_bias" in key for key in tensors) == 2
    return dict(read_run(folder / name).series(TAGS["loss"])), tensors


def expect_same(actual: Outcome, expected: Outcome, first: int = 1) -> None:
    losses, saved = expected
    assert actual[0] == {step: loss for step, loss in losses.items() if step >= first}
    assert actual[1].keys() == saved.keys()
    assert [name for name, value in saved.items() if not torch.equal(actual[1][name], value)] == []


def test_with_and_without_validation_and_resumed_after_one(tmp_path: Path) -> None:
    """Delayed scales, which validation might move too: tests/converters/test_delayed_module.py."""
    write_documents(tmp_path / "documents.jsonl")
    validated = run(tmp_path, "validated")
    saved, resumed = (tmp_path / name / "checkpoint" / f"step-{STOP}" for name in ("validated", "resumed"))
    shutil.copytree(saved, resumed)
    expect_same(run(tmp_path, "resumed"), validated, first=STOP + 1)
    expect_same(run(tmp_path, "unvalidated", "--validation.no-enable"), validated)
