"""Batches whose copy to the GPU the host does not wait for.

torchtitan 0.2.2 keeps batches on the host and copies them with a plain `.to(device)` as a step begins: the tokens, the
labels, and the count of labels that it has just made of them. Each waits until the GPU has done all the steps before,
which then has nothing to do until the host has launched the next kernels: 2.1 ms a step (172 ms) on an H200. The copies
are asked for in the middle of torchtitan's train_step, so it is the tensors that do them in another way. What several
data-parallel ranks wait for a moment later is in token_count.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Batch = tuple[dict[str, Any], Tensor]


class HostTensor(Tensor):
    """A tensor on the host. `.to` a GPU gives a plain tensor at once, copied from pinned memory when its turn comes.

    What is computed from it, also in place (`count += (labels != 0).sum()`), is one too.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any operation on it."""
        kwargs = kwargs or {}
        if func is Tensor.to:
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
            if device is not None and device.type == "cuda":
                # torch's allocator of pinned memory keeps the block until the copy is done, whoever drops the tensor.
                # A tensor that is pinned already (`pin_memory = true`) is taken as it is.
                pinned = args[0].as_subclass(Tensor).pin_memory()
                return pinned.to(device, dtype, non_blocking=True, memory_format=memory_format)
        return super().__torch_function__(func, types, args, kwargs)


def host_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, every tensor in them a HostTensor over the same memory."""
    for inputs, labels in batches:
        yield {key: _host(value) for key, value in inputs.items()}, _host(labels)


def _host(value: Any) -> Any:
    return value.as_subclass(HostTensor) if isinstance(value, Tensor) else value
