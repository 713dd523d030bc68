"""What one forward and backward of a model leaves: outputs, their gradients, the parameters' gradients, the routing.

Watched are the model's parts, its layers, and their modules two levels down: attention and its projections, the MoE,
its routed and shared experts, norms. T tokens, k experts of a token.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, TokenReorderer

from converters.gathered_weight import JOINED
from parallel.wrapped_weight import WrappedWeight
from recipes.sqnr_twins import Batch, Twins


@dataclass(frozen=True)
class Observed:
    """One pass. Keys are module or parameter names.

    outputs, output_grads: of modules. calls: arguments of modules that hold converted weights. grads: of parameters.
    chosen [T, k]: the experts of each token, of every MoE. order [T * k]: for every MoE, by which pairs of token and
    choice its rows are sorted. loss: mean over the batch's tokens.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    output_grads: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, tuple[tuple, dict]] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    chosen: dict[str, Tensor] = field(default_factory=dict)
    order: dict[str, Tensor] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)


def watched(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose outputs are compared, by name, in the order of the model."""
    depth = re.compile(r"(?!layers$)(layers\.\d+(\.\w+){0,2}|\w+)")
    return {name: module for name, module in model.named_modules() if depth.fullmatch(name)}


def converted(module: nn.Module) -> bool:
    """Whether `module` itself owns an FP8 weight, or all of its weights are."""
    own = [isinstance(p, WrappedWeight) for p in module.parameters(recurse=False)]
    everything = [isinstance(p, WrappedWeight) for p in module.parameters()]
    return any(own) or (bool(everything) and all(everything))


def observe(model: nn.Module, twins: Twins, record_calls_of: set[str]) -> Observed:
    """One forward and backward of `model` over the twins' batch. Gradients of before are dropped, those of it kept.

    record_calls_of: modules whose arguments are kept, to run their twins with them.
    """
    seen = Observed()
    model.zero_grad(set_to_none=True)
    with _hooks(model, seen, record_calls_of):
        run(model, twins, seen)
    for name, p in model.named_parameters():
        if p.grad is not None:
            seen.grads[name] = plain(p.grad)
    return seen


def run(model: nn.Module, twins: Twins, seen: Observed | None = None) -> None:
    """Forward, loss as in training (sum over tokens, divided by those of a step), backward."""
    batch: Batch = twins.batch
    with twins.amp():
        logits = model(batch.inputs, **batch.kwargs)
        total = twins.loss(logits, batch.labels)
    if seen is not None:
        seen.loss.append(float(total.detach()) / (batch.tokens / batch.micro_batches))
    (total / batch.tokens).backward()


def plain(t: Tensor) -> Tensor:
    """`t` outside of autograd and of our wrapper."""
    return t.detach()._data if isinstance(t, WrappedWeight) else t.detach()


@contextmanager
def _hooks(model: nn.Module, seen: Observed, record_calls_of: set[str]) -> Iterator[None]:
    # A layer that is one op with others no longer is when it has a hook: its output is left out.
    free = {name: m for name, m in watched(model).items() if not hasattr(m, JOINED)}
    handles = [m.register_forward_hook(partial(_output, seen, name)) for name, m in free.items()]
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            handles.append(module.router.register_forward_hook(partial(_routing, seen.chosen, name)))
            for part in module.modules():
                if isinstance(part, TokenReorderer):
                    handles.append(part.register_forward_hook(partial(_routing, seen.order, name)))
        if name in record_calls_of:
            hook: Callable[..., None] = partial(_call, seen, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output(seen: Observed, name: str, module: nn.Module, args: tuple, out: Any) -> None:
    if not (isinstance(out, Tensor) and out.is_floating_point()):
        return
    seen.outputs[name] = out.detach()
    if out.requires_grad:
        out.register_hook(lambda g: seen.output_grads.__setitem__(name, g.detach()))


def _routing(found: dict[str, Tensor], name: str, module: nn.Module, args: tuple, out: Any) -> None:
    if isinstance(out, tuple) and len(out) > 1:  # (scores, experts or order, rows per expert)
        found[name] = out[1].detach()


def _call(seen: Observed, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    def cut(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    seen.calls[name] = (tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()})


@torch.no_grad()
def run_alone(fp8: nn.Module, twins: Twins, calls: dict[str, tuple[tuple, dict]]) -> dict[str, Tensor]:
    """Outputs of the FP8 model's modules for the arguments that their twins got: their own error, none from before."""
    with twins.amp():
        return {name: fp8.get_submodule(name)(*args, **kwargs) for name, (args, kwargs) in calls.items()}
