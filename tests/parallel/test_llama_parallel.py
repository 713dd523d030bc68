"""Llama4 with FP8 experts through torchtitan's own parallelize_llama on two processes: losses and norms equal one's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama4 import Transformer
from torchtitan.models.llama4.infra.parallelize import parallelize_llama

from converters.config import FP8GroupedExpertsConfig
from converters.expert_weight import FP8ExpertWeight
from converters.fp8_grouped_experts import convert
from tests.converters.models import llama4
from tests.helpers import distributed

STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 32, 128
LAYOUT = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "world_size": 2}


@dataclass(frozen=True)
class Layout:
    """A way to use two ranks. one_sided: the router sends every token to the experts of the first rank."""

    axes: dict[str, int]
    options: dict[str, str] = field(default_factory=dict)
    one_sided: bool = False


LAYOUTS = {
    "fsdp": Layout({"dp_shard": 2}, {"fsdp_fp8_all_gather": "off"}),
    "fsdp_fp8_gather": Layout({"dp_shard": 2}, {"fsdp_fp8_all_gather": "on"}),
    "ep": Layout({"dp_shard": 2, "ep": 2}, {"fsdp_fp8_all_gather": "off", "ep_fp8_dispatch": "off"}),
    "ep_fp8": Layout({"dp_shard": 2, "ep": 2}, {"fsdp_fp8_all_gather": "on", "ep_fp8_dispatch": "on"}),
    "ep_rowwise": Layout({"dp_shard": 2, "ep": 2}, {"recipe": "rowwise"}),
    "ep_one_sided": Layout({"dp_shard": 2, "ep": 2}, {"ep_fp8_dispatch": "off"}, one_sided=True),
    "ep_fp8_one_sided": Layout({"dp_shard": 2, "ep": 2}, {"ep_fp8_dispatch": "on"}, one_sided=True),
    "tp": Layout({"tp": 2}),
}


def job_config() -> JobConfig:
    config = JobConfig()
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.parallelism.disable_loss_parallel = True
    config.optimizer.lr = 1e-3
    return config


def model_of(layout: Layout) -> Transformer:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = llama4(n_layers=2)
    options = {"backend": "reference", **layout.options}
    convert(model, FP8GroupedExpertsConfig(**options))
    return model


def initialize(model: Transformer, state: dict[str, Tensor] | None, layout: Layout) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    if state is not None:
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    if layout.one_sided:
        for block in model.layers.values():
            block.moe.expert_bias[:] = torch.tensor([9.0, 9.0, 0.0, 0.0])


def tokens(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def train(model: Transformer, dims: ParallelDims, rows: slice, losses_of_all: Callable[[Tensor], Tensor]) -> list[list]:
    """[loss, gradient norm] of each step, as torchtitan's Trainer makes them: the sum over tokens by their number."""
    optimizer = build_optimizers([model], job_config().optimizer, dims)
    out = []
    for step in range(STEPS):
        batch = tokens(step)[rows]
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        loss = loss / (BATCH * LENGTH)
        loss.backward()
        norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, ep_enabled=dims.ep_enabled)
        optimizer.step()
        optimizer.zero_grad()
        out.append([losses_of_all(loss.detach()).item(), norm.item()])
    return out


def summed(loss: Tensor) -> Tensor:
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss


def check(name: str, layout: Layout) -> None:
    one = model_of(layout)
    initialize(one, None, layout)
    state = {key: t.clone() for key, t in one.state_dict().items()}
    alone = ParallelDims(**{**LAYOUT, "world_size": 1})
    wanted = train(one, alone, slice(None), lambda loss: loss)

    dims = ParallelDims(**{**LAYOUT, **layout.axes})
    dims.build_mesh()
    model = parallelize_llama(model_of(layout), dims, job_config())
    initialize(model, state, layout)
    assert type(model.layers["0"].moe.experts.w1._local_tensor) is FP8ExpertWeight
    split = layout.axes.get("dp_shard", 1) == 2
    half = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)
    actual = train(model, dims, half if split else slice(None), summed if split else lambda loss: loss)
    for step, (a, b) in enumerate(zip(wanted, actual, strict=True)):
        for what, x, y in zip(("loss", "norm"), a, b, strict=True):
            assert abs(x - y) <= 1e-3 * abs(x), f"{name}, step {step}, {what}: {x} in one process, {y} in two"


@distributed(2)
def test_losses_and_gradient_norms_equal_one_process() -> None:
    for name, layout in LAYOUTS.items():
        check(name, layout)
