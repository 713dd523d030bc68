"""How a function becomes a torch operator of the namespace `titan_moe_fp8`.

Whoever traces (torch.compile, fake tensors, selective recomputation) sees one node, and so does a tensor subclass: what
tensor parallelism hands over may still be on its way (AsyncCollectiveTensor) and has no address for a kernel. Otherwise
the function is called as it is. An operator's own cost on the host, 8 to 15 us a call, would be a third of all that a
layer with few tokens has.

A plain `torch.library.Library`: what `torch.library.custom_op` adds costs 20 us a call more. No operator returns an
argument, none has a gradient of its own (differentiable.py gives it one), and none writes into an argument that is not
named in `mutates_args`.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NAMESPACE = "titan_moe_fp8"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: float32 products in it stay float32, as they do where torch.compile calls it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return call


def _speaks_for_itself(args: Iterable[Any]) -> bool:
    """Whether one of them is a tensor of a kind of its own."""
    for a in args:
        if (kind := type(a)) is Tensor:
            continue
        if kind is list:
            if _speaks_for_itself(a):
                return True
        elif kind is not Parameter and isinstance(a, Tensor):
            return True
    return False


def operator(
    fake: Callable[..., Any], mutates_args: tuple[str, ...] = (), name: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers the function under its name, or `name`; `fake` makes outputs of the right shapes without
    computing. The operator itself is the result's `op`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        own = name or function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(own + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(own, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{own}", fake, lib=LIBRARY)
        op = getattr(getattr(torch.ops, NAMESPACE), own).default

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _get_current_dispatch_mode_stack():
                return op(*args, **kwargs)
            if _speaks_for_itself(args) or (kwargs and _speaks_for_itself(kwargs.values())):
                return op(*args, **kwargs)
            return function(*args, **kwargs)

        call.op = op
        return call

    return register
