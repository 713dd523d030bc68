"""A Mixtral saved by transformers is fine-tuned in FP8, exported, and read back by transformers with the same loss."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from transformers import MixtralConfig, MixtralForCausalLM

from recipes.convert_hf import main as convert
from recipes.datasets import register_datasets
from recipes.models.mixtral import FLAVORS
from recipes.models.mixtral.adapter import MixtralAdapter

ROOT = Path(__file__).parents[2]
STEPS, BATCHES = 8, 2
SIZES = {"training": {"seq_len": 64, "local_batch_size": 4}, "validation": {"seq_len": 64, "local_batch_size": 4}}


def random_mixtral(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralAdapter(FLAVORS["debug"], None).config()
    config.pop("architectures")
    MixtralForCausalLM(MixtralConfig(**config)).save_pretrained(folder)
    for file in (ROOT / "assets" / "tokenizer").iterdir():
        shutil.copy(file, folder)


def write_documents(path: Path) -> None:
    """Sentences of few words, so that a few steps teach something."""
    words = random.Random(0).choices(["the", "expert", "routes", "a", "token", "to", "eight", "more"], k=40_000)
    lines = [json.dumps({"text": " ".join(words[i : i + 200])}) for i in range(0, len(words), 200)]
    path.write_text("\n".join(lines) + "\n")


def arguments(model: Path, out: Path, documents: Path) -> list[str]:
    options = {f"{section}.{name}": value for section, sizes in SIZES.items() for name, value in sizes.items()}
    options |= {
        "training.steps": STEPS,
        "validation.steps": BATCHES,
        "validation.freq": STEPS,
        "lr_scheduler.warmup_steps": 2,
    }
    for section, split in (("training", ""), ("validation", "_validation")):
        options |= {f"{section}.dataset": f"jsonl{split}", f"{section}.dataset_path": documents}
    options |= {"job.dump_folder": out, "model.hf_assets_path": model, "checkpoint.interval": 1000}
    flags = ["checkpoint.enable", "checkpoint.initial_load_in_hf", "checkpoint.last_save_in_hf"]
    recipe = f"--job.config_file={ROOT / 'recipes' / 'mixtral_fp8.toml'}"
    return [recipe, *(f"--{k}={v}" for k, v in options.items()), *(f"--{flag}" for flag in flags)]


def train(args: list[str], folder: Path) -> dict[int, float]:
    """Runs train.py; validation loss by step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *args, "--metrics.disable_color_printing"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"validate step: +(\d+) +loss: +([\d.]+)", log)}


def validation_loss(model: MixtralForCausalLM, config: JobConfig) -> float:
    """transformers' own loss on the batches that the run validated on."""
    register_datasets(config.data)
    tokenizer = build_hf_tokenizer(config)
    batches = build_text_validation_dataloader(1, 0, tokenizer, config, infinite=True)
    losses = []
    for _, (inputs, labels) in zip(range(BATCHES), batches, strict=False):
        with torch.no_grad():
            losses.append(cross_entropy_loss(model(inputs["input"]).logits, labels) / labels.numel())
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("converters", ["fp8.grouped_experts"])
def test_fine_tuning_from_and_to_transformers(converters: str, tmp_path: Path) -> None:
    random_mixtral(tmp_path / "model")
    write_documents(tmp_path / "documents.jsonl")
    args = arguments(tmp_path / "model", tmp_path / "run", tmp_path / "documents.jsonl")
    losses = train(args, tmp_path)
    config = ConfigManager().parse_args(args)
    assert config.model.converters == [converters]
    before = validation_loss(MixtralForCausalLM.from_pretrained(tmp_path / "model"), config)
    exported = tmp_path / "run" / "checkpoint" / f"step-{STEPS}"
    names = ["--model", "mixtral", "--flavor", "debug", "--assets", str(tmp_path / "model")]
    assert convert(["config", str(exported), *names]) == 0
    after = validation_loss(MixtralForCausalLM.from_pretrained(exported), config)
    # The run's own is measured with FP8 experts, which is all the difference.
    assert after == pytest.approx(losses[STEPS], abs=0.01)
    assert after < before - 0.5
    assert losses[1] < before  # it started from the weights given to it, and not from torchtitan's own
