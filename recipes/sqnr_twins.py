"""A recipe's model twice, from the same weights, in high precision and in FP8, with one batch of the recipe's data.

Built as torchtitan's Trainer builds it (meta device, converters, `to_empty`, `init_weights`), on one device and without
parallelism, compilation and recomputation, which change no numbers here. High precision is what the recipe trains with
when its FP8 converters are taken away: autocast to `training.mixed_precision_param`, over float32 weights.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import train_spec as train_specs
from torchtitan.protocols.model_converter import ModelConvertersContainer, build_model_converters
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils

import recipes.register  # noqa: F401  (importing registers)
from parallel.loss import tokens_per_step
from recipes.models.mixtral.balance import balanced_moes
from recipes.recipe_file import check_arguments, read_recipe

CONFIG_MODULE = "recipes.job_config"
FP8, SEQUENTIAL = "fp8.", "experts.sequential"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token ids and labels [B, S], further arguments of the model, and by how many tokens the loss is divided.

    micro_batches: of a training step; this batch is one of them.
    """

    inputs: Tensor
    labels: Tensor
    kwargs: dict[str, Any]
    tokens: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Twins:
    """`reference` and `fp8` hold equal weights. amp() is the autocast under which both run; end_step() tells the FP8
    model's converters that a step is over, as the trainer does after the optimizer's.
    """

    reference: nn.Module
    fp8: nn.Module
    batch: Batch
    loss: Callable[[Tensor, Tensor], Tensor]
    amp: Callable[[], AbstractContextManager]
    end_step: Callable[[], None]
    converters: dict[str, tuple[str, ...]]
    config: JobConfig


def read_config(recipe: str, overrides: list[str]) -> JobConfig:
    """The job config of a recipe file with torchtitan's command-line overrides, and our sections in it.

    Raises:
        ValueError: no such file, or values that a section refuses.
    """
    job = read_recipe(recipe).get("job")
    named = isinstance(job, dict) and job.get("custom_config_module")
    args = [f"--job.config_file={recipe}", *([] if named else [f"--job.custom_config_module={CONFIG_MODULE}"])]
    check_arguments([*args, *overrides])
    return ConfigManager().parse_args([*args, *overrides])


def twin_converters(config: JobConfig) -> list[str]:
    """The converters that the high-precision twin keeps: all but those of FP8.

    Raises:
        ValueError: there is no FP8 converter, so that there would be nothing to measure.
    """
    names = list(config.model.converters)
    if not any(name.startswith(FP8) for name in names):
        raise ValueError(
            f"model.converters = {names} has no FP8 converter, so both twins would be the same: name one with "
            "--converters fp8.grouped_experts."
        )
    kept = [name for name in names if not name.startswith(FP8)]
    loops = config.fp8.grouped_experts.experts == "sequential" and "fp8.grouped_experts" in names
    return [*kept, SEQUENTIAL] if loops and SEQUENTIAL not in kept else kept


def build_twins(config: JobConfig, checkpoint: str | None = None) -> Twins:
    """Both models on this machine's device, and the first batch of the recipe's training data.

    checkpoint: a step folder of a torchtitan checkpoint whose weights both get; None: fresh ones, by debug.seed.
    """
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    spec = train_specs.get_train_spec(config.model.name)
    names = {"reference": twin_converters(config), "fp8": list(config.model.converters)}
    (reference, _), (fp8, hooks) = (_build(spec, config, dims, kept) for kept in names.values())
    if checkpoint is not None:
        _load(reference, checkpoint)
    _copy_weights(reference, fp8)
    device, dtype = utils.device_type, TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    return Twins(
        reference=reference,
        fp8=fp8,
        batch=_first_batch(spec, config, dims, reference),
        loss=spec.build_loss_fn(config, parallel_dims=dims),
        # autocast knows no float32, in which nothing is cast anyway
        amp=lambda: torch.autocast(device, dtype, enabled=dtype != torch.float32),
        end_step=lambda: hooks.post_optimizer_hook([fp8]),
        converters={twin: tuple(kept) for twin, kept in names.items()},
        config=config,
    )


def _build(
    spec: TrainSpec, config: JobConfig, dims: ParallelDims, converters: list[str]
) -> tuple[nn.Module, ModelConvertersContainer]:
    config = copy.deepcopy(config)
    config.model.converters = converters
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(args)
    container = build_model_converters(config, dims)
    container.convert(model)
    for moe in balanced_moes(model):
        moe.balance = replace(moe.balance, tokens_per_step=tokens_per_step(config, dims))
    model.to_empty(device=utils.device_type)
    torch.manual_seed(config.debug.seed or 0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train(), container


def _load(model: nn.Module, checkpoint: str) -> None:
    """A torchtitan checkpoint has the model's tensors at its top level, under their names."""
    if not (Path(checkpoint) / ".metadata").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint of torchtitan: give a folder OUTPUT/checkpoint/step-N.")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state)


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    weights, buffers = dict(source.named_parameters()), dict(source.named_buffers())
    for name, p in target.named_parameters():
        p.copy_(weights[name])
    for name, b in target.named_buffers():
        if name in buffers:  # a rule with a state of its own has more
            b.copy_(buffers[name])


def _first_batch(spec: TrainSpec, config: JobConfig, dims: ParallelDims, model: nn.Module) -> Batch:
    tokenizer = spec.build_tokenizer_fn(config)
    loader = spec.build_dataloader_fn(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config)
    data, labels = next(iter(loader))
    inputs = data["input"].to(utils.device_type)
    kwargs = {}
    if getattr(model.model_args, "attn_type", "sdpa") in ("flex", "varlen"):
        kwargs["attention_masks"] = model.get_attention_masks(input_batch=inputs, tokenizer=tokenizer)
    labels = labels.to(utils.device_type)
    micro_batches = tokens_per_step(config, dims) // labels.numel()
    tokens = int((labels != IGNORE_INDEX).sum()) * micro_batches
    return Batch(inputs=inputs, labels=labels, kwargs=kwargs, tokens=tokens, micro_batches=micro_batches)
