"""Mixtral on torchtitan's parts: its MoE, its Qwen3 attention without the q and k norms, its attention wrappers.

Weights are in the layout of transformers (rotate-half RoPE), so a checkpoint needs no permutation. Attributes have the
names that torchtitan's llama4 plans for TP, EP, FSDP, CP and its pipeline split look for.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import and_masks
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import (
    ScaledDotProductAttentionWrapper,
    create_attention_mask,
    get_causal_mask_mod,
    get_document_mask_mod,
    get_sliding_window_mask_mod,
)
from torchtitan.models.qwen3.model.model import Attention as Qwen3Attention
from torchtitan.models.qwen3.model.model import precompute_rope_cache
from torchtitan.models.utils import trunc_normal_
from torchtitan.protocols.model import AttentionMasksType, ModelProtocol

from recipes.models.mixtral.args import MixtralModelArgs
from recipes.models.mixtral.balance import Balance, BalancedMoE

# As torchtitan initializes Llama4 and Qwen3: output head with std dim**-0.5, cut at 3 std.
HEAD_CUTOFF = 3


class SlidingWindowAttention(ScaledDotProductAttentionWrapper):
    """Causal attention to the last `window` tokens, with an explicit mask: no fused kernel of sdpa knows a window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        """q [B, heads, S, head_dim], k and v [B, kv heads, S, head_dim] -> [B, heads, S, head_dim]."""
        assert is_causal
        S = q.shape[2]
        if self.window >= S:
            return super().forward(q, k, v, scale=scale, enable_gqa=enable_gqa)
        rows = torch.arange(S, device=q.device)
        distance = rows[:, None] - rows
        mask = (distance >= 0) & (distance < self.window)
        if enable_gqa:  # the memory-efficient kernel takes a mask but no groups
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


class Attention(Qwen3Attention):
    """Grouped-query attention with rotate-half RoPE."""

    def __init__(self, args: MixtralModelArgs) -> None:
        super().__init__(args)
        if args.attn_type == "sdpa" and args.sliding_window is not None:
            self.inner_attention = SlidingWindowAttention(args.sliding_window)


class MixtralBlock(nn.Module):
    """Attention and a mixture of experts, each after an RMSNorm and beside a residual."""

    moe_enabled = True

    def __init__(self, layer_id: int, args: MixtralModelArgs) -> None:
        super().__init__()
        coef = args.router_aux_loss_coef
        balance = Balance(coef=coef, layers=args.n_layers) if coef else None
        self.attention = Attention(args)
        self.moe = BalancedMoE(args.moe_args, dim=args.dim, hidden_dim=args.hidden_dim, balance=balance)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.weight_init_std = 0.02 / (2 * (layer_id + 1 if args.depth_init else args.n_layers)) ** 0.5

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D].

        freqs_cis [max_seq_len, 2 * head_dim]: cos and sin, under the name torchtitan's validator knows; positions
        [1 or B, S], None: 0 to S - 1.
        """
        x = x + self.attention(self.attention_norm(x), freqs_cis, attention_masks, positions)
        return x + self.moe(self.ffn_norm(x))

    def init_weights(self, buffer_device: torch.device) -> None:
        """Initializes in place; buffers are made on `buffer_device`."""
        self.attention_norm.reset_parameters()
        self.ffn_norm.reset_parameters()
        self.attention.init_weights(self.weight_init_std)
        self.moe.init_weights(self.weight_init_std, buffer_device)


class Mixtral(ModelProtocol):
    """The whole model, or the part that a pipeline stage keeps: missing modules are None, missing layers absent."""

    def __init__(self, model_args: MixtralModelArgs) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        self.vocab_size = model_args.vocab_size
        self.n_layers = model_args.n_layers
        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.register_buffer("freqs_cis", self._rope_cache(), persistent=False)
        self.layers = nn.ModuleDict({str(i): MixtralBlock(i, model_args) for i in range(model_args.n_layers)})
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.output = nn.Linear(model_args.dim, model_args.vocab_size, bias=False)

    def _rope_cache(self) -> Tensor:
        args = self.model_args
        return precompute_rope_cache(args.head_dim, args.max_seq_len, args.rope_theta)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initializes in place, as torchtitan initializes Llama4 and Qwen3."""
        buffer_device = buffer_device or self.freqs_cis.device
        with torch.device(buffer_device):
            self.freqs_cis = self._rope_cache()
        if self.tok_embeddings is not None:
            nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            cast(MixtralBlock, layer).init_weights(buffer_device)
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.output is not None:
            std = self.model_args.dim**-0.5
            trunc_normal_(self.output.weight, mean=0.0, std=std, a=-HEAD_CUTOFF * std, b=HEAD_CUTOFF * std)

    def get_attention_masks(
        self, input_batch: Tensor, tokenizer: BaseTokenizer, extra_inputs: dict[str, Tensor] | None = None
    ) -> AttentionMasksType:
        """The flex-attention mask of token ids [B, S]; sdpa takes none and is never asked by the trainer."""
        args, S = self.model_args, input_batch.shape[1]
        mods = [get_causal_mask_mod()]
        if args.sliding_window is not None:
            mods.append(get_sliding_window_mask_mod(args.sliding_window))
        by_document = args.attn_mask_type == "block_causal"
        if by_document:
            mods.append(get_document_mask_mod(input_batch, tokenizer.eos_id))
        return create_attention_mask(and_masks(*mods), input_batch.shape[0] if by_document else 1, None, S, S)

    def forward(
        self, tokens: Tensor, attention_masks: AttentionMasksType | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, S] (or hidden states [B, S, D] of the stage before) -> logits [B, S, V] (or hidden states)."""
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis, attention_masks, positions)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h
