"""Which modules does a pattern pick, and what is left out and why?

A pattern is a run of whole path components with shell wildcards: `layers.3.moe.experts`, `layers.[0-3]`, `experts`. It
picks the expert modules whose path contains that run, so `experts` never takes `shared_experts`. An expert module owns
stacked weights [E, N, K]: torchtitan's GroupedExperts always, any other module only when a pattern names it.
"""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torchtitan.models.moe.moe import GroupedExperts, TokenChoiceTopKRouter

from converters.config import FP8GroupedExpertsConfig, Numerics
from converters.operands import ALIGNMENT

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")  # parts of names


@dataclass(frozen=True)
class ConvertedWeight:
    """One weight that was wrapped. shape (E, N, K), or (N, K) of a linear layer."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    note: str = ""


@dataclass(frozen=True)
class SkippedModule:
    """One module with weights that stays as it is, and why."""

    fqn: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What a converter did to a model; kept on the root module as `conversion_reports`."""

    converter: str
    recipe: str
    backend: str
    converted: tuple[ConvertedWeight, ...]
    skipped: tuple[SkippedModule, ...]
    notes: tuple[str, ...] = ()
    numerics: Numerics | None = None
    kind: Literal["expert", "linear"] = "expert"

    def summary(self) -> str:
        """One line for the log."""
        reasons = Counter(s.reason for s in self.skipped)
        left = "; ".join(f"{n} {reason}" for reason, n in reasons.items()) or "nothing"
        return (
            f"{self.converter}: {weights_of(self, self.kind)} in FP8 ({self.recipe}, {self.backend} backend); "
            f"modules left as they are: {left}." + "".join(f" {note[0].upper()}{note[1:]}." for note in self.notes)
        )


def weights_of(report: ConversionReport, kind: str = "") -> str:
    """How many weights were converted, in words."""
    n = len(report.converted)
    return f"{n} {kind} weight".replace("  ", " ") + "s" * (n != 1)


def stacked_weights(module: nn.Module) -> list[str]:
    """Names of the module's own weights [E, N, K]."""
    return [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.is_floating_point()]


def matches(fqn: str, pattern: str) -> bool:
    """Whether the components of `pattern` are a run of the components of `fqn`."""
    path, want = fqn.split("."), pattern.split(".")
    runs = (path[i : i + len(want)] for i in range(len(path) - len(want) + 1))
    return any(all(map(fnmatchcase, run, want)) for run in runs)


def _named(fqn: str, module: nn.Module, pattern: str) -> bool:
    """Whether a pattern picks a module: a layer's pattern its GroupedExperts, but other modules only by their own name.

    `layers.0` would take a convolution there, whose weight has three dims too.
    """
    own = fqn if isinstance(module, GroupedExperts) else ".".join(fqn.split(".")[-len(pattern.split(".")) :])
    return matches(own, pattern)


