"""Where does a rule get its scales from?  One class a rule; all have the three methods of `Rule`.

                 x, dY           weights                  weight gradient               gradients   scales
    tokenwise    one a token     one an expert            re-scaled from those bytes    E4M3        powers of two
    rowwise      one a token     a row of a contraction   per expert and column         E4M3        powers of two
    tensorwise   one an expert   one an expert            the same bytes                E5M2        float32
    blockwise    1 x 128         128 x 128                128 tokens x 1, both sides    E4M3        powers of two
    delayed      one an expert   one an expert            the same bytes                E5M2        float32, from before

A group of rows is a tensor of its own: "one an expert" is what is called per tensor where experts are separate modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, Self

from torch import Tensor

from converters.rules import plain
from converters.rules.formats import Format
from converters.rules.operand import Operand
from converters.rules.ragged import BLOCK, Ragged


class Rule(Protocol):
    """How the operands of a GEMM are quantized. `slot` names the operand to rules with a memory.

    ops: plain.py or fused.py, which compute it.
    """

    ops: ModuleType

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """x [M, K] as the left operand of y and dx: contracted over K."""
        ...

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """x [M, K] as a side of the weight gradient: contracted over the rows of each expert."""
        ...

    def both(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> tuple[Operand, Operand]:
        """x as `rows` and as `columns`, for one call of which the other needs no second pass."""
        ...

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """ws [E, N_i, K], one tensor joined along N, contracted over dim 2 (y) or 1 (dx)."""
        ...

    def in_plain(self) -> Self:
        """The same rule, and the same memory, computed by plain.py: its operands are `QuantizedOperand`."""
        ...


@dataclass(frozen=True)
class _Stateless:
    ops: ModuleType = plain

    def both(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> tuple[Operand, Operand]:
        """See `Rule`."""
        return self.rows(x, fmt, rows, slot), self.columns(x, fmt, rows, slot)

    def in_plain(self) -> Self:
        """See `Rule`."""
        return type(self)()


class Tokenwise(_Stateless):
    """One scale a row, one an expert's weight; the weight gradient re-scales what the rows became."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.rows_pow2(x, fmt)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.both(x, fmt, rows, slot)[1]

    def both(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> tuple[Operand, Operand]:
        """See `Rule`."""
        made = self.rows(x, fmt, rows, slot)
        return made, self.ops.rescaled_columns(made, fmt, rows)

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.weights_pow2(ws, (None, None))


class Rowwise(_Stateless):
    """torchao's rule: every GEMM quantizes its own operands, one scale a row of the contraction."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.rows_pow2(x, fmt)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.columns_pow2(x, fmt, rows)

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.weights_pow2(ws, (1, None) if contracted == 2 else (None, 1))


class Tensorwise(_Stateless):
    """Current scaling: the maximum of the whole tensor, now."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.experts_exact(x, fmt, rows)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`: the same bytes, since a scale of the whole tensor may be contracted over either dim."""
        return self.rows(x, fmt, rows, slot)

    def both(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> tuple[Operand, Operand]:
        """See `Rule`."""
        return (self.rows(x, fmt, rows, slot),) * 2

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.weights_exact(ws)


class Blockwise(_Stateless):
    """DeepSeek-V3's rule with powers of two: 1 x 128 along the contraction, weights 128 x 128."""

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.rows_pow2(x, fmt, BLOCK)

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`: blocks of 128 tokens of an expert, the last one shorter."""
        return self.ops.column_blocks_pow2(x, fmt, rows)

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """See `Rule`: a square block is contracted over either dim."""
        return self.ops.weights_pow2(ws, (BLOCK, BLOCK))


STATELESS: dict[str, type[Rule]] = {
    "tokenwise": Tokenwise,
    "rowwise": Rowwise,
    "tensorwise": Tensorwise,
    "blockwise": Blockwise,
}
