"""Two processes against one: FSDP2's hooks on their own, then Llama4 through torchtitan's parallelize_llama.

One process reads both ranks' rows one after the other, so that each quantization sees the same rows as on the ranks.
"""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.models.moe.moe import GroupedExperts

from converters.config import FP8GroupedExpertsConfig
from converters.expert_weight import FP8ExpertWeight
from converters.fp8_grouped_experts import convert
from tests.helpers import distributed, sqnr_db

D, H, ROWS, STEPS = 32, 48, 40, 3
REFERENCE = FP8GroupedExpertsConfig(backend="reference", fsdp_fp8_all_gather="off")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = {
    "no_policy": MixedPrecisionPolicy(),
    "float32": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
    "bfloat16": BF16,
}


class Block(nn.Module):
    """Experts beside a plain parameter, so that FSDP2's group holds both kinds."""

    def __init__(self, E: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(D))
        self.experts = GroupedExperts(D, H, E, use_grouped_mm=True)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.experts(x * self.gain, counts)


def block(E: int, config: FP8GroupedExpertsConfig) -> Block:
    torch.manual_seed(0)
    model = Block(E)
    for p in model.experts.parameters():
        nn.init.normal_(p, std=0.05)
    convert(model, config)
    return model


def batch(step: int, rank: int, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their counts (uneven, the first expert without any on one rank), and an upstream gradient."""
    torch.manual_seed(100 * step + rank)
    counts = torch.bincount(torch.randint(rank if E > 1 else 0, E, (ROWS,)), minlength=E)
    return torch.randn(ROWS, D), counts, torch.randn(ROWS, D)


def one_process_gradients(model: Block, step: int, dtype: torch.dtype | None) -> list[Tensor]:
    """What FSDP2 on two ranks must reduce to: the mean of both ranks' gradients, each computed in `dtype`."""
    params = dict(model.named_parameters())
    for rank in range(2):
        x, counts, upstream = batch(step, rank, model.experts.num_experts)
        cast = {name: p if dtype is None else p.to(dtype) for name, p in params.items()}
        out = functional_call(model, cast, (x if dtype is None else x.to(dtype), counts))
        out.backward(upstream.to(out.dtype) / 2)
    return [p.grad for p in params.values()]


def check_fsdp(E: int, policy: str, config: FP8GroupedExpertsConfig, floor_db: float) -> None:
    """Each step's gradients, and the weights at the end."""
    reference = block(E, replace(config, fsdp_fp8_all_gather="off"))
    sharded = fully_shard(block(E, config), mp_policy=POLICIES[policy])
    dtype = POLICIES[policy].param_dtype
    assert type(sharded.experts.w1._local_tensor) is FP8ExpertWeight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, sharded)]
    for step in range(STEPS):
        x, counts, upstream = batch(step, dist.get_rank(), E)
        out = sharded(x, counts)
        assert out.dtype == (dtype or torch.float32), f"step {step}"
        out.backward(upstream.to(out.dtype))
        wanted = one_process_gradients(reference, step, dtype)
        for (name, p), grad in zip(sharded.named_parameters(), wanted, strict=True):
            assert type(p.grad._local_tensor) is Tensor
            db = sqnr_db(grad, p.grad.full_tensor())
            assert db > floor_db, f"{E} experts, {policy}, {config}: step {step}, {name}: {db:.1f} dB"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    for name, wanted in reference.state_dict().items():
        assert type(whole[name]) is Tensor
        # AdamW divides by the gradient's size: where it is all noise, so is the step.
        assert sqnr_db(wanted, whole[name]) > (40 if floor_db > 40 else 12), f"{E} experts, {policy}, {config}: {name}"


@distributed(2)
def test_case_19_fsdp2_equals_one_process_from_the_first_step_under_every_policy() -> None:
    for policy in POLICIES:
        for recipe in ("tokenwise", "rowwise"):
            check_fsdp(4, policy, replace(REFERENCE, recipe=recipe), floor_db=100)
        # Quantized from the float32 shards: under bfloat16, one process rounds the weights to 8 bits before that.
        check_fsdp(4, policy, replace(REFERENCE, fsdp_fp8_all_gather="on"), 20 if policy == "bfloat16" else 100)


@distributed(2)
def test_case_18_three_experts_or_one_on_two_fsdp_ranks() -> None:
    """The second rank holds one expert or none; FSDP2 asks the hook for padded shards, on that rank only."""
    for E in (3, 1):
        for gather in ("off", "on"):
            check_fsdp(E, "float32", replace(REFERENCE, fsdp_fp8_all_gather=gather), floor_db=100)
        check_fsdp(E, "bfloat16", REFERENCE, floor_db=100)


def check_gloo_without_premul_sum_and_barriers_with_device_ids() -> None:
    """The rows of parallel/device.py that need a second rank: torchtitan switches FSDP2's own division off."""
    model = fully_shard(nn.Linear(8, 8, bias=False))
    model.set_gradient_divide_factor(1.0)
    model(torch.full((1, 8), float(dist.get_rank() + 1))).backward(torch.ones(1, 8))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((8, 8), 3.0))  # 1 + 2, not divided
    dist.barrier(device_ids=[0])


def check_meta_conversion_then_sharding_then_loading_a_whole_state_dict() -> None:
    """torchtitan's order: convert on meta, fully_shard, to_empty, then load; through full and sharded state dicts."""
    source = block(3, REFERENCE)
    with torch.device("meta"):
        model = Block(3)
        convert(model, REFERENCE)
    fully_shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(model, copy.deepcopy(source.state_dict()), options=StateDictOptions(full_state_dict=True))
    assert isinstance(model.experts.w1, DTensor)
    assert type(model.experts.w1._local_tensor) is FP8ExpertWeight
    x, counts, _ = batch(0, 0, 3)
    assert torch.equal(model(x, counts), source(x, counts))
    for name, t in model.state_dict().items():
        assert type(t._local_tensor) is Tensor, name
        assert torch.equal(t.full_tensor(), source.state_dict()[name])


@distributed(2)
def test_gloo_gaps_and_torchtitans_order() -> None:
    check_gloo_without_premul_sum_and_barriers_with_device_ids()
    check_meta_conversion_then_sharding_then_loading_a_whole_state_dict()
