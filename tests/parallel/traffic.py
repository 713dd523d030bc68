"""Counts what a piece of training sends: a dispatch mode that sees every collective, forward and backward."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What each collective is given on this rank: position of that argument.
SENT = {
    "_allgather_base_": 1,
    "all_gather_into_tensor": 0,
    "all_to_all_single": 0,
    "allreduce_": 0,
    "all_reduce": 0,
    "all_reduce_": 0,
}


class Traffic(TorchDispatchMode):
    """`sent[name]`: dtype and bytes of each call, in order. Names without their trailing underscore."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[tuple[torch.dtype, int]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and name in SENT:
            given = args[SENT[name]]
            tensors = [given] if isinstance(given, Tensor) else given
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.sent[name.strip("_")].append((tensors[0].dtype, size))
        return func(*args, **(kwargs or {}))

    def total(self, name: str) -> int:
        """Bytes of all calls."""
        return sum(size for _, size in self.sent[name])
