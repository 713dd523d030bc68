"""How far are two passes of twins apart?  Rows of (what, SQNR, norms), the routing, gradient norms and a verdict.

SQNR in dB is 20 log10(|reference| / |reference - actual|): 6 dB are one bit, 0 dB is an error as large as the signal.
Two E4M3 operands leave 28.5 dB after one GEMM; errors add up along the depth, so a layer's "alone" column, its output
for the arguments that its high-precision twin got, tells whose error it is. A token that goes to another expert looks
like damage and is none: the routing has a table of its own, and "same route" leaves tokens out that changed experts in
this layer or before it.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts

from recipes.gradient_groups import group_of
from recipes.sqnr_twins import Twins
from recipes.sqnr_watch import Observed, converted, observe, plain, run, run_alone, watched

# Low damage. Logits and gradients: normal inputs through two GEMMs and a SwiGLU leave 23 dB in one layer
# (converters/config.py), a few layers in a row 3 to 6 dB less. Norms: 2 %, loss: 0.02.
LOW_LOGITS_DB, LOW_GRADIENT_DB, LOW_NORM_GAP, LOW_LOSS_GAP = 20.0, 10.0, 0.02, 0.02


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of both passes. kind: output, output gradient, gradient.

    sqnr_db: inf when equal, nan when one has a nan. alone_db: of a converted module's output for its twin's arguments.
    same_route_db: over the tokens whose experts agree up to here.
    """

    kind: str
    name: str
    sqnr_db: float
    reference_norm: float
    fp8_norm: float
    in_fp8: bool
    alone_db: float | None = None
    same_route_db: float | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """One MoE: share of (token, expert) choices that both make, and of tokens whose experts all agree."""

    name: str
    choices: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result. norms: group, or "total" -> gradient norms of the reference and of FP8 for this batch."""

    loss: tuple[float, float]
    logits_db: float
    rows: tuple[Row, ...]
    routing: tuple[Routing, ...]
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def worst(self) -> Row:
        """The tensor with the lowest SQNR; nan is worse than any number."""
        return self.rows[0]

    @property
    def low_damage(self) -> bool:
        """Whether logits, loss, gradients and gradient norms are as close as a healthy FP8 recipe brings them."""
        gradients = [row.sqnr_db for row in self.rows if row.kind == "gradient"]
        ratios = [abs(b / a - 1) for a, b in self.norms.values() if a]
        return (
            self.logits_db >= LOW_LOGITS_DB
            and abs(self.loss[1] - self.loss[0]) <= LOW_LOSS_GAP
            and all(db >= LOW_GRADIENT_DB for db in gradients)
            and all(ratio <= LOW_NORM_GAP for ratio in ratios)
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"low_damage": self.low_damage}


def sqnr_db(reference: Tensor, actual: Tensor) -> float:
    """Signal to quantization noise in dB, in float64; inf when equal, nan when either has a nan or inf."""
    reference, actual = reference.double(), actual.double()
    signal, noise = float(reference.norm()), float((reference - actual).norm())
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf


def measure(twins: Twins, warmup: int = 0) -> Report:
    """Runs both twins over the batch and compares.

    warmup: steps of the FP8 model, without an optimizer, before the measured one: for rules that remember scales.
    """
    for _ in range(warmup):
        run(twins.fp8, twins)
        twins.end_step()
    fp8_modules = {name for name, module in watched(twins.fp8).items() if converted(module)}
    reference = observe(twins.reference, twins, fp8_modules)
    fp8 = observe(twins.fp8, twins, set())
    alone = run_alone(twins.fp8, twins, reference.calls)
    agree = {name: _agree(chosen, fp8.chosen[name]) for name, chosen in reference.chosen.items() if name in fp8.chosen}
    same = {name: tokens.all(dim=1) for name, tokens in agree.items()}
    rows = [
        *_outputs(twins.fp8, reference, fp8, alone, same, fp8_modules),
        *_gradients(twins.fp8, reference, fp8),
    ]
    last = list(reference.outputs)[-1]  # the model's head
    return Report(
        loss=(reference.loss[0], fp8.loss[0]),
        logits_db=sqnr_db(reference.outputs[last], fp8.outputs[last]),
        rows=tuple(sorted(rows, key=lambda row: -math.inf if math.isnan(row.sqnr_db) else row.sqnr_db)),
        routing=tuple(
            Routing(name=name, choices=float(a.float().mean()), tokens=float(a.all(dim=1).float().mean()))
            for name, a in agree.items()
        ),
        norms=_norms(reference.grads, fp8.grads, twins.batch.micro_batches),
    )


def _agree(reference: Tensor, fp8: Tensor) -> Tensor:
    """bool [T, k]: whether a token's expert is among those that the other twin chose for it."""
    return (reference.unsqueeze(2) == fp8.unsqueeze(1)).any(dim=2)


