"""The converter `fp8.grouped_experts`: switches a model's routed experts to FP8, in place, before it is parallelized.

    weights    every stacked weight becomes an FP8ExpertWeight, so whatever its module does with it runs in FP8
    forward    torchtitan's own GroupedExperts get a forward that is one autograd function over the whole SwiGLU MLP
               (expert_mlp.py), with no padding of groups; a subclass with a forward of its own keeps it

Three ways in: `[model] converters = ["fp8.grouped_experts"]`, `convert(model, config)`, and
`torchao.quantization.quantize_(model, FP8GroupedExpertsConfig(), filter_fn=is_routed_experts)`.
"""

import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torch.distributed.tensor import DTensor
from torchao.quantization import quantize_
from torchao.quantization.transform_module import register_quantize_module_handler
from torchtitan.models.moe.moe import GroupedExperts

from converters.break_even import RESULTS, Workload, below_break_even, load_measured, workload
from converters.capability import dispatches_fp8, resolve
from converters.config import FP8GroupedExpertsConfig, Numerics
from converters.converter import FP8Converter, warn_slow
from converters.delayed_config import DelayedConfig
from converters.expert_weight import FP8ExpertWeight
from converters.experts_forward import fp8_experts_forward, is_one_op, takes_our_forward
from converters.layout import check_delayed, check_layout
from converters.rules.attach import connect, give_state
from converters.selection import (
    ConversionReport,
    ConvertedWeight,
    SkippedModule,
    check_alignment,
    check_untied,
    select,
    stacked_weights,
)
from converters.sequential_experts import run_sequentially
from converters.token_path import FuseTokenPath, token_path_of
from parallel.checkpoint import wrap_parameters
from parallel.expert_parallel import let_experts_dispatch

NAME = "fp8.grouped_experts"
NO_GAIN = "emulated: high-precision products of FP8 values, to study a rule's numbers; no gain in speed"
DEFAULT_FILTER = inspect.signature(quantize_).parameters["filter_fn"].default  # nn.Linear, also for filter_fn=None
logger = logging.getLogger(__name__)


def is_routed_experts(module: nn.Module, fqn: str | None = None) -> bool:
    """A `filter_fn` for torchao's `quantize_`: torchtitan's routed experts and nothing else.

    Raises:
        ValueError: `module` is the model itself (fqn ""), and has none. torchao would say nothing of it.
    """
    if fqn == "" and not any(isinstance(m, GroupedExperts) for m in module.modules()):
        raise ValueError(
            f"filter_fn = is_routed_experts picks nothing: {type(module).__name__} has no GroupedExperts of "
            "torchtitan's. Name its expert modules: "
            "converters.fp8_grouped_experts.convert(model, FP8GroupedExpertsConfig(fqns=[...]))."
        )
    return isinstance(module, GroupedExperts)


def _numerics_of(module: nn.Module) -> Numerics | None:
    weights = [p._local_tensor if isinstance(p, DTensor) else p for p in module.parameters(recurse=False)]
    return next((w._context for w in weights if isinstance(w, FP8ExpertWeight)), None)


def convert_module(
    module: nn.Module, numerics: Numerics, ep_dispatch: bool = False, delayed: DelayedConfig | None = None
) -> None:
    """Switches one expert module; does nothing if it runs with these numerics already.

    ep_dispatch: under expert parallelism it sends its rows itself, in FP8 (only modules with our forward can).
    delayed: options of the recipe "delayed" (None: TransformerEngine's defaults).

    Raises:
        ValueError: it was converted before with other numerics, or delayed scaling cannot know its operands.
    """
    if not is_one_op(module):  # what another forward does with a gathered weight is not ours to know
        numerics = replace(numerics, fp8_all_gather=False)
    if (before := _numerics_of(module)) is not None:
        if before != numerics:
            raise ValueError(
                f"{type(module).__name__} is in FP8 already ({before}) and cannot be converted again ({numerics}): "
                "convert a model once."
            )
        logger.info("%s is in FP8 already (%s): left as it is.", type(module).__name__, before)
        return
    if numerics.recipe == "delayed" and not takes_our_forward(module):
        raise ValueError(
            f"recipe = 'delayed' needs torchtitan's own forward of GroupedExperts, whose operands have names, and "
            f"{type(module).__name__} has another one: use recipe = 'tensorwise', or leave it out with fqns."
        )
    give_state(module, numerics, 2, len(next(module.parameters())), delayed or DelayedConfig())
    wrap_parameters(module, lambda data: FP8ExpertWeight(data, numerics), stacked_weights(module))
    if takes_our_forward(module):
        module.forward = types.MethodType(fp8_experts_forward, module)
        module.ep_dispatch, module.ep_group = ep_dispatch, None
    describe = f"fp8: {numerics}"
    module.extra_repr = types.MethodType(lambda self: describe, module)


def _check_wires(fqn: str, module: nn.Module, config: FP8GroupedExpertsConfig) -> None:
    for option in ("fsdp_fp8_all_gather", "ep_fp8_dispatch"):
        if getattr(config, option) == "on" and not is_one_op(module):
            why = "runs one expert at a time" if takes_our_forward(module) else "has another one"
            raise ValueError(
                f"[fp8.grouped_experts] {option} = 'on' needs torchtitan's own forward of GroupedExperts, and {fqn} "
                f"({type(module).__name__}) {why}. Set {option} = 'auto', or leave this module out with fqns."
            )


def _switch(
    fqn: str,
    module: nn.Module,
    config: FP8GroupedExpertsConfig,
    numerics: Numerics,
    delayed: DelayedConfig | None = None,
) -> None:
    """`convert_module`, and what else `config` says of it."""
    if config.experts == "sequential" and isinstance(module, GroupedExperts):
        run_sequentially(module)
    _check_wires(fqn, module, config)
    if ep_dispatch := dispatches_fp8(config, numerics):
        let_experts_dispatch()
    convert_module(module, numerics, ep_dispatch, delayed)


