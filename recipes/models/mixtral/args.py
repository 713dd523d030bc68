"""Sizes and options of a Mixtral, and the checks that need the job config."""

import logging
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.moe import MoEArgs
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools import utils

logger = logging.getLogger(__name__)


def mixtral_moe(num_experts: int = 8, top_k: int = 2, load_balance_coeff: float | None = None) -> MoEArgs:
    """Mixtral's routing: softmax over all experts, the top ones renormalized, scores applied to the experts' outputs.

    load_balance_coeff switches torchtitan's bias method on (an expert's bias moves by it each step).
    """
    return MoEArgs(
        num_experts=num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=top_k,
        load_balance_coeff=load_balance_coeff,
    )


@dataclass
class MixtralModelArgs(BaseModelArgs):
    """Defaults are Mixtral 8x7B v0.1."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 14336  # of one expert
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_seq_len: int = 32768
    # A token attends to itself and the sliding_window - 1 tokens before it. None: to all before it.
    sliding_window: int | None = None
    attn_type: Literal["sdpa", "flex"] = "sdpa"
    attn_mask_type: Literal["causal", "block_causal"] = "causal"
    depth_init: bool = True
    # Coefficient of the load-balancing auxiliary loss (balance.py), 0: none. The name is that of transformers' config.
    router_aux_loss_coef: float = 0.0
    moe_args: MoEArgs = field(default_factory=mixtral_moe)

    qk_norm: ClassVar[bool] = False  # read by torchtitan's Qwen3 attention

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """Takes the sequence length, and refuses what this model cannot do.

        Raises:
            ValueError: block_causal without flex attention, DeepEP, or context parallelism with flex or a window.
        """
        training, validation = job_config.training, job_config.validation
        seq_len = max(training.seq_len, validation.seq_len if validation.enable else 0)
        if seq_len > self.max_seq_len:
            logger.warning(f"Sequence length {seq_len} exceeds the {self.max_seq_len} that this model was made for.")
        self.max_seq_len = seq_len
        self._check(job_config)
        if self.moe_args.use_grouped_mm and not utils.has_cuda_capability(9, 0):
            logger.warning("No grouped GEMM below SM 9.0: the experts run one after another.")
            self.moe_args.use_grouped_mm = False
        self.moe_args._debug_force_load_balance = job_config.debug.moe_force_load_balance

    def _check(self, job_config: JobConfig) -> None:
        if self.attn_type not in ("sdpa", "flex"):
            raise ValueError(f"attn_type = {self.attn_type!r}: Mixtral has 'sdpa' and 'flex'.")
        if self.attn_mask_type == "block_causal" and self.attn_type != "flex":
            raise ValueError(
                "attn_mask_type = 'block_causal' masks by documents, which only flex attention can: "
                "set attn_type = 'flex'."
            )
        if job_config.parallelism.expert_parallel_comm_backend == "deepep":
            raise ValueError(
                "parallelism.expert_parallel_comm_backend = 'deepep' needs torchtitan's DeepEPMoE, and Mixtral is "
                "built on its MoE: use 'standard'."
            )
        if job_config.parallelism.context_parallel_degree > 1 and (self.attn_type != "sdpa" or self.has_window):
            raise ValueError(
                f"parallelism.context_parallel_degree = {job_config.parallelism.context_parallel_degree}: ring "
                f"attention knows only the causal mask, and this model has attn_type = {self.attn_type!r} and "
                f"sliding_window = {self.sliding_window}. Use sdpa and no window, or set the degree to 1."
            )

    @property
    def has_window(self) -> bool:
        """Whether the window is shorter than the sequences, so that it makes a difference."""
        return self.sliding_window is not None and self.sliding_window < self.max_seq_len

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """All parameters, and the FLOPs of a training step a token (forward and backward, active parameters only)."""
        attended = min(seq_len, self.sliding_window or seq_len)
        return get_moe_model_nparams_and_flops(self, model, 2 * self.head_dim, attended)