def _outputs(
    model: nn.Module,
    reference: Observed,
    fp8: Observed,
    alone: dict[str, Tensor],
    same: dict[str, Tensor],
    fp8_modules: set[str],
) -> Iterable[Row]:
    so_far: Tensor | None = None  # tokens whose experts agree in every MoE up to this module
    for name in watched(model):
        a, b = reference.outputs.get(name), fp8.outputs.get(name)
        if name in same:
            so_far = same[name] if so_far is None else so_far & same[name]
        own = alone.get(name)
        alone_db = sqnr_db(a, own) if a is not None and own is not None and own.shape == a.shape else None
        if a is None or b is None or a.shape != b.shape:
            if alone_db is not None:  # no output, or one of another kind: fused ops, experts that return tokens
                yield _row("output", name, a, own, True, alone_db, None)
            continue
        pairs = [("output", a, b), ("output gradient", reference.output_grads.get(name), fp8.output_grads.get(name))]
        for kind, x, y in pairs:
            if x is None or y is None:
                continue
            if isinstance(model.get_submodule(name), GroupedExperts):
                moe = name.rpartition(".")[0]
                if moe not in same or not (moe in reference.order and moe in fp8.order):
                    continue
                x, y = (
                    _by_token(t, seen.order[moe], seen.chosen[moe])[same[moe]] for t, seen in ((x, reference), (y, fp8))
                )
            routed = None if so_far is None else _over(x, y, so_far)
            yield _row(kind, name, x, y, name in fp8_modules, alone_db if kind == "output" else None, routed)


def _by_token(rows: Tensor, order: Tensor, chosen: Tensor) -> Tensor:
    """[T * k, D] sorted by expert -> [T, k, D], the experts of a token in ascending order."""
    T, k = chosen.shape
    unsorted = torch.empty_like(rows)
    unsorted[order] = rows
    ranks = chosen.argsort(dim=1)
    return unsorted.view(T, k, -1).gather(1, ranks.unsqueeze(2).expand(T, k, rows.shape[-1]))


def _over(x: Tensor, y: Tensor, tokens: Tensor) -> float | None:
    """SQNR over the chosen tokens of [B, S, D] or [T, D]; None where the shape is another or no token is left."""
    if x.numel() % tokens.numel() or not tokens.any() or x.shape[:-1].numel() != tokens.numel():
        return None
    return sqnr_db(x.reshape(tokens.numel(), -1)[tokens], y.reshape(tokens.numel(), -1)[tokens])


def _gradients(model: nn.Module, reference: Observed, fp8: Observed) -> Iterable[Row]:
    in_fp8 = {name for name, module in model.named_modules() if converted(module)}
    for name, grad in reference.grads.items():
        other = fp8.grads.get(name, torch.zeros_like(grad))
        yield _row("gradient", name, grad, plain(other), name.rpartition(".")[0] in in_fp8, None, None)


def _row(kind: str, name: str, x: Tensor, y: Tensor, in_fp8: bool, alone_db: float | None, routed: float | None) -> Row:
    return Row(
        kind=kind,
        name=name,
        sqnr_db=sqnr_db(x, y),
        reference_norm=float(x.double().norm()),
        fp8_norm=float(y.double().norm()),
        in_fp8=in_fp8,
        alone_db=alone_db,
        same_route_db=routed,
    )


def _norms(reference: dict[str, Tensor], fp8: dict[str, Tensor], factor: int) -> dict[str, tuple[float, float]]:
    """Of all parameters and of each group. factor: micro-batches of a step, of which the loss is a share."""

    def norm(grads: dict[str, Tensor], group: str | None) -> float:
        chosen = [g for name, g in grads.items() if group is None or group_of(name) == group]
        return factor * math.sqrt(sum(float(g.double().norm()) ** 2 for g in chosen))

    groups = dict.fromkeys(group_of(name) for name in reference)
    return {group or "total": (norm(reference, group), norm(fp8, group)) for group in (None, *groups)}
