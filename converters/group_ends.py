"""Do the ends of groups belong to the rows?  What the host knows without waiting is checked at once, their values where
it reads them anyway: on a CPU, and in the reference backend. On a GPU nobody looks.
"""

import torch
from torch import Tensor

INT32 = torch.iinfo(torch.int32)
NARROWER = (torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8)


def group_ends(offs: Tensor, x: Tensor) -> Tensor:
    """offs [E] as int32; a value beyond it becomes its largest, or least: as wrong as before, and no other number.

    Raises:
        ValueError: they are no integers, or on another device than the rows x, where a kernel cannot read them.
    """
    if offs.dtype.is_floating_point or offs.dtype == torch.bool or offs.device != x.device:
        raise ValueError(
            f"offs are whole numbers on the rows' device, {x.device}; got {str(offs.dtype).removeprefix('torch.')} on "
            f"{offs.device}."
        )
    if offs.dtype not in NARROWER:
        offs = offs.to(torch.int64).clamp(INT32.min, INT32.max)
    return offs.to(torch.int32)


def spans(offs: Tensor, M: int) -> list[tuple[int, int]]:
    """Begin and end of each group of M rows, on the host.

    Raises:
        ValueError: the ends are none of groups in M rows; slices of a tensor would take them, and leave rows out.
    """
    ends = offs.tolist()
    begins = [0, *ends[:-1]]
    if any(end < begin for begin, end in zip(begins, ends, strict=True)) or (ends and ends[-1] > M):
        raise ValueError(
            f"offs are the ends of groups in {M} rows, so they ascend from 0 on, to {M} at most; got {ends}."
        )
    return list(zip(begins, ends, strict=True))
