"""What the published Llama4 models do in attention and torchtitan 0.2.2 leaves out.

torchtitan's flavors rotate in every layer and have no norm of q and k. Its `_irope` flavors skip the rotation in layers
0, 4, 8 where the published models skip it in 3, 7, 11, and hand a dict of masks to flex attention, which takes one. So
the published weights compute something else there, without an error. The fields below, off by default, are those of
transformers' Llama4TextConfig.
"""

from dataclasses import dataclass

from torchtitan.config import JobConfig
from torchtitan.models.llama4 import TransformerModelArgs


@dataclass
class Llama4Args(TransformerModelArgs):
    """torchtitan's arguments, and attention as published. max_seq_len is set by the run."""

    qk_norm: bool = False  # L2 norm of q and k without weights, after the rotation
    no_rope_layer_interval: int | None = None  # each such layer: no rotation, attention to everything before
    attention_chunk_size: int | None = None  # rotated layers attend within chunks of this many tokens
    attn_temperature_tuning: bool = False  # q of the layers without rotation grows with the logarithm of its position
    floor_scale: int = 8192
    attn_scale: float = 0.1

    @property
    def as_published(self) -> bool:
        """Whether any of it is on."""
        return bool(self.qk_norm or self.no_rope_layer_interval or self.attention_chunk_size)

    def rotates(self, layer_id: int) -> bool:
        """Whether a layer rotates q and k."""
        interval = self.no_rope_layer_interval
        return interval is None or (layer_id + 1) % interval != 0

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """As torchtitan's.

        Raises:
            ValueError: sequences longer than a chunk that are no multiple of it, or cut by context parallelism.
        """
        super().update_from_config(job_config, **kwargs)
        chunk, cp = self.attention_chunk_size, job_config.parallelism.context_parallel_degree
        if self.as_published and self.attn_type != "sdpa":
            raise ValueError(f"attn_type = {self.attn_type!r}: attention as published is written for 'sdpa'.")
        if chunk is None or self.max_seq_len <= chunk:
            return
        if cp > 1 or self.max_seq_len % chunk:
            raise ValueError(
                f"training.seq_len = {self.max_seq_len} is longer than attention_chunk_size = {chunk}: it must be a "
                f"multiple of it, and parallelism.context_parallel_degree = {cp} must be 1 (rings have no chunks)."
            )
