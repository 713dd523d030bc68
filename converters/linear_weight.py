"""FP8LinearWeight: the weight [N, K] of a linear layer, whose products run in FP8.

One expert without the expert dim: storage, FSDP2's hooks and every spelling of a product are those of FP8ExpertWeight.
Only nn.functional.linear has an op of its own here, which takes the parameter itself, so what is quantized from it is
kept (weight_cache.py); views of it (weight.t()) are quantized at each use.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from converters.dense_linear import dense_linear
from converters.expert_weight import FP8ExpertWeight


class FP8LinearWeight(FP8ExpertWeight):
    """`FP8LinearWeight(data, numerics)`; data [N, K] or a view of such a weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.linear and (out := _linear(*args, **(kwargs or {}))) is not None:
            return out
        return super().__torch_function__(func, types, args, kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """None where the weight is not the right operand: FP8ExpertWeight says so."""
    if not isinstance(weight, FP8LinearWeight) or isinstance(input, FP8ExpertWeight):
        return None
    out = dense_linear(input, [weight], weight._context)[0]
    return out if bias is None else out + bias.to(out.dtype)
