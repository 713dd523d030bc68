"""The load-balancing auxiliary loss of Switch Transformer and Mixtral, computed so that no layout changes it.

For one layer and one sequence of S tokens, with p[s, e] the router's softmax and f[e] the share of the S tokens that
have expert e among their top k (f sums to k and has no gradient):

    loss = E * sum_e f[e] * mean_s p[s, e]              k at perfect balance, E at worst for k = 1

A step's auxiliary loss is coef times its mean over the layers and over the step's sequences. Its gradient

    d loss / d p[s, e] = coef * E * f[e] / (layers * tokens of the step)

needs a token's own sequence and constants, nothing of other sequences, layers or ranks. So it is the same with any
number of micro-batches, pipeline stages, data-parallel or expert-parallel ranks; under context parallelism, where ranks
hold parts of one sequence, f is summed over them. The loss does not travel to the end of the model (a pipeline stage
could not send it): `attach` adds it to the gradient where it arises.

transformers' `load_balancing_loss_func` is the same for one sequence and one layer. For more it multiplies f and p that
are averaged over the whole batch and all layers first, which depends on how a batch is cut and spans pipeline stages.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.models.moe import MoE, MoEArgs


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How a layer's auxiliary loss counts.

    coef: of the whole model's loss. layers: in the whole model. tokens_per_step: of all ranks and micro-batches
    together, the number by which the trainer divides the sum of the main loss; None: those of one call.
    sequence_group: the ranks that hold parts of the same sequences; None: sequences are whole.
    """

    coef: float
    layers: int
    tokens_per_step: int | None = None
    sequence_group: dist.ProcessGroup | None = None


class _Attach(torch.autograd.Function):
    """Identity of x; in backward the loss gets the gradient 1, whatever arrives at x."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.loss_options = {"dtype": inputs[1].dtype, "device": inputs[1].device}

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), **ctx.loss_options)


def attach(x: Tensor, loss: Tensor) -> Tensor:
    """x, with the scalar `loss` added to what its backward computes."""
    return _Attach.apply(x, loss)


def balance_loss(scores: Tensor, chosen: Tensor, balance: Balance) -> Tensor:
    """This call's share of the step's auxiliary loss, a scalar.

    scores [B, S, E]: the router's softmax, float32, with gradient. chosen [B, S, k]: expert ids.
    """
    B, S, E = scores.shape
    with torch.no_grad():
        counts = (chosen.unsqueeze(-1) == torch.arange(E, device=chosen.device)).sum((1, 2))  # [B, E]
        parts = 1
        if balance.sequence_group is not None:
            dist.all_reduce(counts, group=balance.sequence_group)
            parts = balance.sequence_group.size()
        share = counts / (S * parts)
    tokens = balance.tokens_per_step or B * S * parts
    return (share * scores.sum(1)).sum() * (balance.coef * E / (balance.layers * tokens))


class BalancedMoE(MoE):
    """torchtitan's MoE, with the auxiliary loss of its router when `balance` is set."""

    def __init__(self, moe_args: MoEArgs, dim: int, hidden_dim: int, balance: Balance | None) -> None:
        super().__init__(moe_args, dim=dim, hidden_dim=hidden_dim)
        self.balance = balance

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        if self.balance is not None and self.training and torch.is_grad_enabled():
            x = attach(x, self._balance_loss(x, self.balance))
        return super().forward(x)

    def _balance_loss(self, x: Tensor, balance: Balance) -> Tensor:
        # The router keeps its scores to itself, so the gate runs once more: E of some 4096 x 14336 columns.
        scores = torch.softmax(self.router.gate(x).float(), dim=-1)
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        return balance_loss(scores, ranked.topk(self.router.top_k, dim=-1).indices, balance)


def balanced_moes(model: nn.Module) -> list[BalancedMoE]:
    """The model's BalancedMoE modules that have an auxiliary loss."""
    return [m for m in model.modules() if isinstance(m, BalancedMoE) and m.balance is not None]
