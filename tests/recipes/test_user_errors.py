"""What the user can put right is one sentence, said once; a bug keeps its traceback."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import JobConfig

import train
from converters.config import FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from converters.registry import check_names, install
from recipes import user_errors
from recipes.datasets import register_datasets
from recipes.job_config import DataConfig
from recipes.models import llama4
from recipes.models.tokenizer import build_tokenizer
from recipes.user_errors import sentence_of, speaks
from tests.converters.models import llama4 as small_llama4

ROOT = Path(__file__).parents[2]


def unknown_converter() -> None:
    install()
    check_names(["fp8.dens"])


def no_tokenizer() -> None:
    job_config = JobConfig()
    job_config.model.hf_assets_path = "nowhere"
    build_tokenizer(job_config, llama4.FLAVORS)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (unknown_converter, "Unknown converter 'fp8.dens' in model.converters: did you mean 'fp8.dense'?"),
        (lambda: FP8GroupedExpertsConfig(recipe="token"), "recipe = 'token'"),
        (lambda: convert(small_llama4(), FP8GroupedExpertsConfig(fqns=["nothing"])), "fqns: 'nothing' matches no"),
        (no_tokenizer, "model.hf_assets_path = 'nowhere' is no folder"),
        (lambda: register_datasets(DataConfig(test_fraction=1.0)), "test_fraction = 1.0 must be a share"),
    ],
    ids=["converter", "recipe", "pattern", "tokenizer", "data"],
)
def test_a_users_mistake_is_a_sentence(mistake: object, says: str) -> None:
    with pytest.raises(ValueError, match=r".+") as caught:
        mistake()
    assert says in sentence_of(caught.value)


def run_in(module: str, code: str) -> BaseException:
    """What these lines raise in a module of this name."""
    with pytest.raises(Exception, match=r".*") as caught:
        exec(compile(code, module, "exec"), {"__name__": module, "torch": torch, "nn": nn})
    return caught.value


LAYER = """
class Layer(nn.Module):
    def forward(self, x):
        raise ValueError("x has another shape")
Layer()(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        ("recipes.a", "raise ValueError('Set b.')", "Set b."),
        ("converters.a", "try:\n    int('a')\nexcept ValueError as e:\n    raise TypeError('Set b.') from e", "Set b."),
        ("recipes.a", "int('a')", None),
        ("recipes.a", "raise ValueError", None),
        ("converters.a", "for _ in zip([1], [], strict=True): pass", None),
        ("parallel.a", "a, b = 1, 2, 3", None),
        ("recipes.a", "torch.optim.SGD([torch.ones(1)], lr=-1.0)", None),
        ("recipes.a", "raise RuntimeError('Set b.')", None),
        ("recipes.a", "assert False, 'Set b.'", None),
        ("recipes.a", "raise ImportError('Repair b.')", None),
        ("somebodys.plugin", "raise ValueError('Set b.')", None),
        ("recipesque", "raise ValueError('Set b.')", None),
        ("converters.a", LAYER, None),
    ],
)
def test_everything_else_is_a_bug(module: str, code: str, expected: str | None) -> None:
    assert sentence_of(run_in(module, code)) == expected


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name, value in {**train.ONE_PROCESS, "OMP_WAIT_POLICY": "PASSIVE"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return monkeypatch


def test_train_ends_with_the_sentence_or_raises(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = [run_in("recipes.a", "raise ValueError('Set b.')"), run_in("recipes.a", "int('a')")]

    def fail(trainer: type) -> None:
        raise errors.pop(0)

    environment.setattr("torchtitan.train.main", fail)
    with pytest.raises(SystemExit, match=r"Set b\."):
        train.main()
    assert "Set b." in (tmp_path / "error.json").read_text()
    with pytest.raises(ValueError, match="invalid literal"):
        train.main()


def test_rank_0_speaks_and_others_only_of_something_else(environment: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**agents, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        environment.setenv(name, value)
    assert speaks("Set b.")
    environment.setenv("RANK", "1")
    assert not speaks("Set b.")
    environment.setattr(user_errors, "PATIENCE", timedelta(milliseconds=50))
    assert speaks("Set c.")
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert speaks("Set b.")


def test_a_rank_that_nobody_hears_speaks(environment: pytest.MonkeyPatch) -> None:
    """One process, or a launcher without a store of its own."""
    assert speaks("Set b.")
    environment.setenv("WORLD_SIZE", "2")
    environment.setenv("RANK", "1")
    assert speaks("Set b.")


def test_two_ranks_that_fail_alike(tmp_path: Path) -> None:
    given = {"job.config_file": "recipes/llama4_fp8.toml", "job.dump_folder": tmp_path, "fp8.grouped_experts.fqns": "x"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, "train.py", *(f"--{name}={value}" for name, value in given.items())],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1
    before, _, summary = done.stderr.partition("Traceback")  # torchrun's own
    assert before.count("[fp8.grouped_experts] fqns: 'x' matches no expert module.") in (1, 2)  # 2: far apart in time
    assert "Traceback" not in done.stdout + summary
    assert "'x' matches no expert module" in summary
