"""The converter `fp8.dense`: switches shared experts, dense FFN layers and attention projections to FP8, in place,
before the model is parallelized.

    weights    every chosen layer's weight becomes an FP8LinearWeight
    forward    dense_forwards.py: one op for a SwiGLU MLP, one for wq, wk and wv, one for any other layer

Two ways in: `[model] converters = ["fp8.dense"]`, alone or beside `fp8.grouped_experts` in any order, and
`convert_dense(model, config)`.
"""

import logging
import types
from dataclasses import replace

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from converters.capability import resolve
from converters.converter import FP8Converter, warn_slow
from converters.delayed_config import DelayedConfig
from converters.dense_break_even import RESULTS, DenseWork, dense_work, load_measured, too_small
from converters.dense_config import FP8DenseConfig
from converters.dense_forwards import attention_forward, linear_forward, swiglu_forward
from converters.dense_ruled import convert_ruled
from converters.dense_selection import Unit, select
from converters.gathered_weight import JOINED
from converters.layout import check_delayed, check_offload
from converters.linear_weight import FP8LinearWeight
from converters.numerics import Numerics
from converters.operands import ALIGNMENT
from converters.rules.attach import connect
from converters.selection import ConversionReport, ConvertedWeight, SkippedModule
from parallel.checkpoint import wrap_parameters

NAME = "fp8.dense"
NOTES = {"mlp": "w1, w2, w3: one op", "qkv": "wq, wk, wv: one op", "linear": ""}
DEFAULTS = DelayedConfig()
INPUTS_CUT = ("wo", "w2")  # by torchtitan's plans for tensor parallelism; the others' outputs are
logger = logging.getLogger(__name__)


def _convert_unit(unit: Unit, numerics: Numerics, delayed: DelayedConfig) -> None:
    if numerics.backend == "emulated":
        for layer in unit.layers.values():
            convert_ruled(layer, numerics, delayed)
        return
    for layer in unit.layers.values():
        wrap_parameters(layer, lambda data: FP8LinearWeight(data, numerics), ["weight"])
        layer.forward = types.MethodType(linear_forward, layer)
        describe = f"{layer.extra_repr()}, fp8: {numerics}"
        layer.extra_repr = types.MethodType(lambda self, text=describe: text, layer)
    for gemm in _gemms(unit):
        for layer in gemm:
            setattr(layer, JOINED, gemm)
    if unit.kind == "mlp":
        unit.owner.forward = types.MethodType(swiglu_forward, unit.owner)
    elif unit.kind == "qkv":
        unit.owner.forward = types.MethodType(attention_forward, unit.owner)


def _gemms(unit: Unit) -> list[tuple[nn.Linear, ...]]:
    """The unit's layers by the GEMMs that they are part of."""
    layers = tuple(unit.layers.values())
    if unit.kind != "mlp":
        return [layers]
    w1, w2, w3 = layers
    return [(w1, w3), (w2,)]


def _in_fp8(units: list[Unit], numerics: Numerics) -> bool:
    """Whether all of it was converted before, with the same numerics.

    Raises:
        ValueError: a part of it was, or with other numerics.
    """
    weights = {fqn: layer.weight for unit in units for fqn, layer in unit.layers.items()}
    before = {fqn: w._context for fqn, w in weights.items() if isinstance(w, FP8LinearWeight)}
    if not before:
        return False
    for fqn, w in weights.items():
        if before.get(fqn) != numerics:
            raise ValueError(
                f"{next(iter(before))} is in FP8 already ({next(iter(before.values()))}), and {fqn} "
                f"({before.get(fqn, w.dtype)}) cannot be converted to {numerics}: convert a model once."
            )
    logger.info("%s: all of these layers are in FP8 already (%s): left as they are.", NAME, numerics)
    return True


