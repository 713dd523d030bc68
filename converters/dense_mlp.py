"""A dense SwiGLU MLP in FP8, as one differentiable op: a shared expert, or the feed-forward of a dense layer.

The op of expert_mlp.py with one group of all rows. The weights are parameters [H, D] and [D, H] of linear layers.
"""

from torch import Tensor

from converters.expert_mlp import mlp_of_rows
from converters.numerics import Numerics
from converters.operands import check_operands


def dense_mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, numerics: Numerics) -> Tensor:
    """(silu(x @ w1^T) * (x @ w3^T)) @ w2^T, in FP8.

    Args:
        x: [..., D], any float dtype but FP8; T = 0 rows work.
        w1, w3: [H, D]; w2: [D, H]; plain or wrapped, float32 or bfloat16. For the hopper backend H and D are multiples
            of 16.
        numerics: scale rule, backend, precision of the weight gradient.

    Returns:
        [..., D] in x's dtype, or autocast's. Weight gradients have the weights' dtype.

    Raises:
        ValueError: shapes that do not belong together, or operands that the backend cannot read (operands.py).
    """
    D, (s1, s2, s3) = x.shape[-1], (w.shape for w in (w1, w2, w3))
    if len(s1) != 2 or s1[1] != D or s3 != s1 or s2 != s1[::-1]:
        shapes = ", ".join(str(tuple(shape)) for shape in (x.shape, s1, s3, s2))
        raise ValueError(f"dense_mlp takes x [..., D], w1 and w3 [H, D] and w2 [D, H]; got {shapes}.")
    check_operands(x, (w1, w2, w3), numerics)
    rows = x.reshape(x.shape[:-1].numel(), D).contiguous()
    return mlp_of_rows(rows, w1, w2, w3, None, numerics).view(x.shape)
