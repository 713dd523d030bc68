"""Fake quantization where a scale spans rows: one kernel finds maxima, by atomics, and one rounds (fake.py).

A group of rows shares its scales. Rows [1, M, K] are in groups by `ids`, int32 [M], ascending; those of `groups` and on
are nobody's, and their values are left as they are in memory. Weights [E, N, K], joined along N, have `height` rows a
group. Along K a scale spans all columns, or 128, or one. So tables of maxima are [groups, 1, K / 128 or K], and int32:
bits of non-negative float32, which order as these do, nan above all (e4m3.py).

A tile of 128 x 128 has rows of one group, most of the time; the kernels go through the groups that it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, raise_amax
from converters.kernels.fake import EXACT, empty_joined, narrowed, on_grid, parts_of, pow2_scale, widened
from converters.kernels.sizes import cdiv

TILE = {"ROWS": 128, "COLS": 128, "num_warps": 8}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which elements share a scale. xs: [1, M, K] with ids, or weights [E, N_i, K] in groups of `height` of their N
    rows, None for all; width: columns that share one, None for all.
    """

    xs: Sequence[Tensor]
    ids: Tensor | None = None
    groups: int = 0
    height: int | None = None
    width: int | None = None

    @property
    def of_slice(self) -> int:
        """Groups of an expert's weight."""
        return cdiv(sum(x.shape[1] for x in self.xs), self.height) if self.height else 1

    @property
    def table(self) -> tuple[int, int]:
        """The shape of a table of maxima."""
        live = self.groups if self.ids is not None else len(self.xs[0]) * self.of_slice
        return live, cdiv(self.xs[0].shape[2], self.width) if self.width else 1

    def zeros(self) -> Tensor:
        """A table of maxima that nothing has raised."""
        return torch.zeros(self.table, dtype=torch.int32, device=self.xs[0].device)

    def launch(self, kernel: object, x: Tensor, at: int, *tensors: Tensor | None, **constants: object) -> None:
        """One part of the xs, whose first row is `at`."""
        (E, N, K), (live, across) = x.shape, self.table
        grid = (cdiv(N, TILE["ROWS"]), cdiv(K, TILE["COLS"]), E)
        kernel[grid](
            x, self.ids, *tensors, N, K, at, self.of_slice, self.height or 1 << 30, live, across,
            RAGGED=self.ids is not None, WIDTH=self.width or 0, **constants, **TILE, **EXACT,
        )  # fmt: skip


@triton.jit
def _group(ids, e, n, N, at, of_slice, height, RAGGED: tl.constexpr):
    """The group of row n, or of the last row for what is past that."""
    n = tl.minimum(n, N - 1)
    if RAGGED:
        return tl.load(ids + n)
    else:
        return e * of_slice + (at + n) // height


@triton.jit
def _groups(ids, e, N, at, of_slice, height, live, RAGGED: tl.constexpr, ROWS: tl.constexpr):
    """Of this program's rows: each one's group, -1 past the last row, and the first and last that are somebody's."""
    n0 = tl.program_id(0) * ROWS
    n = n0 + tl.arange(0, ROWS)
    group = tl.where(n < N, _group(ids, e, n, N, at, of_slice, height, RAGGED), -1)
    first = _group(ids, e, n0, N, at, of_slice, height, RAGGED)
    last = _group(ids, e, n0 + ROWS - 1, N, at, of_slice, height, RAGGED)
    return group, first, tl.minimum(last, live - 1)


