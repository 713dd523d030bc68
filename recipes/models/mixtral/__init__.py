"""Mixtral, which torchtitan does not have: its train spec with the published sizes and one that a laptop trains."""

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec

from parallel.loss import build_loss, tokens_per_step
from parallel.parallelize import parallelize as parallelize_moe
from parallel.parallelize import partial_gradient
from parallel.pipeline import pipeline
from recipes.final_evaluation import build_validator
from recipes.loader import build_dataloader
from recipes.models.mixtral.adapter import MixtralAdapter
from recipes.models.mixtral.args import MixtralModelArgs, mixtral_moe
from recipes.models.mixtral.balance import balanced_moes
from recipes.models.mixtral.model import Mixtral
from recipes.models.tokenizer import checked_tokenizer
from recipes.telemetry_report import build_metrics_processor

# 1.7 M parameters, 0.9 M of them active in a token; every GEMM dimension is a multiple of 16, which FP8 needs.
_DEBUG = MixtralModelArgs(
    dim=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    hidden_dim=176,
    vocab_size=2048,
    max_seq_len=2048,
    router_aux_loss_coef=0.02,
)

_8X22B = MixtralModelArgs(
    dim=6144,
    n_layers=56,
    n_heads=48,
    hidden_dim=16384,
    max_seq_len=65536,
    router_aux_loss_coef=0.001,
)

FLAVORS: Mapping[str, MixtralModelArgs] = {
    "debug": _DEBUG,
    # The debug model balanced by torchtitan's bias method in place of the auxiliary loss.
    "debug_bias": replace(_DEBUG, router_aux_loss_coef=0.0, moe_args=mixtral_moe(load_balance_coeff=1e-3)),
    # 310 M parameters, 87 M of them active in a token.
    "300m": replace(_DEBUG, dim=768, n_layers=6, n_heads=12, n_kv_heads=4, head_dim=64, hidden_dim=2688),
    "8x7b": MixtralModelArgs(router_aux_loss_coef=0.02),
    # 8x7B's width, to measure a step with: its 32 layers need a host of eight.
    "8x7b_2layers": MixtralModelArgs(n_layers=2, router_aux_loss_coef=0.02),
    "8x22b": _8X22B,
    # The instruct model has 768 tokens more.
    "8x22b_instruct": replace(_8X22B, vocab_size=32768),
}


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """The plan for Llama4, whose module names Mixtral shares; tells the auxiliary loss the size of a step.

    Under tensor parallelism a rank's experts give partial sums, which Mixtral multiplies by the router's scores. So a
    rank has a part of the scores' gradient, and torchtitan takes it for the whole: each rank's router goes its own way.
    It is summed here; where expert parallelism borrows the ranks, `parallelize_moe` has done so.
    """
    group = parallel_dims.get_mesh("cp").get_group() if parallel_dims.cp_enabled else None
    tokens = tokens_per_step(job_config, parallel_dims)
    for moe in balanced_moes(model):
        moe.balance = replace(moe.balance, tokens_per_step=tokens, sequence_group=group)
    model = parallelize_moe(model, parallel_dims, job_config)
    if parallel_dims.tp_enabled and not (parallel_dims.ep_enabled and not parallel_dims.etp_enabled):
        mesh = parallel_dims.get_mesh("tp")
        for block in model.layers.values():
            block.moe.router.register_forward_hook(lambda _, args, out: (partial_gradient(out[0], mesh), *out[1:]))
    return model


def train_spec() -> TrainSpec:
    """A spec of its own flavors, since a run writes into the arguments of its flavor."""
    flavors = copy.deepcopy(FLAVORS)
    return TrainSpec(
        model_cls=Mixtral,
        model_args=flavors,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        build_optimizers_fn=build_optimizers_with_moe_load_balancing,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=checked_tokenizer(flavors),
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=MixtralAdapter,
    )
