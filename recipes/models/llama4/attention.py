"""Llama4's attention as published: some layers without rotation, chunks, a norm of q and k (see args.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama4.model.model import Attention, Transformer, apply_rotary_emb
from torchtitan.protocols.model import AttentionMasksType

from recipes.models.llama4.args import Llama4Args


class ChunkedAttention(ScaledDotProductAttentionWrapper):
    """Causal attention within chunks of `chunk` tokens: chunks go into the batch, so the fused kernels still do it."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

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
        """q [B, heads, S, head_dim], k and v [B, kv heads, S, head_dim] -> [B, heads, S, head_dim].

        Raises:
            ValueError: S is longer than a chunk and no multiple of it.
        """
        B, _, S, _ = q.shape
        if self.chunk >= S:
            return super().forward(q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        if S % self.chunk:
            raise ValueError(f"A sequence of {S} tokens is no multiple of attention_chunk_size = {self.chunk}.")
        n = S // self.chunk
        # [B, heads, S, head_dim] -> [B * n, heads, chunk, head_dim]
        q, k, v = (t.unflatten(2, (n, self.chunk)).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        out = super().forward(q, k, v, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        return out.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)


class PublishedAttention(Attention):
    """Attention of one layer; parameters are torchtitan's."""

    def __init__(self, args: Llama4Args, layer_id: int) -> None:
        super().__init__(args, use_rope=args.rotates(layer_id))
        self.norm_eps = args.norm_eps if args.qk_norm and self.use_rope else None
        tuned = args.attn_temperature_tuning and not self.use_rope
        self.tuning = (args.attn_scale, args.floor_scale) if tuned else None
        if self.use_rope and args.attention_chunk_size is not None:
            self.inner_attention = ChunkedAttention(args.attention_chunk_size)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]; positions [1 or B, S], None: 0 to S - 1."""
        assert attention_masks is None, "sdpa takes no masks"
        B, S, _ = x.shape
        # -1: under tensor parallelism this rank has some of the heads.
        q, k, v = (linear(x).view(B, S, -1, self.head_dim) for linear in (self.wq, self.wk, self.wv))
        if self.use_rope:
            q, k = apply_rotary_emb(q, k, freqs_cis=freqs_cis, positions=positions)
        if self.norm_eps is not None:
            q, k = (F.rms_norm(t.float(), (self.head_dim,), eps=self.norm_eps).type_as(t) for t in (q, k))
        if self.tuning is not None:
            q = (q * self._temperature(positions, S, x.device)).type_as(q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = self.inner_attention(q, k, v, enable_gqa=self.enable_gqa)
        return self.wo(out.transpose(1, 2).contiguous().view(B, S, -1))

    def _temperature(self, positions: Tensor | None, S: int, device: torch.device) -> Tensor:
        """[1 or B, S, 1, 1], 1 for the first floor_scale - 1 tokens (arXiv 2501.19399)."""
        scale, floor = self.tuning
        at = torch.arange(S, device=device)[None] if positions is None else positions
        return (torch.log1p(torch.floor((at.float() + 1) / floor)) * scale + 1)[..., None, None]


class Llama4(Transformer):
    """torchtitan's Llama4; with the attention as published where its arguments ask for that."""

    def __init__(self, model_args: Llama4Args) -> None:
        super().__init__(model_args)
        if isinstance(model_args, Llama4Args) and model_args.as_published:
            for layer_id, block in self.layers.items():
                block.attention = PublishedAttention(model_args, int(layer_id))
