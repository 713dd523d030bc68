"""Can these tensors be operands of FP8 products?  What the host knows without waiting, asked once a call."""

from collections.abc import Iterable

import torch
from torch import Tensor

from converters.capability import hopper_problem
from converters.differentiable import unwrapped
from converters.gathered_weight import FP8GatheredWeight
from converters.numerics import Numerics

ALIGNMENT = 16  # bytes: TMA and wgmma read FP8 rows in units of 16 elements
FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


def check_operands(x: Tensor, weights: Iterable[Tensor], numerics: Numerics) -> None:
    """x: rows, of any shape; weights: [..., N, K], plain or wrapped.

    Raises:
        ValueError: one of them is no float tensor in high precision, they are on different devices, or the hopper
            backend cannot read them: no GPU, or N or K is no multiple of 16.
    """
    if x.dtype not in FLOATS:
        raise ValueError(f"FP8 products take rows of {_names(FLOATS)}; got {_names([x.dtype])}.")
    device, hopper = x.device, numerics.backend == "hopper"
    if hopper and device.type != "cuda":
        raise ValueError(
            f"{hopper_problem() or 'backend hopper takes tensors on a GPU.'} The rows are on {device}. Use "
            "Numerics(backend='reference') (plain torch, any device)."
        )
    compiling = torch.compiler.is_compiling()
    for weight in weights:
        w = weight if compiling else unwrapped(weight)  # an attribute of a wrapper costs a Python call
        if w.dtype not in FLOATS and not isinstance(weight, FP8GatheredWeight):
            raise ValueError(f"FP8 products take weights of {_names(FLOATS)}; got {_names([w.dtype])}.")
        if w.device != device:
            raise ValueError(f"rows and weights are on one device; got {device} and {w.device}.")
        if hopper and ((shape := w.shape)[-1] % ALIGNMENT or shape[-2] % ALIGNMENT):
            raise ValueError(
                f"backend 'hopper' reads weights whose matrix dims are multiples of {ALIGNMENT}; got {tuple(shape)}. "
                "Use Numerics(backend='reference'), or other dims."
            )


def check_rows_in_fp8(numerics: Numerics) -> None:
    """For MLPs whose rows exist in FP8 only.

    Raises:
        ValueError: the weight gradient needs them in high precision, or the products are emulated.
    """
    if numerics.wgrad_from_hp or numerics.backend == "emulated":
        raise ValueError(
            f"the rows are in FP8 only, so this takes recipe 'tokenwise', wgrad 'fp8' and backend 'reference' or "
            f"'hopper'; got {numerics!s}."
        )


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
