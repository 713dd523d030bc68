"""Stops a run whose loss or gradients are nan or inf, and names the step and the first bad parameter.

Two facts make this more than a look at `p.grad`. torchtitan takes a step's gradient norm to the host only when it logs,
every `metrics.log_freq` steps, and a checkpoint may be saved in between. And `clip_grad_norm_` multiplies all gradients
by max_norm / norm: after a nan norm every one of them is nan, and which was first cannot be told any more. So the norm
of each gradient is kept from clipping, which takes them first, and all norms stay on the device until somebody looks:

- at a step that logs: at once (torchtitan waits for the norm there anyway);
- at the last step and one that saves a checkpoint: at once, before it is saved;
- at any other step: one step later, when the norm has long reached the host. Nothing waits for the device.

At a step that logs the gradients' exact zeros are counted too (zero_gradients.py).

Cost: no pass of its own over the gradients (one more would be 4.5 ms for Scout's width in two layers on an H200, 2 % of
a step). Not covered: a weight that the optimizer makes nan out of
finite gradients at the very step of a checkpoint; the next step's loss shows it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

from converters.selection import clean_fqn
from recipes.zero_gradients import ZeroCount, count_zeros


class NonFiniteError(RuntimeError):
    """The loss or a gradient of training step `step` is nan or inf."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class GradNorms:
    """Gradient norms of one step, before clipping.

    indices: positions in the parameter list of those with a gradient. norms [len(indices)]: of this rank's shards, on
    the device. total: the global norm on the host, valid once `ready` (None: already) has happened. zeros [2]: see
    count_zeros; None if this step does not log.
    """

    indices: tuple[int, ...]
    norms: torch.Tensor
    total: torch.Tensor
    ready: torch.cuda.Event | None
    zeros: torch.Tensor | None
    step: int = -1

    def total_norm(self) -> float:
        """The global norm; waits for its copy to the host."""
        if self.ready is not None:
            self.ready.synchronize()
        return float(self.total)


class GradientWatch:
    """Watches the gradients of `model_parts` from `install()` to `remove()`.

    torchtitan's `dist_utils.clip_grad_norm_` is replaced in between: it is the one place between backward and clipping
    that every parallelism passes. `_latest` and `_pending` are the norms of this step and of the one before.
    """

    def __init__(self, model_parts: list[nn.Module], *, owns_plain: bool = True) -> None:
        """`owns_plain`: whether this rank counts the zeros of gradients that are no DTensors (see count_zeros)."""
        self._model_parts = model_parts
        self._owns_plain = owns_plain
        self._counts = True  # a resumed run's first step may be one that logs
        self._original = dist_utils.clip_grad_norm_
        self.before_clipping: Callable[[], None] | None = None  # called with all gradients there, and none clipped
        self._latest: GradNorms | None = None
        self._pending: GradNorms | None = None

    def install(self) -> None:
        """Starts watching."""
        dist_utils.clip_grad_norm_ = self._clip

    def remove(self) -> None:
        """Gives torchtitan its own function back, unless somebody replaced ours meanwhile."""
        if dist_utils.clip_grad_norm_ == self._clip:
            dist_utils.clip_grad_norm_ = self._original

    def _clip(self, parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        indices = tuple(i for i, p in enumerate(parameters) if p.grad is not None)
        grads = [parameters[i].grad for i in indices]
        if self.before_clipping is not None:
            self.before_clipping()
        zeros = count_zeros(grads, owns_plain=self._owns_plain) if self._counts else None
        with _norms_kept() as found:
            total = self._original(parameters, *args, **kwargs)
        norms = _local_norms([found[id(grad)] for grad in grads])
        host, ready = _to_host(total)
        self._latest = GradNorms(indices=indices, norms=norms, total=host, ready=ready, zeros=zeros)
        return total

    @property
    def latest(self) -> GradNorms | None:
        """The norms of the step that `end_step` has not ended yet."""
        return self._latest

    def end_step(self, step: int, look_now: bool, count_next: bool = False) -> None:
        """To be called once a step, after the optimizer and before a checkpoint. `count_next`: the next step logs.

        Raises:
            NonFiniteError: the gradient norm of the step before, or with `look_now` of this one, is not finite.
        """
        self._counts = count_next
        before, self._pending = self._pending, None
        if before is not None and not math.isfinite(norm := before.total_norm()):
            raise NonFiniteError(self._describe(before.step, norm, None, before), before.step)
        if self._latest is None:
            return
        latest, self._latest = replace(self._latest, step=step), None
        self._pending = latest
        if look_now and not math.isfinite(norm := latest.total_norm()):
            raise NonFiniteError(self._describe(step, norm, None, latest), step)

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Raises NonFiniteError when the logged loss or gradient norm of `step` is not finite."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            norms = self._pending if self._pending is not None and self._pending.step == step else None
            raise NonFiniteError(self._describe(step, grad_norm, loss, norms), step)

    def zeros(self, step: int) -> ZeroCount | None:
        """Zeros in the gradients of `step`, the one that ended last; None if it was not counted. Waits for it."""
        at = self._pending
        return ZeroCount(*at.zeros.tolist()) if at is not None and at.step == step and at.zeros is not None else None

    def _describe(self, step: int, grad_norm: float, loss: float | None, norms: GradNorms | None) -> str:
        values = f"gradient norm is {grad_norm}" if loss is None else f"loss is {loss}, gradient norm {grad_norm}"
        where = self._where(norms) if norms is not None else "Its gradients were not watched."
        return (
            f"Step {step}: {values}. {where} No checkpoint was saved after this step: go back to the last one, "
            "with a lower learning rate or another [fp8] recipe."
        )

    def _where(self, norms: GradNorms) -> str:
        names = [clean_fqn(fqn) for part in self._model_parts for fqn, _ in part.named_parameters()]
        finite = norms.norms.isfinite().tolist()
        bad = [names[i] for i, good in zip(norms.indices, finite, strict=True) if not good]
        if not bad:
            return "This rank's own gradients are finite: see the message of another rank."
        # Backward runs from the last layer to the first and spreads a nan downwards, so the last in order came first.
        text = f"{len(bad)} of {len(finite)} gradients are non-finite; the first that backward reached is {bad[-1]}."
        return text if finite[-1] else text + " It is the model's last: the loss or the forward pass itself is broken."


@contextmanager
def _norms_kept() -> Iterator[dict[int, torch.Tensor]]:
    """The norm of each tensor that `torch._foreach_norm` is called on meanwhile, by the tensor's id.

    torchtitan clips with foreach = True, and then torch takes all norms by this one function or raises.
    """
    original, found = torch._foreach_norm, {}

    def keep(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        norms = original(tensors, *args, **kwargs)
        found.update((id(tensor), norm) for tensor, norm in zip(tensors, norms, strict=True))
        return norms

    torch._foreach_norm = keep
    try:
        yield found
    finally:
        torch._foreach_norm = original


@torch.no_grad()
def _local_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    """This rank's part of each norm, [len(norms)] float32, without waiting for the device."""
    local = [norm.to_local() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack([norm.float() for norm in local]) if local else torch.empty(0)


def _to_host(total: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy of `total` on the host, and the event after which it is there (None: it is)."""
    if total.device.type != "cuda":
        return total.detach().to("cpu", copy=True), None
    # Only a copy into pinned memory lets the host go on.
    host = torch.empty(total.shape, dtype=total.dtype, pin_memory=True).copy_(total.detach(), non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
