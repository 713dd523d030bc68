"""How an operator gets a gradient, at little cost to the host.

`torch.library.register_autograd` alone would do, and while torch.compile traces it does. In eager mode it costs more
than the launches of a linear layer: generated autograd functions, pytrees, and a dispatcher that calls each wrapped
weight's `__torch_function__` and `__torch_dispatch__`. So one autograd function takes the wrapped weights, for autograd
to see the parameters, and hands the operator the plain tensors in them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from converters.kernels.ops import LIBRARY, without_autocast
from parallel.wrapped_weight import WrappedWeight

Save = Callable[[Any, tuple, Any], None]
Gradients = Callable[..., tuple]


def unwrapped(value: Any) -> Any:
    """A weight, or a list of them, as operators compute with it; anything else as it is."""
    if isinstance(value, WrappedWeight):
        return value._data
    return [unwrapped(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Formula:
    operator: Callable[..., tuple]
    save: Save
    gradients: Gradients


class _Node(torch.autograd.Function):
    """autograd.Function knows no lists. lengths: of each argument that was a list, None for the others."""

    @staticmethod
    def forward(ctx: Any, formula: _Formula, lengths: list[int | None], *flat: Any) -> Tensor | tuple[Tensor, ...]:
        at = iter(flat)
        inputs = tuple(next(at) if n is None else [next(at) for _ in range(n)] for n in lengths)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            outputs = formula.operator(*map(unwrapped, inputs))
        formula.save(ctx, inputs, outputs)
        ctx.formula, ctx.lengths, ctx.others = formula, lengths, (None,) * (len(outputs) - 1)
        ctx.returns_list = isinstance(outputs[0], list)
        return tuple(outputs[0]) if ctx.returns_list else outputs[0]

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = ctx.formula.gradients(ctx, list(gs) if ctx.returns_list else gs[0], *ctx.others)
        flat: list[Tensor | None] = [None, None]
        for grad, n in zip(grads, ctx.lengths, strict=True):
            flat += [grad] if n is None else grad or [None] * n
        return tuple(flat)


def differentiable(operator: Callable[..., tuple], save: Save, gradients: Gradients) -> Callable[..., Any]:
    """The operator as a function that returns its first output and has a gradient.

    Args:
        operator: as ops.py makes it, of two outputs or more. The first is a tensor or a list of tensors, the others are
            for `save`.
        save: called with ctx, inputs and output, named like that, as `setup_context`.
        gradients: called with (ctx, gradient of each output), as a backward, at most once differentiable. It gets its
            weights as they were given: `unwrapped` makes operators' arguments of them.
    """
    formula = _Formula(operator, save, gradients)
    torch.library.register_autograd(operator.op, once_differentiable(gradients), setup_context=save, lib=LIBRARY)
    node = type(operator.op._opname, (_Node,), {})  # a profiler shows the name

    def call(*args: Any) -> Tensor | list[Tensor]:
        if torch.compiler.is_compiling():
            return operator.op(*args)[0]
        lengths = [len(a) if isinstance(a, list) else None for a in args]
        out = node.apply(formula, lengths, *(a for arg in args for a in (arg if isinstance(arg, list) else (arg,))))
        return list(out) if isinstance(out, tuple) else out

    return call