@triton.jit
def _entry(table, g, c, across, K, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Where a group's maxima are: COLS pointers if each column has its own, else one."""
    row = table + (g + tl.zeros((), tl.int64)) * across
    if WIDTH == 1:
        return row + tl.minimum(c, K - 1)
    elif WIDTH == COLS:
        return row + tl.program_id(1)
    else:
        return row


@triton.jit
def _raise(entry, v, c, K, WIDTH: tl.constexpr):
    top = tl.max(abs_bits(v), 0)
    if WIDTH == 1:
        tl.atomic_max(entry, top, mask=c < K)
    else:
        raise_amax(entry, tl.max(top, 0))


@triton.jit
def _amax_kernel(
    x, ids, amax, N, K, at, of_slice, height, live, across,
    RAGGED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    e, n = tl.program_id(2), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    group, first, last = _groups(ids, e, N, at, of_slice, height, live, RAGGED, ROWS)
    source = x + (e.to(tl.int64) * N + n)[:, None] * K + c[None, :]
    for g in range(first, last + 1):
        v = widened(tl.load(source, mask=(group == g)[:, None] & (c < K)[None, :], other=0.0))
        _raise(_entry(amax, g, c, across, K, WIDTH, COLS), v, c, K, WIDTH)


@triton.jit
def _cast_kernel(
    x, ids, out, amax, multiplier, given, N, K, at, of_slice, height, live, across, out_e,
    RAGGED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    FIVE: tl.constexpr, KNOWN: tl.constexpr, RAISE: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """KNOWN: values are rounded x * multiplier [live]; else x to the powers of two of amax. RAISE: amax is raised on
    the way. REPAIR: only groups whose `given` is 0.
    """
    e, n = tl.program_id(2), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    group, first, last = _groups(ids, e, N, at, of_slice, height, live, RAGGED, ROWS)
    source = x + (e.to(tl.int64) * N + n)[:, None] * K + c[None, :]
    target = out + (e.to(tl.int64) * out_e + n.to(tl.int64) * K)[:, None] + c[None, :]
    for g in range(first, last + 1):
        wanted = True
        if REPAIR:
            wanted = tl.load(given + g) == 0
        if wanted:
            inside = (group == g)[:, None] & (c < K)[None, :]
            v = widened(tl.load(source, mask=inside, other=0.0))
            if KNOWN:
                values = on_grid(v * tl.load(multiplier + g), FIVE)
                if RAISE:
                    _raise(_entry(amax, g, c, across, K, WIDTH, COLS), v, c, K, WIDTH)
            else:
                bits = tl.load(_entry(amax, g, c, across, K, WIDTH, COLS))
                scale, inverse = pow2_scale(bits, FIVE)
                if WIDTH == 1:
                    values = on_grid(v * inverse[None, :], FIVE) * scale[None, :]
                else:
                    values = on_grid(v * inverse, FIVE) * scale
            tl.store(target, narrowed(values, tl.bfloat16), mask=inside)


def amax(layout: Layout) -> Tensor:
    """The table of maxima, as bits: int32, `layout.table`."""
    table = layout.zeros()
    for x, at in parts_of(layout.xs):
        layout.launch(_amax_kernel, x, at, table)
    return table


def fake_pow2(layout: Layout, five: bool) -> Tensor:
    """xs, joined along N -> values [E, N, K] bfloat16, with the powers of two of their maxima."""
    table, out = amax(layout), empty_joined(layout.xs)
    for x, at in parts_of(layout.xs):
        _cast(layout, x, out, at, (table, None, None), five)
    return out


def fake_known(layout: Layout, five: bool, multiplier: Tensor, raised: Tensor | None = None) -> Tensor:
    """xs, joined along N -> x * multiplier in FP8, bfloat16 [E, N, K]. multiplier: float32 [groups] or [E].

    raised: a table of maxima, raised on the way.
    """
    out = empty_joined(layout.xs)
    for x, at in parts_of(layout.xs):
        _cast(layout, x, out, at, (raised, multiplier, None), five, KNOWN=True, RAISE=raised is not None)
    return out


def repair(layout: Layout, five: bool, multiplier: Tensor, given: Tensor, out: Tensor) -> None:
    """Does what `fake_known` does again, in place, for groups whose `given` was 0; others cost no traffic."""
    for x, at in parts_of(layout.xs):
        _cast(layout, x, out, at, (None, multiplier, given), five, KNOWN=True, REPAIR=True)


def _cast(
    layout: Layout, x: Tensor, out: Tensor, at: int, tables: tuple[Tensor | None, ...], five: bool, **modes: bool
) -> None:
    modes = {"KNOWN": False, "RAISE": False, "REPAIR": False} | modes
    layout.launch(_cast_kernel, x, at, out[:, at:], *tables, out_e=out.stride(0), FIVE=five, **modes)
