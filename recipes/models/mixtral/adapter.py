"""Mixtral in Hugging Face's checkpoints: the hub's layout and the one that transformers 5 has in memory.

hub      block_sparse_moe.experts.N.{w1,w2,w3}.weight and block_sparse_moe.gate.weight; what we export
fused    mlp.experts.gate_up_proj [E, 2H, D], mlp.experts.down_proj [E, D, H] and mlp.gate.weight; read as well
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.models.hf.adapter import HFAdapter, layers
from recipes.models.hf.reader import Region, whole
from recipes.models.hf.rules import ExpertList, GateUp, Rule, Same
from recipes.models.mixtral.args import MixtralModelArgs

_MODEL = [("tok_embeddings.weight", "model.embed_tokens.weight"), ("norm.weight", "model.norm.weight")]
_HEAD = ("output.weight", "lm_head.weight")
_LAYER = [
    ("layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
]
_GATE = "layers.{}.moe.router.gate.weight"
_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.(gate\.weight|experts\.gate_up_proj|experts\.down_proj)")


class MixtralAdapter(HFAdapter):
    """For MixtralForCausalLM. The rotation of q and k is the same in both, so no weight is permuted."""

    model_args: MixtralModelArgs

    def make_rules(self) -> Sequence[Rule]:
        """The hub's layout; sets `other_rules` to what the fused one has differently."""
        args, experts = self.model_args, self.model_args.moe_args.num_experts
        shared = [*_MODEL, *layers(_LAYER, args.n_layers), _HEAD]
        hub: list[Rule] = [Same(*pair) for pair in shared]
        fused: list[Rule] = []
        for i in range(args.n_layers):
            ours, theirs = f"layers.{i}.moe.experts.", f"model.layers.{i}."
            hub.append(Same(_GATE.format(i), f"{theirs}block_sparse_moe.gate.weight"))
            for w in ("w1", "w2", "w3"):
                hub.append(ExpertList(ours + w, f"{theirs}block_sparse_moe.experts.{{}}.{w}.weight", experts))
            fused += [
                Same(_GATE.format(i), f"{theirs}mlp.gate.weight"),
                GateUp(f"{ours}w1", f"{ours}w3", f"{theirs}mlp.experts.gate_up_proj", is_transposed=False),
                Same(f"{ours}w2", f"{theirs}mlp.experts.down_proj"),
            ]
        self.other_rules = fused
        return hub

    def layout(self, name: str) -> list[Rule]:
        """ "hub" or "fused"."""
        if name != "fused":
            return super().layout(name)
        replaced = {native for rule in self.other_rules for native in rule.natives}
        return [rule for rule in self.rules if rule.natives[0] not in replaced] + list(self.other_rules)

    def regions(self, key: str, shape: tuple[int, ...]) -> list[Region]:
        """The hub's tensors in a stored one: itself, or slices of a fused one."""
        found = _FUSED.fullmatch(key)
        if found is None:
            return [whole(key, shape)]
        base, what = found[1] + "block_sparse_moe.", found[2]
        if what == "gate.weight":
            return [whole(base + what, shape)]
        experts = range(self.model_args.moe_args.num_experts)
        if what == "experts.down_proj":
            return [Region(f"{base}experts.{e}.w2.weight", (e, 0, 0), (1, *shape[1:]), True) for e in experts]
        half = shape[1] // 2
        return [
            Region(f"{base}experts.{e}.{w}.weight", (e, start, 0), (1, half, shape[2]), True)
            for e in experts
            for w, start in (("w1", 0), ("w3", half))
        ]

    def config(self) -> dict[str, Any]:
        """For MixtralForCausalLM of transformers 4 (rope_theta) and 5 (rope_parameters)."""
        args = self.model_args
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **self._sizes(),
            "hidden_act": "silu",
            "max_position_embeddings": args.max_seq_len,
            "rope_theta": args.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
            "router_aux_loss_coef": args.router_aux_loss_coef,
            "sliding_window": args.sliding_window,
            "tie_word_embeddings": False,
        }

    def _sizes(self) -> dict[str, Any]:
        args = self.model_args
        return {
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": args.hidden_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads,
            "head_dim": args.head_dim,
            "num_local_experts": args.moe_args.num_experts,
            "num_experts_per_tok": args.moe_args.top_k,
            "rms_norm_eps": args.norm_eps,
        }

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Sizes that differ, another rotation, tied embeddings, a window that this flavor does not have."""
        args = self.model_args
        theirs = {k: v for k, v in config.items() if v is not None}
        problems = [
            f"{name} is {theirs[name]}, here {ours}"
            for name, ours in self._sizes().items()
            if name in theirs and theirs[name] != ours
        ]
        rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        theta = rope.get("rope_theta", theirs.get("rope_theta", args.rope_theta))
        if theta != args.rope_theta or rope.get("rope_type", "default") != "default":
            problems.append(f"its rotation is {rope or theta}, here theta {args.rope_theta}")
        windows = (theirs.get("sliding_window"), args.sliding_window)
        # A window that no sequence of this run outgrows makes no difference.
        if len({min(w or args.max_seq_len, args.max_seq_len) for w in windows}) > 1:
            problems.append(f"sliding_window is {windows[0]}, here {windows[1]}")
        if theirs.get("model_type", "mixtral") != "mixtral" or theirs.get("tie_word_embeddings"):
            problems.append("it is no Mixtral with an output head of its own")
        return problems
