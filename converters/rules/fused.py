"""The functions of plain.py in kernels, for GPUs: the same numbers, each in one or two passes over what it reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from converters.kernels import finish
from converters.kernels.fake import fake_rows
from converters.kernels.fake_groups import Layout, amax, fake_known, fake_pow2, repair
from converters.kernels.swiglu_hp import dswiglu, swiglu
from converters.rules.formats import E4M3, E5M2, Format, exact_scale
from converters.rules.operand import OperandValues, Settle
from converters.rules.ragged import Ragged

__all__ = ["dswiglu", "swiglu"]


def _rows(x: Tensor, rows: Ragged, width: int | None = None) -> Layout:
    return Layout(xs=[x[None]], ids=rows.expert32, groups=rows.experts, width=width)


def _exact(layout: Layout, fmt: Format) -> tuple[Tensor, Tensor]:
    outer = exact_scale(amax(layout).view(torch.float32)[:, 0], fmt)
    return fake_known(layout, fmt is E5M2, outer.reciprocal()), outer


def _given(layout: Layout, fmt: Format, given: Tensor, settle: Settle) -> tuple[Tensor, Tensor]:
    seen = layout.zeros()
    v = fake_known(layout, fmt is E5M2, given, raised=seen)
    multiplier, outer = settle(seen.view(torch.float32)[:, 0])
    if not settle.final:
        repair(layout, fmt is E5M2, multiplier, given, v)
    return v, outer


def rows_pow2(x: Tensor, fmt: Format, width: int | None = None) -> OperandValues:
    """See plain.py."""
    return OperandValues(fake_rows([x[None]], fmt is E5M2, width)[0])


def columns_pow2(x: Tensor, fmt: Format, rows: Ragged) -> OperandValues:
    """See plain.py."""
    return OperandValues(fake_pow2(_rows(x, rows, width=1), fmt is E5M2)[0])


def column_blocks_pow2(x: Tensor, fmt: Format, rows: Ragged) -> OperandValues:
    """See plain.py."""
    return OperandValues(
        fake_pow2(Layout(xs=[x[None]], ids=rows.block32, groups=rows.max_blocks, width=1), fmt is E5M2)[0]
    )


def rescaled_columns(rows_x: OperandValues, fmt: Format, rows: Ragged) -> OperandValues:
    """See plain.py."""
    return columns_pow2(rows_x.v, fmt, rows)


def experts_exact(x: Tensor, fmt: Format, rows: Ragged) -> OperandValues:
    """See plain.py."""
    v, outer = _exact(_rows(x, rows), fmt)
    return OperandValues(v[0], outer)


def experts_given(x: Tensor, fmt: Format, rows: Ragged, given: Tensor, settle: Settle) -> OperandValues:
    """See plain.py."""
    v, outer = _given(_rows(x, rows), fmt, given, settle)
    return OperandValues(v[0], outer)


def weights_pow2(ws: Sequence[Tensor], size: tuple[int | None, int | None]) -> OperandValues:
    """See plain.py."""
    height, width = size
    if height == 1:
        return OperandValues(fake_rows(ws, False, width))
    return OperandValues(fake_pow2(Layout(xs=ws, height=height, width=width), False))


def weights_exact(ws: Sequence[Tensor]) -> OperandValues:
    """See plain.py."""
    return OperandValues(*_exact(Layout(xs=ws), E4M3))


def weights_given(ws: Sequence[Tensor], given: Tensor, settle: Settle) -> OperandValues:
    """See plain.py."""
    return OperandValues(*_given(Layout(xs=ws), E4M3, given, settle))


def finish_rows(y: Tensor, rows: Ragged, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See plain.py; y may be overwritten."""
    return finish.finish_rows(y, rows.expert32, rows.experts, factor, dtype)


def finish_weights(dw: Tensor, rows: Ragged, factor: Tensor | None, dtype: torch.dtype, parts: int) -> Tensor:
    """See plain.py; dw may be overwritten."""
    return finish.finish_weights(dw, rows.offs, factor, dtype, parts)
