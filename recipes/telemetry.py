"""When is a step measured, and how do the ranks' sums become one set of figures?

    forward pre-hook     of the model, before the first micro-batch of a measured step: taps open, loads are noted
    before clipping      loads of the experts over all micro-batches (the optimizer sets torchtitan's counts to zero)
    end of the step      two all-reduces over the world, maxima and sums; one copy to the host; figures; taps close

Measured are steps 1 and 2, where a cold scale shows, and every N-th. Nothing waits for the device before the end of a
measured step, and in between nothing is computed at all. Every rank's sample counts: with expert parallelism each has
other experts, with data parallelism other rows; ranks that hold the same (tensor parallelism) weigh twice in both terms
of a share. With pipeline parallelism a stage adds its own layers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import MoE
from torchtitan.tools import utils

from converters.expert_weight import FP8ExpertWeight
from converters.selection import clean_fqn
from converters.telemetry import Tap, claim, release
from converters.telemetry_records import MAXIMA, OPERAND, Key, gemm_records, operand_records
from recipes.finite import GradNorms
from recipes.gradient_groups import NAMES, GradientGroups
from recipes.telemetry_tags import GEMMS, GRAD_NORM, OPERANDS, ROOT, gemm_figures, load_figures, operand_figures

Loads = dict[str, dict[int, list[float]]]


def attach_taps(model_parts: list[nn.Module]) -> list[FP8ExpertWeight]:
    """Gives each FP8 weight of these models a tap, under its name in the model. -> The weights."""
    weights = []
    for part in model_parts:
        for fqn, parameter in part.named_parameters():
            weight = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            if isinstance(weight, FP8ExpertWeight):
                weight.tap = Tap(clean_fqn(fqn).removesuffix(".weight"))
                claim(weight._data, weight.tap)
                weights.append(weight)
    return weights


class Telemetry:
    """Measures the steps of one run, on every rank. The metrics processor calls it (telemetry_report.py)."""

    def __init__(
        self, model_parts: list[nn.Module], every: int, *, owns_plain: bool, twin: Loads | None = None
    ) -> None:
        """every: 1 or more. owns_plain: see count_zeros. twin: loads of another run, for the rank that logs."""
        self._every, self._twin = every, twin or {}
        self._weights = attach_taps(model_parts)
        self._taps = [weight.tap for weight in self._weights]
        modules = [(clean_fqn(fqn), m) for part in model_parts for fqn, m in part.named_modules()]
        self._moes = {fqn: m for fqn, m in modules if isinstance(m, MoE)}
        self._groups = GradientGroups(model_parts, owns_plain)
        self._due, self._open = True, False  # a resumed run's first step may be one to measure
        self._layout: tuple[list[Key], dict[str, int]] | None = None
        self._before: Tensor | None = None
        self._loads: Tensor | None = None
        self._hooks = [part.register_forward_pre_hook(self._forward) for part in model_parts]

    def due(self, step: int) -> bool:
        """Whether `step` is measured."""
        return step <= 2 or step % self._every == 0

    def remove(self) -> None:
        """Ends all measuring."""
        for hook in self._hooks:
            hook.remove()
        self._close()
        for weight in self._weights:
            weight.tap = None
        self._taps = []
        release()

    def _forward(self, part: nn.Module, args: Any) -> None:
        training = part.training and torch.is_grad_enabled() and not getattr(part, "rehearses", False)
        if not self._due or self._open or not training:
            return
        self._open = True
        self._before = self._counts()
        for tap in self._taps:
            tap.open()

    def before_clipping(self) -> None:
        """To be called when all micro-batches are done."""
        if self._open:
            self._loads = self._counts() - self._before

    def _counts(self) -> Tensor:
        """Rows of every expert, layer after layer."""
        counts = [moe.tokens_per_expert for moe in self._moes.values()]
        return torch.cat(counts) if counts else torch.empty(0, device=utils.device_type)

    def end_step(self, step: int, norms: GradNorms | None) -> dict[str, float] | None:
        """To be called on every rank once a step, after the optimizer; norms: of this step's gradients.

        Returns:
            TensorBoard's tags and values, on every rank; None if the step was not measured.
        """
        figures = self._collect(norms, step) if self._open and self.due(step) else None
        self._close()
        self._due = self.due(step + 1)
        return figures

    def _close(self) -> None:
        self._open, self._before, self._loads = False, None, None
        for tap in self._taps:
            tap.close()
            tap.found = []

    def _collect(self, norms: GradNorms | None, step: int) -> dict[str, float]:
        found, device = [each for tap in self._taps for each in tap.found], torch.device(utils.device_type)
        mine = {fqn: len(moe.tokens_per_expert) for fqn, moe in self._moes.items()}
        if self._layout is None:
            self._layout = _agree({key for key, _ in found}, mine)
        keys, experts = self._layout
        operands, gemms = ([k for k in keys if k[1] in names] for names in (OPERANDS, GEMMS))
        records, n = operand_records(found, operands, device), len(MAXIMA)
        sums = [
            records[:, n:].flatten(),
            gemm_records(found, gemms, device).flatten(),
            _placed(self._loads, mine, experts, device),
            self._groups.squares(norms, device),
        ]
        values = _reduced(records[:, :n].flatten(), torch.cat(sums))
        return self._figures(operands, gemms, experts, *values, step)

    def _figures(
        self, operands: list[Key], gemms: list[Key], experts: dict[str, int], maxima: list, sums: list, step: int
    ) -> dict[str, float]:
        n, figures = len(MAXIMA), {}
        largest, rest = iter(maxima), iter(sums)
        take = lambda source, count: [next(source) for _ in range(count)]  # noqa: E731
        for label, key in operands:
            record = [*take(largest, n), *take(rest, len(OPERAND) - n)]
            figures |= {f"{ROOT}{label}/{key}/{name}": v for name, v in operand_figures(record).items()}
        for label, key in gemms:
            figures |= {f"{ROOT}{label}/{key}/{name}": v for name, v in gemm_figures(take(rest, 2)).items()}
        for fqn, E in experts.items():
            found = load_figures(take(rest, E), self._twin.get(fqn, {}).get(step))
            figures |= {f"{ROOT}{fqn}/{name}": v for name, v in found.items()}
        squares = dict(zip(NAMES, take(rest, len(NAMES)), strict=True))
        return figures | {f"{GRAD_NORM}{group}": square**0.5 for group, square in squares.items() if square != 0}


def _placed(loads: Tensor | None, mine: dict[str, int], everywhere: dict[str, int], device: torch.device) -> Tensor:
    """float64: this rank's loads, layer after layer as in `mine`, at their places among those of all ranks."""
    if loads is None:
        return torch.zeros(sum(everywhere.values()), dtype=torch.float64, device=device)
    loads = loads.double().to(device)
    if mine == everywhere and list(mine) == list(everywhere):
        return loads
    parts = dict(zip(mine, loads.split(list(mine.values())), strict=True))
    return torch.cat([parts[fqn] if fqn in parts else loads.new_zeros(E) for fqn, E in everywhere.items()])


def _agree(keys: set[Key], experts: dict[str, int]) -> tuple[list[Key], dict[str, int]]:
    """What any rank has, in the same order on all. Once a run."""
    mine = (sorted(keys), experts)
    if dist.is_initialized():
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
    else:
        everywhere = [mine]
    moes = {fqn: E for _, theirs in everywhere for fqn, E in theirs.items()}
    return sorted({key for theirs, _ in everywhere for key in theirs}), dict(sorted(moes.items()))


def _reduced(maxima: Tensor, sums: Tensor) -> tuple[list[float], list[float]]:
    """Over the ranks, on the host: the one place that waits for the device."""
    if dist.is_initialized():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        dist.all_reduce(sums)
    values = torch.cat([maxima, sums]).tolist()
    return values[: len(maxima)], values[len(maxima) :]