def _too_slow(
    model: nn.Module, chosen: dict[str, nn.Module], config: FP8GroupedExpertsConfig, work: Workload
) -> list[SkippedModule]:
    """Says which modules FP8 will slow down; returns those that are to stay in BF16 for that."""
    measured, keep = load_measured(), config.below_break_even == "bf16"
    if keep and not measured:
        logger.warning("%s: below_break_even = 'bf16' keeps nothing in BF16, since %s is missing.", NAME, RESULTS)
    slow = below_break_even(model, chosen, work, measured, config.cache)
    warn_slow(NAME, slow, " will get ", keep, RESULTS)
    return [SkippedModule(fqn, f"below break-even: {why}") for fqn, why in slow.items() if keep]


def convert(
    model: nn.Module,
    config: FP8GroupedExpertsConfig,
    work: Workload | None = None,
    fuse: FuseTokenPath | None = None,
    delayed: DelayedConfig | None = None,
) -> ConversionReport:
    """Converts the routed experts of `model` that `config` selects, in place, and records what it did.

    work: what the job sends through them, to say or to leave out where FP8 will be slower (hopper backend).
    fuse: switches the token path around the experts that run our forward, and says what it did.
    delayed: options of the recipe "delayed"; whoever calls this with it calls rules.attach.end_step after each step.

    Raises:
        ValueError: nothing matches, a shape is not supported, the backend cannot run here, or a wire that was asked for
            by name cannot be FP8.
    """
    numerics = replace(resolve(config), used_once=work is not None and work.uses_once)
    chosen, skipped = select(model, config)
    if work is not None and numerics.backend == "hopper" and config.experts == "grouped":
        slow = _too_slow(model, chosen, config, work)
        skipped, chosen = skipped + slow, {f: m for f, m in chosen.items() if f not in {s.fqn for s in slow}}
    converted = []
    for fqn, module in chosen.items():
        _switch(fqn, module, config, numerics, delayed)
        for name in stacked_weights(module):
            w = getattr(module, name)
            note = "" if takes_our_forward(module) else f"{type(module).__name__}.forward as it is, its products in FP8"
            own, dtype = f"{fqn}.{name}".removeprefix("."), str(w.dtype).removeprefix("torch.")
            converted.append(ConvertedWeight(own, tuple(w.shape), dtype, note))
    ours = [m for m in chosen.values() if is_one_op(m)]
    notes = () if fuse is None else (fuse(model, ours, numerics, {s.fqn: s.reason for s in skipped}),)
    notes += (NO_GAIN,) * (numerics.backend == "emulated")
    report = ConversionReport(NAME, config.recipe, numerics.backend, tuple(converted), tuple(skipped), notes, numerics)
    model.conversion_reports = [*getattr(model, "conversion_reports", []), report]
    return report


class FP8GroupedExpertsConverter(FP8Converter):
    """Routed experts in FP8: one op for the SwiGLU MLP, grouped GEMMs, scales by `[fp8.grouped_experts]`."""

    name = NAME
    config: FP8GroupedExpertsConfig

    def convert(self, model: nn.Module) -> None:
        """Converts `model` in place. Called on the meta device, before any parallelism."""
        check_layout(select(model, self.config)[0], self.config, self.job_config, self.parallel_dims)
        check_delayed(self.config.recipe, self.job_config, self.parallel_dims)
        work = workload(self.job_config, self.parallel_dims)
        dispatches = dispatches_fp8(self.config, resolve(self.config))
        fuse = token_path_of(self.job_config, self.parallel_dims, dispatches)
        logger.info(convert(model, self.config, work, fuse, self.delayed).summary())
        connect(model, self.parallel_dims)


@register_quantize_module_handler(FP8GroupedExpertsConfig)
def _quantize_handler(module: nn.Module, config: FP8GroupedExpertsConfig) -> nn.Module:
    """What `quantize_` calls on each module that its filter admits; where it admits none, nobody is called.

    Its default filter admits nn.Linear only, and would hand us the router's gate and the shared experts but never the
    routed ones (tt#3199). So with that filter, as with ours, the config's own selection decides, once, on the model
    that quantize_ was called with; any other filter decides alone.
    """
    model, filter_fn = _arguments_of_quantize()
    if filter_fn in (DEFAULT_FILTER, is_routed_experts):
        if module is next(m for name, m in model.named_modules() if filter_fn(m, name)):
            convert(model, config)
        return module
    if not stacked_weights(module):
        raise ValueError(
            f"{type(module).__name__} owns no weights [experts, out, in]: let filter_fn pick expert modules only, e.g. "
            "converters.fp8_grouped_experts.is_routed_experts."
        )
    if config.fqns or config.skip_first_layers or config.skip_last_layers:
        raise ValueError(
            "fqns, skip_first_layers and skip_last_layers do nothing beside a filter_fn of your own, which decides "
            "alone: leave them out, or give filter_fn = converters.fp8_grouped_experts.is_routed_experts."
        )
    check_alignment(type(module).__name__, module)
    check_untied(model, {type(module).__name__: module}, "filter_fn")
    _switch(type(module).__name__, module, config, resolve(config))
    return module


def _arguments_of_quantize() -> tuple[nn.Module, Callable]:
    """model and filter_fn of the `quantize_` call we are in: torchao passes a handler the matched module alone."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is quantize_.__code__:
            return frame.f_locals["model"], frame.f_locals["filter_fn"]
        frame = frame.f_back
    raise ValueError(
        "call FP8GroupedExpertsConfig through torchao.quantization.quantize_, or use converters' convert()."
    )
