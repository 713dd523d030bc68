"""Delayed scaling: the rule, and what happens to its state. TransformerEngine's semantics, each a test.

    cast      multiplier of before; the maximum of what is cast is recorded in history[0]
    update    scale from the largest of the history, or its last entry; a multiplier stays if that is 0 or not finite
    roll      history[0] becomes the last entry, the others move down by one, the one that was second is dropped;
              not if nothing was recorded (the module did not run, or its expert had no row)

An operand of a GEMM is a slot, and each expert has slots of its own: a maximum never crosses from one to another. A
multiplier is what a value is multiplied by before the cast: maximum of the format / amax * 2**-margin, 1 at first.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Self

import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.rules import plain
from converters.rules.formats import E4M3, Format
from converters.rules.operand import Operand
from converters.rules.ragged import Ragged

FLOAT_MAX = torch.finfo(torch.float32).max


def multiplier_for(amax: Tensor, fmt_max: float, margin: int) -> Tensor:
    """What brings amax to the format's maximum, less the margin; finite however small amax is."""
    return (fmt_max * 2.0**-margin / amax).clamp(max=FLOAT_MAX)


def update(history: Tensor, multiplier: Tensor, fmt_max: float, config: DelayedConfig) -> None:
    """history [L, S, E], multiplier [S, E], float32: in place, one update and roll of every slot."""
    recorded = history[0].clone()
    window = torch.roll(history, -1, 0)
    # The kernel's maximum passes over nan (fmaxf), but not over inf: a slot that saw one keeps its multiplier for as
    # long as that is remembered.
    amax = window.nan_to_num(0.0, torch.inf).amax(0) if config.amax_compute_algo == "max" else recorded
    usable = torch.isfinite(amax) & (amax > 0) & (recorded != 0)
    multiplier.copy_(torch.where(usable, multiplier_for(amax, fmt_max, config.margin), multiplier))
    window[0] = 0
    history.copy_(torch.where(recorded != 0, window, history))


@dataclass(frozen=True)
class _Slot:
    """What `Settle` is, of one slot."""

    rule: "Delayed"
    slot: int
    fmt_max: float

    @property
    def final(self) -> bool:
        return self.rule.final

    def __call__(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        rule, slot = self.rule, self.slot
        rule.amax[slot] = amax
        multiplier, scale = rule.given[slot]
        if rule.final:
            return multiplier, scale
        unknown, usable = multiplier == 0, (amax > 0) & (amax < torch.inf)
        now = torch.where(usable, multiplier_for(amax, self.fmt_max, rule.margin), 1.0)
        rule.used[slot, 0] = multiplier = torch.where(unknown, now, multiplier)
        rule.used[slot, 1] = scale = torch.where(unknown, multiplier.reciprocal(), scale)
        return multiplier, scale


class Delayed:
    """One GEMM's or MLP's operands of one pass, each cast with a multiplier that was settled before.

    given: float32 [S, 2, E], multiplier and scale of each slot; a multiplier of 0 stands for "take the maximum now".
    final: there is none of 0. Afterwards `used` [S, 2, E] has what was used and `amax` [S, E] the maxima of what was
    cast.
    """

    def __init__(self, given: Tensor, margin: int, ops: ModuleType = plain, final: bool = False) -> None:
        self.given, self.used, self.margin, self.ops, self.final = given, given.clone(), margin, ops, final
        self.amax = torch.zeros_like(given[:, 0])

    def rows(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`."""
        return self.ops.experts_given(x, fmt, rows, self.given[slot, 0], _Slot(self, slot, fmt.max))

    def columns(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> Operand:
        """See `Rule`: the same bytes."""
        return self.rows(x, fmt, rows, slot)

    def both(self, x: Tensor, fmt: Format, rows: Ragged, slot: int) -> tuple[Operand, Operand]:
        """See `Rule`."""
        return (self.rows(x, fmt, rows, slot),) * 2

    def weight(self, ws: Sequence[Tensor], contracted: int, slot: int) -> Operand:
        """See `Rule`: the same bytes whatever is contracted."""
        return self.ops.weights_given(ws, self.given[slot, 0], _Slot(self, slot, E4M3.max))

    def in_plain(self) -> Self:
        """See `Rule`."""
        same = copy.copy(self)
        same.ops = plain
        return same
