"""Zero-bubble schedules are refused on a torch that computes wrong gradients with them."""

import pytest
import torch
from torchtitan.config import JobConfig

from parallel import pipeline

ZERO_BUBBLE = ("InterleavedZeroBubble", "interleavedzerobubble", "ZBVZeroBubble", "DualPipeV")


def job_config(schedule: str) -> JobConfig:
    config = JobConfig()
    config.parallelism.pipeline_parallel_schedule = schedule
    return config


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Schedules that torchtitan was asked for."""
    asked: list[str] = []

    class Schedule:
        _stages = ()

    def pipeline_llm(model: object, dims: object, config: JobConfig) -> tuple:
        asked.append(config.parallelism.pipeline_parallel_schedule)
        return Schedule(), [], True, True

    monkeypatch.setattr(pipeline, "pipeline_llm", pipeline_llm)
    return asked


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_zero_bubble_before_torch_2_13(
    schedule: str, version: str, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        ValueError, match=rf"{schedule}' splits backward in two, which torch {version[:4]}.*torch>=2.13"
    ):
        pipeline.pipeline(None, None, job_config(schedule))
    pipeline.pipeline(None, None, job_config("Interleaved1F1B"))
    assert built == ["Interleaved1F1B"]


def test_zero_bubble_from_torch_2_13_on(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    for schedule in ZERO_BUBBLE:
        pipeline.pipeline(None, None, job_config(schedule))
    assert built == list(ZERO_BUBBLE)
