"""Where delayed scaling remembers: buffers of a module, which its checkpoint holds, and the ops that use them.

    forward slots    x and w of each GEMM: read in forward, written after it
    backward slots   dY of each GEMM: read in backward, written after it

A forward that recomputation repeats, inside of backward, is recognized by the autograd engine's task: it reads what the
first one has used (`used`, this rank's own) and writes nothing. Nor does a forward without gradients (validation).

Every rank holds the state of all experts, the same: maxima are reduced over `group` as they are recorded, so a
checkpoint does not depend on the layout.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from converters.delayed_config import DelayedConfig
from converters.rules.delayed import multiplier_for, update
from converters.rules.formats import E4M3, FORMATS, Format

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What an op needs to know of one call beside the tensors. first: the first local expert among all; group: the
    ranks' name, "" for none; record: whether this call leaves a trace.
    """

    config: DelayedConfig
    first: int = 0
    group: str = ""
    record: bool = True

    @property
    def key(self) -> str:
        """As one string, for an op. `Call.parse` is the inverse."""
        return "|".join((self.config.key, str(self.first), self.group, str(self.record)))

    @staticmethod
    def parse(key: str) -> "Call":
        """The call whose `key` this is."""
        config, first, group, record = key.split("|")
        return Call(DelayedConfig.parse(config), int(first), group, record == "True")


