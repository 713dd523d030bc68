"""How a kernel becomes a torch operator of the namespace `titan_moe_fp8`.

A plain `torch.library.Library`: what `torch.library.custom_op` adds around it costs 20 us a call, and a layer with few
tokens makes thirty calls in 3 ms. No operator returns an argument, none has a gradient of its own, and none writes into
an argument that is not named in `mutates_args`.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "titan_moe_fp8"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def operator(
    fake: Callable[..., Any], mutates_args: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers the function under its name; `fake` makes outputs of the right shapes without computing."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register
