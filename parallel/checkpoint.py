"""What does a checkpoint see of a wrapped weight?  Nothing: plain tensors go out, and come back into the wrapper."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.wrapped_weight import WrappedWeight, map_local, plain


def plain_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """State-dict hook: checkpoints hold plain tensors. They share storage with the weights, so loading in place works.

    A pickled wrapper could not be opened by a model without it, nor by anybody with `weights_only` (ao#4782, tt#4240).
    """
    for name, _ in module.named_parameters(recurse=False):
        if (key := prefix + name) in state_dict:
            state_dict[key] = plain(state_dict[key])


def keep_wrapped(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any) -> None:
    """Load hook: with assign=True the tensors of a checkpoint take the weights' place, so they are wrapped first."""
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, param in module.named_parameters(recurse=False):
        key, local = prefix + name, param._local_tensor if isinstance(param, DTensor) else param
        if isinstance(local, WrappedWeight) and key in state_dict:
            state_dict[key] = map_local(state_dict[key], local.rewrap)


def wrap_parameters(module: nn.Module, wrap: Callable[[Tensor], WrappedWeight], names: list[str]) -> None:
    """Replaces the named parameters of `module` by wrapped ones, and keeps them so while its checkpoints stay plain."""
    for name in names:
        param = getattr(module, name)
        module.register_parameter(name, nn.Parameter(wrap(param.detach()), requires_grad=param.requires_grad))
    module._register_state_dict_hook(plain_state_dict)
    module.register_load_state_dict_pre_hook(keep_wrapped)
