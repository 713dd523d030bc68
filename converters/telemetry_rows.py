"""The rows of an operand in high precision, though some of them exist only in the kernel that quantizes them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from converters.telemetry_stats import amax_of_rows, columns, largest_owned


class Rows(Protocol):
    """M rows of K values."""

    def take(self, rows: Tensor) -> Tensor:
        """rows int64 [S] -> [S, K]."""
        ...

    def some_columns(self) -> Tensor:
        """`columns` of all rows, which keep nothing else alive."""
        ...

    def amax(self, offs: Tensor) -> Tensor:
        """The largest |value| of the rows that belong to somebody, []; nan where there is one."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """x [M, K] as it is."""

    x: Tensor

    def take(self, rows: Tensor) -> Tensor:
        """See `Rows`."""
        return self.x[rows]

    def some_columns(self) -> Tensor:
        """See `Rows`."""
        return columns(self.x).clone()

    def amax(self, offs: Tensor) -> Tensor:
        """See `Rows`."""
        return largest_owned(amax_of_rows(self.x), offs)


@dataclass(frozen=True)
class RoutedRows:
    """M rows of tokens x [T, K], each times its factor [M], where there is one.

    slots: int32 [T, k], the rows of a token, -1 for one that is not here.
    """

    x: Tensor
    slots: Tensor
    M: int
    factor: Tensor | None

    @cached_property
    def token(self) -> Tensor:
        """int64 [M], the token of each row."""
        token = torch.zeros(self.M + 1, dtype=torch.int64, device=self.x.device)
        token[self.slots.long()] = torch.arange(len(self.slots), device=self.x.device)[:, None]  # -1 is the last
        return token[: self.M]

    def take(self, rows: Tensor) -> Tensor:
        """See `Rows`."""
        taken = self.x[self.token[rows]]
        return taken if self.factor is None else taken.float() * self.factor[rows][:, None]

    def some_columns(self) -> Tensor:
        """See `Rows`."""
        taken = columns(self.x)[self.token]
        return taken if self.factor is None else taken.float() * self.factor[:, None]

    def amax(self, offs: Tensor) -> Tensor:
        """See `Rows`."""
        rows = amax_of_rows(self.x)[self.token]
        rows = rows if self.factor is None else rows * self.factor.abs()
        return largest_owned(rows, offs)
