"""Small torchtitan models, on the meta device as a converter sees them."""

import torch
from torch import Tensor, nn
from torchtitan.models.llama4 import Transformer, TransformerModelArgs
from torchtitan.models.moe import MoEArgs

from converters.expert_weight import FP8ExpertWeight
from tests.helpers import DEVICE

EXPERTS = ("w1", "w2", "w3")


def llama4(*, device: str = "meta", n_layers: int = 4, moe_every: int = 1, dim: int = 64, **moe: object) -> Transformer:
    """Llama4 with an expert hidden size of 96 (dim 64); `moe_every` 2 makes every second layer dense."""
    args = TransformerModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=128,
        multiple_of=16,
        ffn_dim_multiplier=1.5,
        max_seq_len=64,
        interleave_moe_layer_step=moe_every,
        moe_args=MoEArgs(**{"num_experts": 4, "top_k": 2, **moe}),
    )
    with torch.device(device):
        return Transformer(args)


def materialized(model: Transformer) -> Transformer:
    """`model` on DEVICE with initial weights, as torchtitan's Trainer does it."""
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(DEVICE))
    return model


def in_fp8(model: nn.Module) -> set[str]:
    """Names of the wrapped parameters."""
    return {name for name, p in model.named_parameters() if isinstance(p, FP8ExpertWeight)}


def expert_names(*layers: int, of: str = "layers.{}.moe.experts") -> set[str]:
    return {f"{of.format(layer)}.{w}" for layer in layers for w in EXPERTS}


class MixtralExperts(nn.Module):
    """Another project's experts: stacked weights under other names, a loop over the experts, x @ w.t()."""

    def __init__(self, E: int = 4, D: int = 32, H: int = 48) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) * 0.02)
        self.down = nn.Parameter(torch.randn(E, D, H) * 0.02)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        out = []
        for e, rows in enumerate(x.split(sizes)):
            gate, up = (rows @ self.gate_up[e].t()).chunk(2, dim=-1)
            out.append(nn.functional.silu(gate) * up @ self.down[e].t())
        return torch.cat(out)
