"""What a rule makes of a tensor: FP8 with scales, or only the values that these stand for."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from converters.rules.ragged import Ragged


class Settle(Protocol):
    """Which multipliers a cast has, after its maxima are known. final: those that were given, none of them 0."""

    final: bool

    def __call__(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """amax float32 [E] -> what to multiply by before the cast, and outer."""
        ...


class Operand(Protocol):
    """Rows [M, K] or weights [E, N, K] for a GEMM. outer: float32 [E], multiplied after it; or None."""

    outer: Tensor | None

    def values(self, dtype: torch.dtype) -> Tensor:
        """What is multiplied, exact in dtype: bfloat16 or float32."""
        ...


@dataclass(frozen=True)
class QuantizedOperand:
    """x = q * scale * outer[expert]. scale: powers of two that broadcast over q."""

    q: Tensor
    scale: Tensor | None = None
    outer: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """q * scale. Exact in bfloat16 as in float32, which have the same exponents: q has at most 4 significant bits,
        and q * scale is above 2**-132, since an amax counts as at least 1e-30.
        """
        return self.q.to(dtype) if self.scale is None else self.q.to(dtype) * self.scale.to(dtype)

    def dequantized(self, rows: Ragged) -> Tensor:
        """The tensor that q stands for, float32."""
        values = self.values(torch.float32)
        if self.outer is None:
            return values
        return values * (self.outer.view(-1, 1, 1) if values.dim() == 3 else rows.by_row(self.outer)[:, None])


@dataclass(frozen=True)
class OperandValues:
    """x = v * outer[expert]; v: bfloat16, FP8 values times powers of two. Rows of nobody hold anything."""

    v: Tensor
    outer: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `Operand`."""
        return self.v.to(dtype)