class Slots(nn.Module):
    """The state of one pass. amax_history [L, S, E] and multiplier [S, E] are saved; the rest is over with the step.

    used [S, 2, E]: multiplier and scale of the last forward, on this rank. cached [S, E]: the multipliers that cached
    weights were made with. fresh [E]: 1 from the optimizer's step to the first forward.
    """

    def __init__(self, slots: int, experts: int, fmt: Format, config: DelayedConfig) -> None:
        super().__init__()
        self.fmt, self.config = fmt, config
        shape = {"device": None, "dtype": torch.float32}
        self.register_buffer("amax_history", torch.empty(config.amax_history_len, slots, experts, **shape))
        self.register_buffer("multiplier", torch.empty(slots, experts, **shape))
        self.register_buffer("used", torch.empty(slots, 2, experts, **shape), persistent=False)
        self.register_buffer("cached", torch.empty(slots, experts, **shape), persistent=False)
        self.register_buffer("fresh", torch.empty(experts, **shape), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Nothing was seen: scale 1."""
        for name, value in (("amax_history", 0), ("multiplier", 1), ("used", 1), ("cached", 1), ("fresh", 1)):
            _local(getattr(self, name)).fill_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps float32 whatever the model is cast to, and is as new when it leaves the meta device."""
        was_meta = _local(self.multiplier).is_meta
        to_float32 = lambda t: t if (out := fn(t)) is t else _moved(t, out)  # noqa: E731
        super()._apply(to_float32, recurse)
        if was_meta and not _local(self.multiplier).is_meta:
            self.reset()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """A model of a run without state loads too, and then this one begins as new."""
        if any(name.startswith(prefix) for name in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *rest)
        else:
            logger.warning("%s is not in what is loaded: delayed scaling begins as in a new run.", prefix)

    def tensors(self) -> list[Tensor]:
        """amax_history, multiplier, used, cached, fresh: this rank's."""
        return [_local(b) for b in (self.amax_history, self.multiplier, self.used, self.cached, self.fresh)]

    @torch.no_grad()
    def end_step(self) -> None:
        """After the optimizer's step: cached weights are old, and scales that change once a step change now."""
        history, multiplier, _, _, fresh = self.tensors()
        fresh.fill_(1)
        if self.config.update == "step":
            update(history, multiplier, self.fmt.max, self.config)


class DelayedState(nn.Module):
    """The state of a module with `gemms` GEMMs of `experts` experts (1: a dense layer), as a child of that module.

    gradients: "e4m3" or "e5m2", the format of dY. `group`: name of the ranks that maxima are reduced over, "" for none.
    """

    def __init__(self, gemms: int, experts: int, gradients: str, config: DelayedConfig) -> None:
        super().__init__()
        self.config, self.group = config, ""
        self.fwd = Slots(2 * gemms, experts, E4M3, config)
        self.bwd = Slots(gemms, experts, FORMATS[gradients], config)

    def tensors(self) -> list[Tensor]:
        """What the ops take: the five of `fwd`, then history and multiplier of `bwd`."""
        return [*self.fwd.tensors(), *self.bwd.tensors()[:2]]

    def call(self, first: int) -> Call:
        """For a call of the experts from `first` on."""
        return Call(self.config, first, self.group, self.training and torch.is_grad_enabled())

    def end_step(self) -> None:
        """To be called after the optimizer's step: converters do it in their post_optimizer_hook."""
        self.fwd.end_step()
        self.bwd.end_step()

    def extra_repr(self) -> str:
        """The options."""
        return str(self.config)


def _local(t: Tensor) -> Tensor:
    return t._local_tensor if isinstance(t, DTensor) else t


def _moved(t: Tensor, out: Tensor) -> Tensor:
    return out if out.dtype == t.dtype else t.to(out.device)


def recomputing() -> bool:
    """Whether this forward is repeated within a backward. Only an op's body, run for real, can tell."""
    return torch._C._current_graph_task_id() != -1


def forward_given(state: list[Tensor], experts: int, call: Call) -> Tensor:
    """What the local experts' forward operands are cast with: [S, 2, E_local], for `Delayed`."""
    history, multiplier, used, cached, fresh = (t[..., call.first : call.first + experts] for t in state[:5])
    if recomputing():
        return used.clone()
    given = _given(history, multiplier, call.config)
    if call.config.weights != "every_microbatch":
        data = torch.where(fresh > 0, given[1::2, 0], cached[1::2])
        stale = call.config.weights == "cached_stale_scale"
        given[1::2, 1] = torch.where(fresh > 0, given[1::2, 1], (multiplier[1::2] if stale else data).reciprocal())
        given[1::2, 0] = data
    return given


def backward_given(state: list[Tensor], experts: int, call: Call) -> Tensor:
    """The same of the gradients: [S, 2, E_local]."""
    return _given(*(t[..., call.first : call.first + experts] for t in state[5:]), call.config)


def _given(history: Tensor, multiplier: Tensor, config: DelayedConfig) -> Tensor:
    if config.warm_start:
        multiplier = torch.where(history.amax(0) == 0, 0.0, multiplier)
    return torch.stack([multiplier, multiplier.reciprocal()], dim=1)


@torch.library.custom_op(
    "titan_moe_fp8::delayed_record_forward", mutates_args=("history", "multiplier", "used", "cached", "fresh")
)
def record_forward(
    history: Tensor,
    multiplier: Tensor,
    used: Tensor,
    cached: Tensor,
    fresh: Tensor,
    now: Tensor,
    amax: Tensor,
    key: str,
) -> None:
    """Writes what a forward has used and seen: now [S, 2, E_local] and amax [S, E_local]; updates the scales."""
    call, E = Call.parse(key), amax.shape[1]
    if recomputing() or not call.record:
        return
    local = slice(call.first, call.first + E)
    used[..., local] = now
    if call.config.weights != "every_microbatch":
        amax = amax.clone()
        amax[1::2] = torch.where(fresh[local] > 0, amax[1::2], 0)  # not cast again, so not seen again
        cached[..., local] = torch.where(fresh[local] > 0, now[:, 0], cached[..., local])
        fresh[local] = 0
    _record(history, multiplier, amax, call, E4M3.max)


@torch.library.custom_op("titan_moe_fp8::delayed_record_backward", mutates_args=("history", "multiplier"))
def record_backward(history: Tensor, multiplier: Tensor, amax: Tensor, key: str, fmt_max: float) -> None:
    """The same for a backward: amax [S, E_local]."""
    call = Call.parse(key)
    if call.record:
        _record(history, multiplier, amax, call, fmt_max)


def _record(history: Tensor, multiplier: Tensor, amax: Tensor, call: Call, fmt_max: float) -> None:
    everywhere = torch.zeros_like(history[0])
    everywhere[:, call.first : call.first + amax.shape[1]] = amax
    if call.group:
        dist.all_reduce(everywhere, dist.ReduceOp.MAX, group=_resolve_process_group(call.group))
    if call.config.warm_start:
        first = (history.amax(0) == 0) & torch.isfinite(everywhere) & (everywhere > 0)
        multiplier.copy_(torch.where(first, multiplier_for(everywhere, fmt_max, call.config.margin), multiplier))
    history[0] = torch.maximum(history[0], everywhere)
    if call.config.update == "microbatch":
        update(history, multiplier, fmt_max, call.config)
