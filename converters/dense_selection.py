"""Which linear layers does `[fp8.dense]` pick, which of them run as one, and what is left out and why?

Patterns are those of selection.py. Without any: the layers w1, w2, w3 of SwiGLU MLPs (shared experts, dense FFN layers)
and wq, wk, wv, wo of attention modules. Never: the router's gate and the head, whatever a pattern says.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torchtitan.models.llama3.model.model import FeedForward as Llama3FeedForward
from torchtitan.models.llama4.model.model import FeedForward as Llama4FeedForward
from torchtitan.models.moe.moe import FeedForward, GroupedExperts, TokenChoiceTopKRouter
from torchtitan.models.qwen3.model.model import FeedForward as Qwen3FeedForward

from converters.dense_config import FP8DenseConfig
from converters.dense_forwards import PROJECTIONS, SWIGLU
from converters.operands import ALIGNMENT
from converters.selection import SkippedModule, check_untied, in_layers, layer_of, matches, reasons_of

# Modules whose forward is w2(silu(w1(x)) * w3(x)).
SWIGLU_FORWARDS = {m.forward for m in (FeedForward, Llama3FeedForward, Llama4FeedForward, Qwen3FeedForward)}
OUTPUT = "wo"
HEADS = {"output", "lm_head", "head"}
ROUTERS = {"router", "gate"}


@dataclass(frozen=True)
class Unit:
    """Linear layers that are one op.

    kind: "mlp" (w1, w2, w3 of `owner`), "qkv" (wq, wk, wv of `owner`) or "linear" (one layer, which is the owner).
    layers: by name.
    """

    kind: str
    fqn: str
    owner: nn.Module
    layers: Mapping[str, nn.Linear]

    @property
    def K(self) -> int:
        """Features of the input."""
        return next(iter(self.layers.values())).in_features

    @property
    def N(self) -> int:
        """Features of the output; of an MLP those of its hidden."""
        features = {name.rpartition(".")[2]: m.out_features for name, m in self.layers.items()}
        return features["w1"] if self.kind == "mlp" else sum(features.values())


def _paths(model: nn.Module) -> dict[str, nn.Module]:
    return {fqn.replace("_checkpoint_wrapped_module.", ""): m for fqn, m in model.named_modules()}


def _never(fqn: str, layer: nn.Linear, modules: Mapping[str, nn.Module]) -> str | None:
    """Why a linear layer is never FP8, or None."""
    parts = fqn.split(".")
    above = [modules.get(".".join(parts[:i])) for i in range(len(parts))]
    if ROUTERS & set(parts) or any(isinstance(m, TokenChoiceTopKRouter) for m in above):
        return "router: never FP8"
    embeddings = {m.weight.shape for m in modules.values() if isinstance(m, nn.Embedding)}
    if parts[-1] in HEADS or (layer_of(fqn) is None and layer.weight.shape in embeddings):
        return "head: never FP8"
    return None


def _has(module: nn.Module | None, names: tuple[str, ...]) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _is_swiglu(module: nn.Module | None) -> bool:
    return module is not None and type(module).forward in SWIGLU_FORWARDS and _has(module, SWIGLU)


def _by_default(fqn: str, modules: Mapping[str, nn.Module]) -> bool:
    owner, _, name = fqn.rpartition(".")
    module = modules.get(owner)
    return (name in SWIGLU and _is_swiglu(module)) or (name in (*PROJECTIONS, OUTPUT) and _has(module, PROJECTIONS))


def _check_patterns(option: str, patterns: list[str], layers: list[str], never: Mapping[str, str]) -> None:
    for pattern in patterns:
        if any(matches(fqn, pattern) for fqn in layers):
            continue
        if option == "fqns" and (kept := [fqn for fqn in never if matches(fqn, pattern)]):
            raise ValueError(f"[fp8.dense] fqns: {pattern!r} names {kept[0]} ({never[kept[0]]}). Remove the pattern.")
        near = difflib.get_close_matches(pattern, layers, n=3, cutoff=0.3) or layers[:3]
        raise ValueError(
            f"[fp8.dense] {option}: {pattern!r} matches no linear layer. Linear layers here: "
            f"{', '.join(near) or 'none'}."
        )


def check_alignment(fqn: str, layer: nn.Linear) -> None:
    """Refuses a layer that the FP8 GEMMs cannot read.

    Raises:
        ValueError: N or K of its weight [N, K] is no multiple of 16.
    """
    shape = tuple(layer.weight.shape)
    if any(size % ALIGNMENT for size in shape):
        raise ValueError(
            f"{fqn}.weight has shape {shape}: FP8 GEMMs need both dims to be multiples of {ALIGNMENT}. Change the "
            "model's dims, or leave this layer out with [fp8.dense] exclude."
        )


def _left_out(fqn: str, config: FP8DenseConfig, by_default: bool, last: int) -> str | None:
    """Why the configuration leaves a linear layer out, or None."""
    layer = layer_of(fqn)
    if config.fqns and not any(matches(fqn, p) for p in config.fqns):
        return "linear layers that no pattern of fqns names"
    if not config.fqns and not by_default:
        return "other linear layers; name them in fqns to convert them"
    if any(matches(fqn, p) for p in config.exclude):
        return "named in exclude"
    if layer is not None and layer < config.skip_first_layers:
        return in_layers("first", config.skip_first_layers)
    if layer is not None and layer > last:
        return in_layers("last", config.skip_last_layers)
    return None


def _why_not_linear(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"{type(module).__name__}: not a plain nn.Linear"
    if isinstance(module, GroupedExperts):
        return "routed experts: only the converter fp8.grouped_experts takes them"
    return "embeddings, norms and other modules: never FP8"


def select(model: nn.Module, config: FP8DenseConfig) -> tuple[list[Unit], list[SkippedModule]]:
    """The linear layers to convert, those that are one op together, and everything with weights that is left out.

    Raises:
        ValueError: nothing matches, a pattern matches nothing or names what is never FP8, a shape is not supported, or
            a weight is tied to another.
    """
    modules = _paths(model)
    linear = {fqn: m for fqn, m in modules.items() if type(m) is nn.Linear}
    never = {fqn: why for fqn, m in linear.items() if (why := _never(fqn, m, modules))}
    layers = [fqn for fqn in linear if fqn not in never]
    _check_patterns("fqns", config.fqns, layers, never)
    _check_patterns("exclude", config.exclude, list(linear), {})
    last = max((n for fqn in modules if (n := layer_of(fqn)) is not None), default=-1) - config.skip_last_layers
    chosen, skipped = {}, []
    for fqn, module in modules.items():
        if fqn not in linear:
            if list(module.parameters(recurse=False)):
                skipped.append(SkippedModule(fqn, _why_not_linear(module)))
        elif why := never.get(fqn) or _left_out(fqn, config, _by_default(fqn, modules), last):
            skipped.append(SkippedModule(fqn, why))
        else:
            check_alignment(fqn, module)
            chosen[fqn] = module
    if not chosen:
        reasons = reasons_of([s for s in skipped if s.fqn in linear])
        raise ValueError(
            f"[fp8.dense] converts nothing: {reasons or 'this model has no linear layers'}. Remove the converter "
            "'fp8.dense' from model.converters, or change what it skips."
        )
    check_untied(model, chosen, "[fp8.dense] exclude")
    return _units(chosen, modules), skipped


def _units(chosen: Mapping[str, nn.Linear], modules: Mapping[str, nn.Module]) -> list[Unit]:
    units, done = [], set()
    for fqn, layer in chosen.items():
        owner = fqn.rpartition(".")[0]
        module = modules.get(owner)
        for kind, names, together in (("mlp", SWIGLU, _is_swiglu), ("qkv", PROJECTIONS, _are_projections)):
            layers = {f"{owner}.{n}" if owner else n: getattr(module, n, None) for n in names}
            if fqn in layers and layers.keys() <= chosen.keys() and together(module) and _can_join(module, layers):
                if fqn not in done:
                    units.append(Unit(kind, owner, module, layers))
                done |= layers.keys()
        if fqn not in done:
            units.append(Unit("linear", fqn, layer, {fqn: layer}))
    return units


def _are_projections(module: nn.Module | None) -> bool:
    return _has(module, PROJECTIONS) and len({getattr(module, n).in_features for n in PROJECTIONS}) == 1


def _can_join(owner: nn.Module, layers: Mapping[str, nn.Linear]) -> bool:
    """Whether the owner runs its class's forward and its layers have weights of one dtype, an MLP's without biases."""
    mlp = _is_swiglu(owner)
    same = len({m.weight.dtype for m in layers.values()}) == 1
    return "forward" not in vars(owner) and same and not (mlp and any(m.bias is not None for m in layers.values()))