def _too_small(units: list[Unit], config: FP8DenseConfig, work: DenseWork) -> list[SkippedModule]:
    """Says which units FP8 will slow down; returns those that are to stay in BF16 for that."""
    measured, keep = load_measured(), config.below_break_even == "bf16"
    if not measured:
        logger.warning("%s: no layer is judged by its size, since %s is missing.", NAME, RESULTS)
    slow = too_small(units, work, measured, config.cache)
    warn_slow(NAME, slow, ": ", keep, RESULTS)
    layers = {unit.fqn: unit.layers for unit in units}
    return [SkippedModule(name, f"too small: {why}") for fqn, why in slow.items() if keep for name in layers[fqn]]


def convert_dense(
    model: nn.Module,
    config: FP8DenseConfig,
    work: DenseWork | None = None,
    delayed: DelayedConfig = DEFAULTS,
) -> ConversionReport:
    """Converts the linear layers of `model` that `config` selects, in place, and records what it did.

    work: what the job sends through them, to leave out what is too small for FP8 (hopper backend).
    delayed: options of the recipe "delayed"; whoever calls this with it calls rules.attach.end_step after each step.

    Raises:
        ValueError: nothing matches, a shape is not supported, or the backend cannot run here.
    """
    numerics = replace(resolve(config), used_once=work is not None and work.uses_once)
    units, skipped = select(model, config)
    if work is not None and numerics.backend == "hopper":
        small = _too_small(units, config, work)
        skipped, left = skipped + small, {s.fqn for s in small}
        units = [unit for unit in units if not left & unit.layers.keys()]
    converted = []
    if not _in_fp8(units, numerics):
        for unit in units:
            _convert_unit(unit, numerics, delayed)
            converted += [
                ConvertedWeight(
                    f"{fqn}.weight",
                    tuple(layer.weight.shape),
                    str(layer.weight.dtype).removeprefix("torch."),
                    "" if numerics.backend == "emulated" else NOTES[unit.kind],
                )
                for fqn, layer in unit.layers.items()
            ]
    report = ConversionReport(
        NAME, config.recipe, numerics.backend, tuple(converted), tuple(skipped), numerics=numerics, kind="linear"
    )
    model.conversion_reports = [*getattr(model, "conversion_reports", []), report]
    return report


def check_layout(units: list[Unit], config: FP8DenseConfig, job_config: JobConfig, dims: ParallelDims) -> None:
    """Refuses layouts that FP8 linear layers cannot run in.

    Raises:
        ValueError: tensor parallelism cuts a weight into parts that no FP8 GEMM reads, or meets an emulated rule; the
            FP8 all-gather was asked for by name, with CPU offload.
    """
    if dims.tp > 1 and config.recipe != "tokenwise":
        raise ValueError(
            f"[fp8.dense] recipe = {config.recipe!r} does not go with parallelism.tensor_parallel_degree = {dims.tp}: "
            "its scales would be those of a rank's part of a layer. Use recipe = 'tokenwise'."
        )
    for fqn, layer in ((fqn, layer) for unit in units for fqn, layer in unit.layers.items()):
        dim = 1 if fqn.rpartition(".")[2] in INPUTS_CUT else 0
        shape = tuple(layer.weight.shape)
        if dims.tp > 1 and shape[dim] % (dims.tp * ALIGNMENT):
            raise ValueError(
                f"{fqn}.weight has shape {shape}, and parallelism.tensor_parallel_degree = {dims.tp} cuts its dim "
                f"{dim} into parts of {shape[dim] / dims.tp:g}: FP8 GEMMs need multiples of {ALIGNMENT}. Choose a "
                "degree that leaves them, or leave this layer out with [fp8.dense] exclude."
            )
    check_offload(NAME, config.fsdp_fp8_all_gather, job_config)


class FP8DenseConverter(FP8Converter):
    """Shared experts, dense FFN layers and attention projections in FP8, scales by `[fp8.dense]`."""

    name = NAME
    config: FP8DenseConfig

    def convert(self, model: nn.Module) -> None:
        """Converts `model` in place. Called on the meta device, before any parallelism."""
        check_layout(select(model, self.config)[0], self.config, self.job_config, self.parallel_dims)
        work = dense_work(self.job_config, self.parallel_dims)
        check_delayed(self.config.recipe, self.job_config, self.parallel_dims)
        logger.info(convert_dense(model, self.config, work, self.delayed).summary())
        connect(model, self.parallel_dims)
