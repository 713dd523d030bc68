"""A small module with three wrapped weights and a plain parameter."""

import torch
from torch import nn

from converters.config import Numerics
from converters.expert_weight import FP8ExpertWeight
from parallel.checkpoint import wrap_parameters
from tests.helpers import make_experts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = make_experts((3, 5), 16, 32)
        self.w1, self.w2, self.w3 = (nn.Parameter(w) for w in (experts.w1, experts.w2, experts.w3))
        self.bias = nn.Parameter(torch.randn(16))

    def wrap(self) -> "Experts":
        wrap_parameters(self, lambda data: FP8ExpertWeight(data, Numerics()), ["w1", "w2", "w3"])
        return self