def clean_fqn(fqn: str) -> str:
    """`fqn` without the names that activation checkpointing, compile and FSDP1 wrap in."""
    for wrapper in _WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def layer_of(fqn: str) -> int | None:
    """The number of the transformer layer that a name lies in."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", fqn)
    return int(found[1]) if found else None


def in_layers(end: Literal["first", "last"], n: int) -> str:
    """Why a module is left out that lies in the first or the last n layers."""
    return f"in the {end} {f'{n} layers' if n > 1 else 'layer'} (skip_{end}_layers)"


def _check_patterns(patterns: list[str], candidates: dict[str, nn.Module]) -> None:
    for pattern in patterns:
        if not any(_named(fqn, module, pattern) for fqn, module in candidates.items()):
            near = difflib.get_close_matches(pattern, candidates, n=3, cutoff=0.3) or list(candidates)[:3]
            raise ValueError(
                f"[fp8.grouped_experts] fqns: {pattern!r} matches no expert module. Expert modules here: "
                f"{', '.join(near) or 'none, no module of this model owns weights [experts, out, in]'}."
            )


def check_alignment(fqn: str, module: nn.Module) -> None:
    """Refuses weights that the FP8 GEMMs cannot read.

    Raises:
        ValueError: N or K of a weight [E, N, K] is no multiple of 16.
    """
    for name in stacked_weights(module):
        shape = tuple(getattr(module, name).shape)
        if any(size % ALIGNMENT for size in shape[1:]):
            raise ValueError(
                f"{fqn}.{name} has shape {shape}: FP8 GEMMs need both matrix dims to be multiples of {ALIGNMENT}. "
                "Change the model's dims, or leave this module out with [fp8.grouped_experts] fqns."
            )


def check_untied(model: nn.Module, own: Mapping[str, nn.Module], leave_out: str) -> None:
    """Refuses parameters of the modules `own` (by name) that a model has elsewhere too: wrapped one by one, they would
    be tied no longer. A module with two names is one module, and may be converted.

    leave_out: the option that leaves a module out.

    Raises:
        ValueError: such a parameter, with both its names.
    """
    names: dict[int, list[str]] = {}
    for fqn, module in model.named_modules():
        for name, param in module._parameters.items():
            names.setdefault(id(param), []).append(f"{fqn}.{name}".removeprefix("."))
    for fqn, module in own.items():
        for param in module.parameters(recurse=False):
            if len(tied := names[id(param)]) > 1:
                raise ValueError(
                    f"{' and '.join(tied)} are one parameter, and in FP8 {fqn or 'this module'} would get a copy of "
                    f"its own: give each its own parameter, or leave them out with {leave_out}."
                )


def select(model: nn.Module, config: FP8GroupedExpertsConfig) -> tuple[dict[str, nn.Module], list[SkippedModule]]:
    """The expert modules to convert by name, and everything with weights that is left out.

    Raises:
        ValueError: nothing matches, a pattern matches nothing, a weight's shape is not supported, or it is tied.
    """
    modules = {fqn.replace("_checkpoint_wrapped_module.", ""): m for fqn, m in model.named_modules()}
    stacks = {fqn: m for fqn, m in modules.items() if stacked_weights(m)}
    _check_patterns(config.fqns, stacks)
    layers = {n for fqn in modules if (n := layer_of(fqn)) is not None}
    last = max(layers, default=-1) - config.skip_last_layers
    chosen, skipped = {}, []
    for fqn, module in modules.items():
        if fqn not in stacks:
            if list(module.parameters(recurse=False)):
                skipped.append(SkippedModule(fqn, _why_not_experts(module)))
            continue
        layer = layer_of(fqn)
        named = any(_named(fqn, module, p) for p in config.fqns)
        if config.fqns and not named:
            reason = "experts that no pattern of fqns names"
        elif not named and not isinstance(module, GroupedExperts):
            reason = f"{type(module).__name__}, not torchtitan's GroupedExperts; name it in fqns to convert it"
        elif layer is not None and layer < config.skip_first_layers:
            reason = f"experts {in_layers('first', config.skip_first_layers)}"
        elif layer is not None and layer > last:
            reason = f"experts {in_layers('last', config.skip_last_layers)}"
        else:
            check_alignment(fqn, module)
            chosen[fqn] = module
            continue
        skipped.append(SkippedModule(fqn, reason))
    if not chosen:
        raise ValueError(
            "[fp8.grouped_experts] converts nothing: "
            + (reasons_of([s for s in skipped if s.fqn in stacks]) or "this model has no routed experts")
            + ". Remove the converter 'fp8.grouped_experts' from model.converters, or change what it skips."
        )
    check_untied(model, chosen, "[fp8.grouped_experts] fqns")
    return chosen, skipped


def reasons_of(skipped: list[SkippedModule]) -> str:
    """One entry a reason, with the first module that has it and the number of others."""
    names: dict[str, list[str]] = {}
    for s in skipped:
        names.setdefault(s.reason, []).append(s.fqn)
    more = {why: f" and {len(of) - 1} more" if len(of) > 1 else "" for why, of in names.items()}
    return "; ".join(f"{of[0]}{more[why]}: {why}" for why, of in names.items())


def _why_not_experts(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear layers (attention, shared experts, router, head): not routed experts"
    if isinstance(module, (nn.Embedding, TokenChoiceTopKRouter)):
        return "embeddings and routers: never FP8"
    return "norms and other modules: never FP8"
