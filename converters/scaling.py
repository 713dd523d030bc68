"""Scale rules with kernels or a reference: where the scales of weights and of the weight gradient's operands come from.

                 x, dY            weights                           weight gradient
    tokenwise    one a token      one an expert                     re-scaled from the row-scaled FP8 x and dY
    rowwise      one a token      one a row of each contraction     quantized from high precision, one an expert and
    column

With powers of two, re-scaling is exact but for new subnormals, so tokenwise needs no second copy of an activation.
"""

from dataclasses import replace

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
    return replace(numerics, temporary=True).key if temporary else numerics.key


def wgrad_operands(a: Rows, b: Rows, groups: object, numerics: Numerics) -> list:
    """The two sides of a weight gradient as its GEMM takes them: a of [M, N] (dY), b of [M, K] (X)."""
    backend = get_backend(numerics.backend)
    if numerics.wgrad == "bf16":
        return [a[2], b[2]]
    if numerics.wgrad_from_hp:
        return [backend.wgrad_operand_hp(side[2], groups) for side in (a, b)]
    return [backend.wgrad_operand(side[0], side[1], groups) for side in (a, b)]


def wgrad_gemm(operands: list, groups: object, out_dtype: torch.dtype, numerics: Numerics, parts: int = 1) -> Tensor:
    """dW [E, N, K] from `wgrad_operands`.

    parts 2: [2, E, N / 2, K], the gradients of w1 and w3 from one GEMM, each contiguous: autograd would copy anything
    else.
    """
    backend = get_backend(numerics.backend)
    if numerics.wgrad == "bf16":
        dw = backend.gemm_wgrad_hp(*operands, groups, out_dtype)
        return dw if parts == 1 else torch.stack(dw.chunk(parts, dim=1))
    return backend.gemm_wgrad(*operands, groups, out_dtype, numerics.accumulate, parts=parts)


def wgrad(a: Rows, b: Rows, groups: object, out_dtype: torch.dtype, numerics: Numerics) -> Tensor:
    """dW [E, N, K] from its two sides."""
    return wgrad_gemm(wgrad_operands(a, b, groups, numerics), groups, out_dtype, numerics)
