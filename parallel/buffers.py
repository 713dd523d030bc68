"""How does a forward that is no part of training leave a model as it was?

A module's buffers count what passes: torchtitan's MoE adds the tokens of each expert to `tokens_per_expert`, whatever
they are, and the next optimizer step moves the routing bias by the sum. So what passes beside training is put back:
validation (recipes/validation.py), and the made-up values from which a pipeline stage learns shapes (pipeline.py).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At its end, also after an error, the buffers of `modules` have the values that they began with.

    A buffer that was rebound, or written through `.data` or a DTensor's local tensor, is not noticed.
    """
    before = [(buffer, buffer._version, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:  # the others may be saved for a backward that is still to come
                    buffer.copy_(value)
