"""Mixtral's gradients, auxiliary loss included, are the same however a step is cut over ranks and micro-batches."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from parallel.parallelize import let_expert_parallelism_stand_alone
from parallel.pipeline import splits_backward
from recipes.models import mixtral
from recipes.models.mixtral.args import MixtralModelArgs, mixtral_moe
from recipes.models.mixtral.balance import Balance, balance_loss, balanced_moes
from recipes.models.mixtral.model import Mixtral
from tests.helpers import distributed

B, S, V = 4, 16, 64
ARGS = MixtralModelArgs(
    dim=32,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    vocab_size=V,
    max_seq_len=S,
    router_aux_loss_coef=10.0,  # of the size of the main loss, so that a wrong factor shows
    moe_args=replace(mixtral_moe(), use_grouped_mm=False),
)


@dataclass(frozen=True)
class Layout:
    """A way to cut a step of B sequences over two ranks."""

    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = ""
    recompute: bool = False


LAYOUTS = {
    "fsdp": Layout(dp_shard=2),
    "fsdp_ep_recompute": Layout(dp_shard=2, ep=2, recompute=True),
    "tp": Layout(tp=2),
    "tp_ep": Layout(tp=2, ep=2),
    "pp_1f1b": Layout(pp=2, schedule="1F1B"),
    # Zero bubble computes weight gradients apart from input gradients: an attached loss must reach both.
    "pp_zero_bubble": Layout(pp=2, schedule="InterleavedZeroBubble"),
}


def inputs() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def initial() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Mixtral(copy.deepcopy(ARGS))
    with torch.no_grad():
        model.init_weights()
        for layer in model.layers.values():  # far from balance
            layer.moe.router.gate.weight.normal_(std=0.5)
    return model.state_dict()


def mean_loss(pred: Tensor, labels: Tensor) -> Tensor:
    """This part's share of the mean over the step's B * S tokens."""
    return nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum") / (B * S)


def plain_gradients(micro_batches: int = 1, coef: float = ARGS.router_aux_loss_coef) -> dict[str, Tensor]:
    model = Mixtral(replace(ARGS, router_aux_loss_coef=coef))
    model.load_state_dict(initial())
    for moe in balanced_moes(model):
        moe.balance = replace(moe.balance, tokens_per_step=B * S)
    for x, y in zip(*(t.chunk(micro_batches) for t in inputs()), strict=True):
        mean_loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def job(layout: Layout) -> JobConfig:
    config = JobConfig()
    config.training.seq_len, config.training.global_batch_size = S, B
    config.training.local_batch_size = B // layout.dp_shard
    config.training.mixed_precision_param = "float32"
    config.parallelism.disable_loss_parallel = True
    config.parallelism.pipeline_parallel_degree = layout.pp
    config.parallelism.pipeline_parallel_schedule = layout.schedule
    config.parallelism.pipeline_parallel_microbatch_size = 1
    config.activation_checkpoint.mode = "full" if layout.recompute else "none"
    return config


def build(layout: Layout, dims: ParallelDims) -> tuple[list[nn.Module], Callable[..., None]]:
    """The parts of the model on this rank with the initial weights, and a function that runs one step backward too."""
    config, args = job(layout), copy.deepcopy(ARGS)
    with torch.device("meta"):
        model = Mixtral(args)
    x, y = inputs()
    if layout.pp > 1:
        spec = mixtral.train_spec()
        # The loss is a mean here: torchtitan 0.2.2 leaves the sum to the pipeline's backward.
        schedule, parts, first, last = spec.pipelining_fn(
            model, dims, config, torch.device("cpu"), args, spec.parallelize_fn, mean_loss
        )
        labels = {"target": y, "losses": []} if last else {}
        step = lambda: schedule.step(*([x] if first else []), **labels)  # noqa: E731
    else:
        parts = [mixtral.parallelize(model, dims, config)]
        rank = dims.get_mesh("batch").get_local_rank() if layout.dp_shard > 1 else 0
        x, y = x.chunk(layout.dp_shard)[rank], y.chunk(layout.dp_shard)[rank]
        step = lambda: mean_loss(parts[0](x), y).backward()  # noqa: E731
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(torch.device("cpu"))
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(part, initial(), options=options)
    return parts, step


def gradients(layout: Layout) -> dict[str, Tensor]:
    """Whole gradients of one step, of the parameters that this rank has."""
    degrees = {"dp_shard": layout.dp_shard, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    dims = ParallelDims(**degrees, dp_replicate=1, cp=1, etp=1, world_size=2)
    dims.build_mesh()
    parts, step = build(layout, dims)
    step()
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for m in parts for name, p in m.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def worst(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert actual
    return max((g - expected[n]).norm().item() / expected[n].norm().item() for n, g in actual.items())


@distributed(2)
def test_gradients_are_the_same_on_two_ranks() -> None:
    let_expert_parallelism_stand_alone()
    halves_of_a_sequence_count_together()
    expected = plain_gradients()
    layouts = {name: layout for name, layout in LAYOUTS.items() if splits_backward() or name != "pp_zero_bubble"}
    errors = {name: worst(expected, gradients(layout)) for name, layout in layouts.items()}
    assert max(errors.values()) < 1e-5, errors


def halves_of_a_sequence_count_together() -> None:
    """Context parallelism: each rank has half of every sequence, the shares are those of the whole."""
    scores = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    whole = scores.clone().requires_grad_()
    balance_loss(whole, chosen, Balance(coef=1.0, layers=3, tokens_per_step=16)).backward()
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    part = scores[:, mine].clone().requires_grad_()
    balance = Balance(coef=1.0, layers=3, tokens_per_step=16, sequence_group=dist.group.WORLD)
    balance_loss(part, chosen[:, mine], balance).backward()
    torch.testing.assert_close(part.grad, whole.grad[:, mine])


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_gradient_accumulation_changes_nothing(micro_batches: int) -> None:
    expected = plain_gradients()
    assert worst(expected, plain_gradients(micro_batches)) < 1e-5
    assert worst(expected, plain_gradients(coef=0.0)) > 0.1, "the auxiliary loss does not matter here"
