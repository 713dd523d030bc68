"""Scale rules with kernels or a reference: where the scales of weights and of the weight gradient's operands come from.

                 x, dY            weights                           weight gradient
    tokenwise    one a token      one an expert                     re-scaled from the row-scaled FP8 x and dY
    rowwise      one a token      one a row of each contraction     quantized from high precision, one an expert and
    column

With powers of two, re-scaling is exact but for new subnormals, so tokenwise needs no second copy of an activation.
"""

from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.config import Numerics
from parallel.wrapped_weight import WrappedWeight

Rows = tuple[
    Tensor, Tensor, Tensor | None
]  # q [M, D], scale [M], and the high-precision tensor [M, D] where it is needed


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of GEMM outputs: autocast's if it is on, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def op_key(numerics: Numerics, *weights: Tensor) -> str:
    """`numerics` for a custom op on these weights: temporary if one of them is."""
    temporary = any(isinstance(w, WrappedWeight) and w._context.temporary for w in weights)
    return numerics.temporary_key if temporary else numerics.key


def wgrad_operand(rows: Rows, groups: object, numerics: Numerics) -> Any:
    """One side of a weight gradient as its GEMM takes it: the backend's WgradOperand, or high precision [M, D]."""
    backend, (q, scale, hp) = get_backend(numerics.backend), rows
    if numerics.wgrad == "bf16":
        return hp
    return backend.wgrad_operand_hp(hp, groups) if numerics.wgrad_from_hp else backend.wgrad_operand(q, scale, groups)


def wgrad_gemm(a: Any, b: Any, groups: object, out_dtype: torch.dtype, numerics: Numerics) -> Tensor:
    """dW [E, N, K] from its two sides as `wgrad_operand` gives them: a of [M, N] (dY), b of [M, K] (X)."""
    backend = get_backend(numerics.backend)
    if numerics.wgrad == "bf16":
        return backend.gemm_wgrad_hp(a, b, groups, out_dtype)
    return backend.gemm_wgrad(a, b, groups, out_dtype, numerics.accumulate)


def wgrad(a: Rows, b: Rows, groups: object, out_dtype: torch.dtype, numerics: Numerics) -> Tensor:
    """dW [E, N, K] from the rows of its two sides."""
    return wgrad_gemm(*(wgrad_operand(side, groups, numerics) for side in (a, b)), groups, out_dtype, numerics)
