"""One pass through an op: which rule it gets, and what it leaves behind. Without a memory, both are nothing.

`state` is `DelayedState.tensors()`, or an empty list; `call` is `Call.key`, or "".
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.numerics import Numerics
from converters.rules.delayed import Delayed
from converters.rules.formats import FORMATS
from converters.rules.rule import STATELESS, Rule
from converters.rules.state import (
    Call,
    DelayedState,
    backward_given,
    forward_given,
    record_backward,
    record_forward,
)


def state_of(numerics: Numerics, state: DelayedState | None, first: int) -> tuple[list[Tensor], str]:
    """The tensors and the call of an op.

    Raises:
        ValueError: the rule is delayed and there is no state.
    """
    if numerics.recipe != "delayed":
        return [], ""
    if state is None:
        raise ValueError(
            "recipe = 'delayed' needs the state of the module that a weight belongs to: only converted modules with "
            "torchtitan's own forward have one. Use recipe = 'tensorwise' for other modules."
        )
    return state.tensors(), state.call(first).key


@cache
def ops(device: str) -> ModuleType:
    """What computes rules on this type of device; kernels are loaded when first used."""
    return import_module(f"converters.rules.{'fused' if device == 'cuda' else 'plain'}")


def forward_rule(n: Numerics, state: list[Tensor], offs: Tensor, call: str) -> Rule:
    """The rule of a forward. offs: int32 [E], of the local experts."""
    if not state:
        return STATELESS[n.recipe](ops(offs.device.type))
    parsed = Call.parse(call)
    return _delayed(forward_given(state, len(offs), parsed), parsed.config, offs)


def backward_rule(n: Numerics, state: list[Tensor], used: Tensor, offs: Tensor, call: str) -> Rule:
    """The rule of a backward: the forward's slots as they were used, then one a gradient."""
    if not state:
        return STATELESS[n.recipe](ops(offs.device.type))
    parsed = Call.parse(call)
    return _delayed(torch.cat([used, backward_given(state, len(offs), parsed)]), parsed.config, offs)


def _delayed(given: Tensor, config: DelayedConfig, offs: Tensor) -> Delayed:
    """448 / amax of float32 is above 2**-120: without a cold slot no multiplier is 0, unless the margin makes it so."""
    final = not config.warm_start and config.margin <= 16
    return Delayed(given, config.margin, ops(offs.device.type), final)


def outcome(rule: Rule, like: Tensor) -> tuple[Tensor, Tensor]:
    """used [S, 2, E] and amax [S, E] of a forward; empty without a memory."""
    if isinstance(rule, Delayed):
        return rule.used, rule.amax
    return like.new_empty(0, dtype=torch.float32), like.new_empty(0, dtype=torch.float32)


def gradient_amax(rule: Rule, like: Tensor, gemms: int) -> Tensor:
    """amax [gemms, E] of a backward; empty without a memory."""
    return rule.amax[-gemms:].clone() if isinstance(rule, Delayed) else like.new_empty(0, dtype=torch.float32)


def fake_outcome(like: Tensor, slots: int, experts: int, state: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The shapes of `outcome`."""
    shapes = ((slots, 2, experts), (slots, experts)) if state else ((0,), (0,))
    used, amax = (like.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return used, amax


def remember_forward(state: list[Tensor], used: Tensor, amax: Tensor, call: str) -> None:
    """Writes a forward's outcome to the state."""
    if state:
        record_forward(*state[:5], used.detach(), amax.detach(), call)


def remember_gradient(state: list[Tensor], amax: Tensor, key: str, call: str) -> None:
    """Writes a backward's."""
    if state:
        record_backward(*state[5:], amax, call, FORMATS[Numerics.parse(key).gradients].max)
