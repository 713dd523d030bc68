"""The trainer refuses what `model.converters` names wrongly before anything is loaded (SIGTERM: test_parity.py)."""

import pytest
from torchtitan.config import JobConfig
from torchtitan.train import Trainer as TorchTitanTrainer

import recipes.register  # noqa: F401  (importing registers)
from converters.config import FP8Config
from converters.token_config import TokenPathConfig
from recipes.trainer import Trainer


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[JobConfig]:
    configs: list[JobConfig] = []
    monkeypatch.setattr(TorchTitanTrainer, "__init__", lambda self, config: configs.append(config))
    return configs


def config(*converters: str) -> JobConfig:
    job_config = JobConfig()
    job_config.model.converters = list(converters)
    return job_config


def test_an_unknown_converter_is_refused_before_torchtitan_builds_anything(built: list[JobConfig]) -> None:
    with pytest.raises(ValueError, match=r"Unknown converter 'fp8.dens' .* did you mean 'fp8.dense'"):
        Trainer(config("fp8.grouped_experts", "fp8.dens"))
    assert not built


def test_known_converters_are_handed_on(built: list[JobConfig]) -> None:
    Trainer(job_config := config("fp8.grouped_experts", "fp8.dense"))
    assert built == [job_config]


def test_keys_that_no_converter_reads_are_named_first(built: list[JobConfig]) -> None:
    job_config = config("fp8.dense")
    job_config.fp8 = FP8Config(token_path=TokenPathConfig(fused="on"))
    with pytest.raises(ValueError, match=r"fused = 'on' is read by the converter"):
        Trainer(job_config)
    assert not built
