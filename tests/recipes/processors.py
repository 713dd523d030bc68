"""A metrics processor of one process, and training steps that feed it as torchtitan's trainer does.

A test module imports `make_fixture` and asks for `make`.
"""

import pytest
import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from converters.selection import ConversionReport
from parallel.device import prepare_device
from recipes.reporting import build_metrics_processor

STEPS = 6


@pytest.fixture(name="make")
def make_fixture(tmp_path, monkeypatch):
    """Builds processors of a one-process run, as the trainer does, and closes them at the end."""
    prepare_device()
    made = []

    def build(rank: int = 0, **changes: object):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        config = JobConfig()
        config.job.dump_folder = str(tmp_path / "run")
        config.metrics.enable_tensorboard = True
        config.metrics.log_freq = 2
        config.training.steps = STEPS
        config.debug.seed = 3
        for dotted, value in changes.items():
            section, key = dotted.split("__")
            setattr(getattr(config, section), key, value)
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
        processor = build_metrics_processor(config, dims, None)
        processor.num_flops_per_token = 1000
        made.append(processor)
        return processor

    yield build
    for processor in made:
        processor.close()


def model(*reports: ConversionReport) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if reports:
        model.conversion_reports = list(reports)
    return model


def train_step(
    processor, step: int, bad: float | None = None, loss: float | None = None, tokens: int = 64, zeros: int = 0
) -> None:
    """One step in torchtitan's order: backward, clip, (optimizer), should_log, log."""
    part = processor.model_parts[0]
    part.zero_grad()
    y = part(torch.randn(3, 4))
    y.backward(torch.randn_like(y))
    part[0].weight.grad.view(-1)[:zeros] = 0
    if bad is not None:
        part[0].weight.grad[0, 0] = bad
    norm = dist_utils.clip_grad_norm_(list(part.parameters()), 1.0, foreach=True)
    processor.ntokens_since_last_log += tokens
    processor.data_loading_times.append(0.0)
    if processor.should_log(step):
        processor.log(step, loss or 8.0 - step, loss or 8.0 - step, norm.item(), {"lr": 0.002 * step})
