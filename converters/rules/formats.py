"""The two FP8 formats, and how a tensor becomes one of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from converters.backends import reference
from converters.backends.reference import AMAX_FLOOR, FP8_MAX


@dataclass(frozen=True)
class Format:
    """An FP8 format. Its values are exact in bfloat16: E4M3 has 4 significant bits, E5M2 has 3, bfloat16 has 8."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, FP8_MAX)  # smallest subnormal 2**-9
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)  # smallest subnormal 2**-16
FORMATS = {f.name: f for f in (E4M3, E5M2)}


def pow2_scale(amax: Tensor, fmt: Format) -> Tensor:
    """The smallest power of two that brings amax to the format's maximum or below; nan for an amax of inf or nan."""
    return reference.pow2_scale(amax) * (FP8_MAX / fmt.max)  # 57344 = 2**7 * 448, so a power of two stays one


def exact_scale(amax: Tensor, fmt: Format) -> Tensor:
    """amax / maximum in float32, so that the largest value becomes the format's largest. An amax of 0 gives 1."""
    scale = torch.where(amax == 0, 1.0, amax.float().clamp_min(AMAX_FLOOR) / fmt.max)
    return scale + (amax - amax)  # 0, or nan of inf and nan: few kernels, for so little they are all launches


def cast(x: Tensor, multiplier: Tensor, fmt: Format) -> Tensor:
    """x * multiplier in the format, saturating; nan stays nan. The clamp comes first: E5M2 would overflow to inf."""
    return (x.float() * multiplier).clamp(-fmt.max, fmt.max).to(fmt.dtype)
