"""Scout and Maverick as Meta published them (config.json of meta-llama/Llama-4-{Scout-17B-16E,Maverick-17B-128E}).

torchtitan's 17bx16e and 17bx128e have the same sizes and other attention (args.py): they train, but do not read these
weights.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torchtitan.models.llama4.model.args import RoPEScalingArgs
from torchtitan.models.moe import MoEArgs

from recipes.models.llama4.args import Llama4Args

# torchtitan rounds 1.2 * 2/3 * 4 * dim to experts of 8192 (beside a shared one) and dense layers of 16384.
_SHARED = {
    "dim": 5120,
    "n_layers": 48,
    "n_heads": 40,
    "n_kv_heads": 8,
    "vocab_size": 202048,
    "ffn_dim_multiplier": 1.2,
    "multiple_of": 2048,
    "rope_theta": 500_000,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
}

PUBLISHED: Mapping[str, Llama4Args] = MappingProxyType(
    {
        "scout": Llama4Args(
            **_SHARED,
            max_seq_len=10_485_760,
            interleave_moe_layer_step=1,
            rope_scaling_args=RoPEScalingArgs(),
            qk_norm=True,
            moe_args=MoEArgs(num_experts=16),
        ),
        "maverick": Llama4Args(
            **_SHARED,
            max_seq_len=1_048_576,
            interleave_moe_layer_step=2,
            moe_args=MoEArgs(num_experts=128),
        ),
    }
)
