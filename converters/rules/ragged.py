"""Rows in groups of any sizes, without asking the host how large they are."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True)
class Ragged:
    """offs: int32 [E], ends of the groups. expert: int64 [M], the group of each row; E for rows of nobody."""

    offs: Tensor
    expert: Tensor

    @property
    def experts(self) -> int:
        """E."""
        return self.offs.shape[0]

    @cached_property
    def expert32(self) -> Tensor:
        """`expert` as int32, for kernels."""
        return self.expert.int()

    @cached_property
    def block32(self) -> Tensor:
        """int32 [M], the block of 128 rows of each row; `max_blocks` for rows of nobody. For kernels."""
        return torch.where(self.owned, self.blocks(), self.max_blocks).int()

    @property
    def owned(self) -> Tensor:
        """bool [M], whether a row belongs to an expert."""
        return self.expert < self.experts

    @property
    def sizes(self) -> Tensor:
        """int32 [E], rows of each group."""
        return torch.diff(self.offs, prepend=self.offs.new_zeros(1))

    def by_row(self, per_expert: Tensor) -> Tensor:
        """per_expert [E, ...] -> [M, ...], the value of each row's expert; 1 for rows of nobody."""
        return torch.cat([per_expert, torch.ones_like(per_expert[:1])])[self.expert]

    def amax(self, x: Tensor) -> Tensor:
        """x [M, K] -> float32 [E], the largest |value| of each group; 0 for an empty one."""
        return self._maximum(x.abs().amax(1).float() if x.numel() else x.new_zeros(len(x)).float(), self.experts)

    def amax_columns(self, x: Tensor) -> Tensor:
        """x [M, K] -> float32 [E, K], the largest |value| of each column of a group."""
        return self._maximum(x.abs().float(), self.experts)

    def blocks(self) -> Tensor:
        """int64 [M]: rows in blocks of 128 that start anew with each group. Numbers below `max_blocks`, their sum."""
        counts = (self.sizes + BLOCK - 1) // BLOCK
        first = torch.cumsum(counts, 0) - counts
        start = self.offs - self.sizes
        row = torch.arange(len(self.expert), device=self.expert.device)
        return self.by_row(first) + (row - self.by_row(start)) // BLOCK

    def amax_blocks(self, x: Tensor) -> Tensor:
        """x [M, K] -> float32 [M, K]: for each element the largest |value| among its column's block of 128 rows."""
        block = torch.where(self.owned, self.blocks(), self.max_blocks)
        return _scatter_max(x.abs().float(), block, self.max_blocks + 1)[block]

    @property
    def max_blocks(self) -> int:
        """No more blocks than this, whatever the sizes."""
        return len(self.expert) // BLOCK + self.experts

    def _maximum(self, values: Tensor, n: int) -> Tensor:
        return _scatter_max(values, self.expert, n + 1)[:n]


def _scatter_max(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Maxima of values [M, ...] with the same index [M], which ascends: [n, ...], 0 where there are none.

    On a GPU scatter_reduce goes through atomics on floats, which all rows of an expert contend for; on a CPU
    segment_reduce is the slower one.
    """
    if values.is_cuda:
        ends = torch.searchsorted(index, torch.arange(n + 1, device=index.device, dtype=index.dtype))
        return torch.segment_reduce(values, "max", offsets=ends, axis=0, initial=0.0, unsafe=True)
    index = index.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    out = values.new_zeros((n, *values.shape[1:]))
    return out.scatter_reduce(0, index, values, "amax")


def ragged(offs: Tensor, M: int) -> Ragged:
    """offs: int32 [E]; M: rows of the buffer, at least offs[-1]."""
    row = torch.arange(M, dtype=offs.dtype, device=offs.device)
    return Ragged(offs, torch.searchsorted(offs, row, right=True))
