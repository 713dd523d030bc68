"""Tiny Mixtrals and Llama4s, in float32."""

from typing import Any

from torchtitan.models.llama4.model.args import RoPEScalingArgs
from torchtitan.models.moe import MoEArgs

from recipes.models.llama4.args import Llama4Args
from recipes.models.mixtral.args import MixtralModelArgs, mixtral_moe

EXPERTS = 12  # more than 10: expert 10 sorts before expert 2 by name
PUBLISHED = {
    "qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "rope_scaling_args": RoPEScalingArgs(scaling_factor=16.0, original_max_position_embeddings=32),
}


def mixtral_args(**changes: Any) -> MixtralModelArgs:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 48, "vocab_size": 64}
    moe = mixtral_moe(EXPERTS)
    moe.use_grouped_mm = False  # one matmul an expert in float32: the grouped GEMM is bfloat16
    return MixtralModelArgs(**sizes | {"max_seq_len": 64, "moe_args": moe} | changes)


def llama4_args(**changes: Any) -> Llama4Args:
    sizes = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "multiple_of": 16}
    moe = MoEArgs(num_experts=EXPERTS, use_grouped_mm=False)
    return Llama4Args(**sizes | {"max_seq_len": 64, "interleave_moe_layer_step": 2, "moe_args": moe} | changes)
