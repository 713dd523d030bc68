"""torchtitan's llama4, with a flavor that a laptop trains, attention as published where asked for, and our builders."""

import copy
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from torchtitan.models.llama4 import TransformerModelArgs, get_train_spec, llama4_args
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec

from parallel.loss import build_loss
from parallel.parallelize import parallelize
from parallel.pipeline import pipeline
from recipes.final_evaluation import build_validator
from recipes.loader import build_dataloader
from recipes.models.llama4.adapter import Llama4Adapter
from recipes.models.llama4.attention import Llama4
from recipes.models.llama4.published import PUBLISHED
from recipes.models.tokenizer import checked_tokenizer
from recipes.telemetry_report import build_metrics_processor

# Every GEMM dimension is a multiple of 16, which FP8 needs, and every layer is a mixture of experts, as in 17bx16e.
FLAVORS: Mapping[str, TransformerModelArgs] = MappingProxyType(
    {
        # D = 128, H = 176, E = 8 and a shared expert: 1.9 M parameters, 0.9 M of them active in a token.
        "debug": TransformerModelArgs(
            dim=128,
            n_layers=2,
            n_heads=4,
            vocab_size=2048,
            multiple_of=16,
            rope_theta=500_000,
            interleave_moe_layer_step=1,
            moe_args=MoEArgs(num_experts=8),
        ),
        # D = 768, H = 1280, 16 experts and a shared one: 313 M parameters, 48 M of them active in a token.
        "300m": TransformerModelArgs(
            dim=768,
            n_layers=6,
            n_heads=12,
            n_kv_heads=4,
            vocab_size=2048,
            multiple_of=128,
            ffn_dim_multiplier=1.25,
            rope_theta=500_000,
            interleave_moe_layer_step=1,
            moe_args=MoEArgs(num_experts=16),
        ),
        # Scout's width, to measure a step with: its 48 layers need a cluster.
        "scout_2layers": dataclasses.replace(llama4_args["17bx16e"], n_layers=2, vocab_size=32768),
        "scout_3layers": dataclasses.replace(llama4_args["17bx16e"], n_layers=3, vocab_size=32768),
    }
)


def train_spec() -> TrainSpec:
    """torchtitan's spec with its flavors and ours; a copy, because a run writes into the arguments of its flavor."""
    spec = get_train_spec()
    flavors = copy.deepcopy({**spec.model_args, **PUBLISHED, **FLAVORS})
    return dataclasses.replace(
        spec,
        model_cls=Llama4,
        model_args=flavors,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=checked_tokenizer(flavors),
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=Llama4Adapter,
    )
