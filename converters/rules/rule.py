"""Where does a rule get its scales from?  One class a rule; all have the three methods of `Rule`.

                 x, dY           weights                  weight gradient               gradients   scales
    tokenwise    one a token     one an expert            re-scaled from those bytes    E4M3        powers of two
    rowwise      one a token     a row of a contraction   per expert and column         E4M3        powers of two
    tensorwise   one an expert   one an expert            the same bytes                E5M2        float32
    blockwise    1 x 128         128 x 128                128 tokens x 1, both sides    E4M3        powers of two
    delayed      one an expert   one an expert            the same bytes                E5M2        float32, from before

A group of rows is a tensor of its own: "one an expert" is what is called per tensor where experts are separate modules.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from converters.rules.formats import E4M3, Format, cast, exact_scale, pow2_scale
from converters.rules.ragged import BLOCK, Ragged


@dataclass(frozen=True)
class Operand:
    """A quantized tensor of rows [M, K] or weights [E, N, K]: x = q * scale * outer[expert].

    scale: powers of two, broadcast over q; multiplied into q before the GEMM, which is exact. outer: float32 [E];
    multiplied after it.
    """

    q: Tensor
    scale: Tensor | None = None
    outer: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """q * scale. Exact in bfloat16 as in float32, which have the same exponents: q has at most 4 significant bits,
        and q * scale is above 2**-125, since an amax counts as at least 1e-30.
        """
        return self.q.to(dtype) if self.scale is None else self.q.to(dtype) * self.scale.to(dtype)

    def dequantized(self, rows: Ragged) -> Tensor:
        """The tensor that q stands for, float32."""
        values = self.values(torch.float32)
        if self.outer is None:
            return values
        return values * (self.outer.view(-1, 1, 1) if values.dim() == 3 else rows.by_row(self.outer)[:, None])


class Rule(Protocol):
    """How the operands of a GEMM are quantized. `slot` names the operand to rules with a memory."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """x [M, K] as the left operand of y and dx: contracted over K."""
        ...

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """x [M, K] as a side of the weight gradient: contracted over the rows of each expert."""
        ...

    def weight(self, w: Tensor, contracted: int, slot: int) -> Operand:
        """w [E, N, K], contracted over dim 2 (y) or 1 (dx)."""
        ...


def columns_pow2(x: Tensor, fmt: Format, rows: Ragged) -> Operand:
    """x [M, K] with one power of two an expert and column."""
    scale = rows.by_row(pow2_scale(rows.amax_columns(x), fmt))
    return Operand(cast(x, scale.reciprocal(), fmt), scale)


def _pow2(x: Tensor, amax: Tensor, fmt: Format) -> Operand:
    scale = pow2_scale(amax, fmt)
    return Operand(cast(x, scale.reciprocal(), fmt), scale)


class Tokenwise:
    """One scale a row, one an expert's weight; the weight gradient re-scales what the rows became."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return _pow2(x, x.abs().amax(1, keepdim=True), fmt)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return columns_pow2(self.rows(x, fmt, rows, slot).dequantized(rows), fmt, rows)

    def weight(self, w: Tensor, contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        return _pow2(w, w.abs().amax((1, 2), keepdim=True), E4M3)


class Rowwise(Tokenwise):
    """torchao's rule: every GEMM quantizes its own operands, one scale a row of the contraction."""

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return columns_pow2(x, fmt, rows)

    def weight(self, w: Tensor, contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        return _pow2(w, w.abs().amax(contracted, keepdim=True), E4M3)


class Tensorwise:
    """Current scaling: the maximum of the whole tensor, now."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        outer = exact_scale(rows.amax(x), fmt)
        return Operand(cast(x, rows.by_row(outer.reciprocal())[:, None], fmt), outer=outer)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`: the same bytes, since a scale of the whole tensor may be contracted over either dim."""
        return self.rows(x, fmt, rows, slot)

    def weight(self, w: Tensor, contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        outer = exact_scale(w.abs().amax((1, 2)), E4M3)
        return Operand(cast(w, outer.reciprocal().view(-1, 1, 1), E4M3), outer=outer)


class Blockwise:
    """DeepSeek-V3's rule with powers of two: 1 x 128 along the contraction, weights 128 x 128."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return _pow2(x, _blocks(x, (1, BLOCK)), fmt)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`: blocks of 128 tokens of an expert, the last one shorter."""
        return _pow2(x, rows.amax_blocks(x), fmt)

    def weight(self, w: Tensor, contracted: int, slot: int) -> Operand:
        """See `Rule`: a square block is contracted over either dim."""
        return _pow2(w, _blocks(w, (BLOCK, BLOCK)), E4M3)


def _blocks(x: Tensor, size: tuple[int, int]) -> Tensor:
    """x [..., N, K] -> for each element the largest |value| of its block of `size`; blocks at the ends are shorter."""
    (n, k), (N, K) = size, x.shape[-2:]
    padded = torch.nn.functional.pad(x.abs(), (0, -K % k, 0, -N % n))
    tiles = padded.unflatten(-1, (-1, k)).unflatten(-3, (-1, n))  # [..., N / n, n, K / k, k]
    amax = tiles.amax((-3, -1), keepdim=True).expand_as(tiles)
    return amax.flatten(-4, -3).flatten(-2, -1)[..., :N, :K]


STATELESS: dict[str, type[Rule]] = {
    "tokenwise": Tokenwise,
    "rowwise": Rowwise,
    "tensorwise": Tensorwise,
    "blockwise": Blockwise,
}
