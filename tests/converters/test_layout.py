"""Layouts that FP8 experts cannot run in are refused by name, before the model is made parallel."""

import pytest
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import FP8GroupedExpertsConverter
from converters.layout import check_delayed
from parallel.parallelize import check_expert_parallel
from tests.converters.models import EXPERTS, in_fp8, llama4

DEGREES = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}


def converter(
    job_config: JobConfig | None = None, config: dict | None = None, **degrees: int
) -> FP8GroupedExpertsConverter:
    job_config = job_config or JobConfig()
    job_config.fp8 = FP8Config(FP8GroupedExpertsConfig(backend="reference", **(config or {})))
    degrees = {**DEGREES, **degrees}
    world = degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["cp"] * degrees["pp"]
    return FP8GroupedExpertsConverter(job_config, ParallelDims(**degrees, world_size=world))


@pytest.mark.parametrize(
    ("degrees", "axis"),
    [
        ({"tp": 4}, "tensor_parallel_degree = 4"),  # H = 96: parts of 24
        ({"tp": 4, "ep": 2, "etp": 4, "dp_shard": 2}, "expert_tensor_parallel_degree = 4"),
    ],
    ids=["tp", "etp"],
)
def test_parts_of_an_expert_that_no_gemm_reads(degrees: dict, axis: str) -> None:
    model = llama4(n_layers=1)
    message = rf"layers.0.moe.experts.w1 has shape \(4, 96, 64\).*{axis} cuts its dim 1 into parts of 24.*of 16"
    with pytest.raises(ValueError, match=message):
        converter(**degrees).convert(model)
    assert not in_fp8(model)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 4, "ep": 4, "etp": 1}], ids=["tp", "ep_borrows_tp"])
def test_parts_that_a_gemm_reads(degrees: dict) -> None:
    model = llama4(n_layers=1)
    converter(**degrees).convert(model)
    assert len(in_fp8(model)) == len(EXPERTS)


def test_fp8_all_gather_by_name_with_cpu_offload() -> None:
    job_config = JobConfig()
    job_config.training.enable_cpu_offload = True
    with pytest.raises(ValueError, match=r"fsdp_fp8_all_gather = 'on'.*enable_cpu_offload = true.*'auto'"):
        converter(job_config, {"fsdp_fp8_all_gather": "on"}).convert(llama4(n_layers=1))
    converter(job_config, {"fsdp_fp8_all_gather": "auto"}).convert(llama4(n_layers=1))


def test_fp8_dispatch_by_name_with_deepep() -> None:
    job_config = JobConfig()
    job_config.parallelism.expert_parallel_comm_backend = "deepep"
    with pytest.raises(ValueError, match=r"ep_fp8_dispatch = 'on'.*expert_parallel_comm_backend = 'deepep'"):
        converter(job_config, {"ep_fp8_dispatch": "on"}, dp_shard=2, ep=2).convert(llama4(n_layers=1))
    converter(job_config, {"ep_fp8_dispatch": "on"}).convert(llama4(n_layers=1))  # without EP there is no dispatch


class OwnForward(GroupedExperts):
    def forward(self, *args: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("wire", ["fsdp_fp8_all_gather", "ep_fp8_dispatch"])
def test_an_fp8_wire_by_name_for_experts_with_a_forward_of_their_own(wire: str) -> None:
    model = nn.ModuleDict({"experts": OwnForward(64, 96, 4, use_grouped_mm=True)})
    with pytest.raises(ValueError, match=rf"{wire} = 'on' needs torchtitan's own forward.*experts \(OwnForward\)"):
        converter(config={wire: "on"}).convert(model)
    converter(config={wire: "auto"}).convert(model)


def test_expert_parallelism_that_does_not_divide_the_experts() -> None:
    model = llama4(n_layers=1, num_experts=6)
    with pytest.raises(ValueError, match=r"layers.0.moe.experts has 6 experts.*expert_parallel_degree = 4"):
        check_expert_parallel(model, 4)
    check_expert_parallel(model, 3)


@pytest.mark.parametrize(
    ("schedule", "mode"), [("InterleavedZeroBubble", "none"), ("DualPipeV", "none"), ("1F1B", "full")]
)
def test_delayed_scaling_in_a_pipeline_that_repeats_a_pass(schedule: str, mode: str) -> None:
    job_config = JobConfig()
    job_config.parallelism.pipeline_parallel_schedule = schedule
    job_config.activation_checkpoint.mode = mode
    dims = ParallelDims(**{**DEGREES, "pp": 2}, world_size=2)
    with pytest.raises(ValueError, match=r"recipe = 'delayed'.* does not go with .*another recipe\."):
        check_delayed("delayed", job_config, dims)
    check_delayed("tensorwise", job_config, dims)
