"""What does selective recomputation count that is no part of the model?

torch 2.13 numbers each op of a checkpointed region, and an op that shows up in the recomputation with a number the
forward did not reach is an error. With expert parallelism torchtitan shards the experts inside the region, and FSDP2
does not gather, copy out and annotate equally often in both. So `activation_checkpoint.mode = "selective"` with option
"op", which is torchtitan's default, fails in the first backward (torchtitan#3427, pytorch#196862), in BF16 as in FP8.

Here FSDP2's hooks run outside of that counting. What they make, gathered weights, was never saved anyway.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

HOOKS = ("_pre_forward", "_post_forward")  # of a module: unshard, cast inputs; reshard, cast outputs
SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def _uncounted(hook: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # as the hook itself
    @functools.wraps(hook)
    def uncounted(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(mode, SELECTIVE) for mode in _get_current_dispatch_mode_stack()):
            return hook(*args, **kwargs)
        with _disable_current_modes():
            return hook(*args, **kwargs)

    uncounted.is_uncounted = True
    return uncounted


def keep_fsdp_out_of_recomputation() -> None:
    """Makes selective recomputation ignore FSDP2's hooks in models sharded from now on. Idempotent."""
    for name in HOOKS:
        hook = getattr(FSDPState, name)
        if not hasattr(hook, "is_uncounted"):
            setattr(FSDPState, name, _uncounted(hook))
