"""Llama4's text model in Hugging Face's checkpoints. Their experts are [E, D, 2H] and [E, H, D]; ours are transposed.

Of torchtitan 0.2.2's Llama4StateDictAdapter, the names, the transposes and the order of gate and up are right. Not so:

- `feed_forward.{gate,up,down}_proj`, the dense layers of Maverick, are unknown to it: never exported, and after a load
  they keep their random values, without a word.
- names start with `language_model.` or are ignored; transformers' Llama4ForCausalLM saves them without.
- w2 is exported as a transposed view, which safetensors refuses to write ("non contiguous tensor").
- a tensor or weight that it does not know is dropped silently, either way.
- where FSDP shards the hidden dim of the experts, the concatenation gathers it on every rank.
- nothing compares the checkpoint's config.json with the flavor: Scout's weights load into a model without its norm of q
  and k (see args.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torchtitan.models.llama4 import TransformerModelArgs
from torchtitan.models.llama4.model.model import TransformerBlock
from torchtitan.protocols import BaseModelArgs

from recipes.models.hf.adapter import HFAdapter, layers
from recipes.models.hf.reader import INDEX, Region, whole
from recipes.models.hf.rules import GateUp, Rule, Same, Transposed
from recipes.models.llama4.args import Llama4Args

_MULTIMODAL = "language_model."
_LAYER = [
    ("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
]
_MLP = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))


class Llama4Adapter(HFAdapter):
    """For Llama4ForCausalLM and the text model of Llama4ForConditionalGeneration.

    Exported names are those of the checkpoint in the assets folder, and multimodal (`language_model.`) without one.
    """

    model_args: TransformerModelArgs
    ignored = r".*\.rotary_emb\.inv_freq|vision_model\..*|multi_modal_projector\..*"

    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None) -> None:
        self.prefix = _prefix(Path(hf_assets_path)) if hf_assets_path else _MULTIMODAL
        super().__init__(model_args, hf_assets_path)

    def make_rules(self) -> Sequence[Rule]:
        """The layout of the names that are exported; sets `other_rules` to those of the other prefix."""
        self.other_rules = self._rules("" if self.prefix else _MULTIMODAL)
        return self._rules(self.prefix)

    def _rules(self, prefix: str) -> list[Rule]:
        args = self.model_args
        pairs = [("tok_embeddings.weight", "model.embed_tokens.weight"), *layers(_LAYER, args.n_layers)]
        pairs += [("norm.weight", "model.norm.weight"), ("output.weight", "lm_head.weight")]
        rules: list[Rule] = [Same(native, prefix + key) for native, key in pairs]
        for i in range(args.n_layers):
            theirs = f"{prefix}model.layers.{i}.feed_forward."
            if (i + 1) % args.interleave_moe_layer_step:
                rules += [Same(f"layers.{i}.feed_forward.{w}.weight", f"{theirs}{p}.weight") for w, p in _MLP]
                continue
            ours = f"layers.{i}.moe."
            rules += [
                Same(f"{ours}router.gate.weight", f"{theirs}router.weight"),
                GateUp(f"{ours}experts.w1", f"{ours}experts.w3", f"{theirs}experts.gate_up_proj", is_transposed=True),
                Transposed(f"{ours}experts.w2", f"{theirs}experts.down_proj"),
                *(Same(f"{ours}shared_experts.{w}.weight", f"{theirs}shared_expert.{p}.weight") for w, p in _MLP),
            ]
        return rules

    def regions(self, key: str, shape: tuple[int, ...]) -> list[Region]:
        """The tensor under the prefix that we export."""
        if re.fullmatch(self.ignored, key):
            return []
        return [whole(self.prefix + key.removeprefix(_MULTIMODAL), shape)]

    def config(self) -> dict[str, Any]:
        """For transformers' Llama4ForCausalLM, which reads either prefix."""
        args = self.model_args
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
        if (scaling := args.rope_scaling_args) is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.scaling_factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        return {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            **self._sizes(),
            **self._attention(),
            "hidden_act": "silu",
            "max_position_embeddings": args.max_seq_len,
            "rope_theta": args.rope_theta,
            "rope_parameters": rope,
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaling is not None else None,
            "tie_word_embeddings": False,
        }

    def _sizes(self) -> dict[str, Any]:
        args, (H, dense) = self.model_args, hidden_sizes(self.model_args)
        return {
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": H,
            **({"intermediate_size_mlp": dense} if dense else {}),
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads or args.n_heads,
            "head_dim": args.dim // args.n_heads,
            "num_local_experts": args.moe_args.num_experts,
            "num_experts_per_tok": args.moe_args.top_k,
            "interleave_moe_layer_step": args.interleave_moe_layer_step,
            "rms_norm_eps": args.norm_eps,
        }

    def _attention(self) -> dict[str, Any]:
        args = self.model_args
        ours = args if isinstance(args, Llama4Args) else Llama4Args()
        return {
            "use_qk_norm": ours.qk_norm,
            "no_rope_layers": [int(ours.rotates(i)) for i in range(args.n_layers)],
            "attention_chunk_size": ours.attention_chunk_size,
            "attn_temperature_tuning": ours.attn_temperature_tuning,
            "floor_scale": ours.floor_scale,
            "attn_scale": ours.attn_scale,
        }

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Sizes, rotation, norm of q and k, chunks that matter at this run's sequence length."""
        theirs, ours = dict(config.get("text_config") or config), self.config()
        every = theirs.get("no_rope_layer_interval", 4)
        layers_of = [int((i + 1) % every != 0) for i in range(self.model_args.n_layers)]
        theirs["no_rope_layers"] = theirs.get("no_rope_layers") or layers_of
        theirs["attn_temperature_tuning"] = bool(theirs.get("attn_temperature_tuning", True))
        names = [*self._sizes(), "use_qk_norm", "no_rope_layers"]
        if self.model_args.max_seq_len > (theirs.get("attention_chunk_size") or self.model_args.max_seq_len):
            names.append("attention_chunk_size")
        if self.model_args.max_seq_len >= theirs.get("floor_scale", 8192) and 0 in theirs["no_rope_layers"]:
            names.append("attn_temperature_tuning")
        problems = [f"{n} is {theirs[n]}, here {ours[n]}" for n in names if n in theirs and theirs[n] != ours[n]]
        if (rope := _rope(theirs)) != (here := _rope(ours)):
            problems.append(f"its rotation is {rope}, here {here}")
        return problems


def hidden_sizes(args: TransformerModelArgs) -> tuple[int, int | None]:
    """Hidden dims of an expert and of a dense layer (None where all layers are mixtures), as torchtitan rounds them."""
    step = args.interleave_moe_layer_step
    with torch.device("meta"):
        H = TransformerBlock(step - 1, args).moe.experts.w1.shape[1]
        dense = TransformerBlock(0, args).feed_forward.w1.out_features if step > 1 else None
    return H, dense


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotation that a config describes, in the names of transformers 5."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 5e5))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return {k: float(v) if isinstance(v, (int, float)) else v for k, v in sorted(rope.items())}


def _prefix(folder: Path) -> str:
    """The prefix of the text model's names in a folder's checkpoint, multimodal where there is none."""
    if (folder / INDEX).exists():
        keys = json.loads((folder / INDEX).read_text())["weight_map"]
    elif (folder / "model.safetensors").exists():
        with safe_open(folder / "model.safetensors", framework="pt") as f:
            keys = list(f.keys())
    else:
        return _MULTIMODAL
    return _MULTIMODAL if any(key.startswith(_MULTIMODAL) for key in keys) else ""
