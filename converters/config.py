"""What a user can set in `[fp8]` of a recipe.

`FP8Config` is the job-config section (its string docs become `--help`), `FP8GroupedExpertsConfig` also the config for
`torchao.quantization.quantize_`. Modules and tensors only ever see `Numerics` (numerics.py).
"""

from dataclasses import dataclass, field, fields
from typing import Literal

from torchao.core.config import AOBaseConfig

from converters.delayed_config import DelayedConfig
from converters.dense_config import FP8DenseConfig
from converters.numerics import SQNR_FLOOR_DB as SQNR_FLOOR_DB
from converters.numerics import Accumulate, Backend, GradDtype, Recipe, Wgrad, needs_emulation
from converters.numerics import Numerics as Numerics
from converters.options import check_choices, check_patterns, check_switches, check_whole
from converters.telemetry_config import FP8TelemetryConfig
from converters.token_config import TokenPathConfig

Toggle = Literal["auto", "on", "off"]
Experts = Literal["grouped", "sequential"]
BelowBreakEven = Literal["warn", "bf16"]


@dataclass(frozen=True)
class FP8GroupedExpertsConfig(AOBaseConfig):
    """Routed experts in FP8: which, by which scale rule, on which backend."""

    recipe: Recipe = "tokenwise"
    """
    Scale rule. tokenwise: one scale a token for activations and gradients, one scale an expert for weights, and the
    weight gradient re-scaled from the same FP8 bytes. rowwise: torchao's rule, every GEMM quantizes its own operands
    from high precision, one scale a row of the contraction. tensorwise, blockwise, delayed: for studying, emulated, no
    gain in speed. tensorwise: one current scale an expert. blockwise: 1 x 128 and 128 x 128. delayed: scales from
    earlier maxima ([fp8.delayed]).
    """

    fqns: list[str] = field(default_factory=list)
    """
    Which experts: patterns of whole path components with shell wildcards, e.g. `layers.3.moe.experts`, `layers.[0-3]`,
    `experts`. Empty: all routed experts. A pattern that matches nothing is an error.
    """

    experts: Experts = "grouped"
    """
    grouped: all experts of a layer in one GEMM. sequential: a loop with FP8 matmuls of one expert each, for comparisons
    (its BF16 twin is the converter `experts.sequential`).
    """

    backend: Backend = "auto"
    """
    hopper: Triton kernels for tokenwise on sm90. reference: tokenwise and rowwise in plain torch, waits for the device.
    emulated: every rule in plain torch, high-precision GEMMs of FP8 values, no gain in speed. auto: hopper where it can
    run, reference for what it has on a CPU, emulated for the rest.
    """

    skip_first_layers: int = 0
    """Leave the experts of the first N transformer layers in BF16."""

    skip_last_layers: int = 0
    """Leave the experts of the last N transformer layers in BF16."""

    wgrad: Wgrad = "fp8"
    """
    Operands of the weight gradient. fp8: the recipe's own rule. fp8_columns: quantized per column from high precision,
    keeps channels far below their row's maximum. bf16: not quantized, the most memory and time.
    """

    accumulate: Accumulate = "fast"
    """
    How the hopper backend keeps sums of FP8 products (the others always in float32). fast: in the tensor core, about 14
    bits, over the whole contraction. precise: promoted to float32 every 128 elements. precise_wgrad: precise for weight
    gradients alone. These sum over tokens, and where thousands of products have one sign, what falls off makes the sum
    too small. With wgrad = "bf16" weight gradients are no FP8 products: precise is of the other GEMMs.
    """

    grad_dtype: GradDtype = "auto"
    """
    Format of gradients in FP8. auto: the recipe's own, e5m2 for tensorwise and delayed and e4m3 for the others. e5m2
    has 6 dB less and reaches 2**13 times further; with it tokenwise is emulated too.
    """

    fsdp_fp8_all_gather: Toggle = "auto"
    """
    FSDP2 gathers the experts in FP8, half the bytes of BF16: a shard is quantized once per optimizer step, with the
    scale of the whole weight. auto: on where it can be (tokenwise, torchtitan's own experts, no CPU offload).
    """

    ep_fp8_dispatch: Toggle = "auto"
    """
    Expert parallelism with FP8 rows and their scales in one all-to-all, half the bytes; what comes back stays in high
    precision. auto: on with the hopper backend. Needs a weight gradient from FP8 (tokenwise with wgrad = "fp8").
    """

    below_break_even: BelowBreakEven = "warn"
    """
    Experts that are too small, or will get too few rows at a time, for FP8 to be faster, by the job's batch and the
    measured table (hopper backend only). warn: one sentence at start. bf16: that, and they stay in BF16.
    """

    cache: bool = True
    """
    Quantize a weight once per optimizer step and reuse it in every micro-batch, in backward and in recomputation. The
    table at start has its memory. The shards that FSDP2 gathers in FP8 (fsdp_fp8_all_gather) are kept either way: from
    step to step or, with one micro-batch and no recomputation, until backward has gathered them.
    """

    def __post_init__(self) -> None:
        section = "fp8.grouped_experts"
        check_choices(section, self)
        check_whole(section, self, ("skip_first_layers", "skip_last_layers"), " of layers, 0 or more")
        check_switches(section, self)
        check_patterns(section, self, ("fqns",))
        if self.wgrad == "bf16" and self.accumulate == "precise_wgrad":
            raise ValueError(
                f"[{section}] accumulate = 'precise_wgrad' does nothing with wgrad = 'bf16', whose sums are float32 "
                "anyway: leave accumulate out, or set 'precise' for the other GEMMs."
            )
        if self.ep_fp8_dispatch == "on" and (self.recipe, self.wgrad) != ("tokenwise", "fp8"):
            raise ValueError(
                f"[{section}] ep_fp8_dispatch = 'on' needs recipe = 'tokenwise' and wgrad = 'fp8', since rows arrive "
                f"at the experts in FP8 only; got {self.recipe!r} and {self.wgrad!r}. Set ep_fp8_dispatch = 'off'."
            )
        for wire in ("fsdp_fp8_all_gather", "ep_fp8_dispatch"):
            emulated = self.backend == "emulated" or needs_emulation(self.recipe, self.grad_dtype)
            if getattr(self, wire) == "on" and self.recipe == "tokenwise" and emulated:
                raise ValueError(
                    f"[{section}] {wire} = 'on' needs the hopper or reference backend and E4M3 gradients; got backend "
                    f"= {self.backend!r}, grad_dtype = {self.grad_dtype!r}. Set {wire} = 'off'."
                )
        if self.fsdp_fp8_all_gather == "on" and self.recipe != "tokenwise":
            raise ValueError(
                f"[{section}] fsdp_fp8_all_gather = 'on' needs recipe = 'tokenwise', whose weights have one scale an "
                f"expert; got {self.recipe!r}. Set fsdp_fp8_all_gather = 'off'."
            )
        self._check_backend(section)

    def _check_backend(self, section: str) -> None:
        emulated = needs_emulation(self.recipe, self.grad_dtype)
        has = {"reference": not emulated, "hopper": not emulated and self.recipe == "tokenwise"}
        if not has.get(self.backend, True):
            gradients = f" with grad_dtype = {self.grad_dtype!r}" if self.grad_dtype != "auto" else ""
            remedy = "backend = 'auto'" if emulated else "backend = 'reference'"
            raise ValueError(
                f"[{section}] recipe = {self.recipe!r}{gradients} has no {self.backend} backend: use recipe = "
                f"'tokenwise', or {remedy}, which computes it without a gain in speed."
            )


@dataclass(frozen=True)
class FP8Config:
    """The `[fp8]` section of a job config."""

    grouped_experts: FP8GroupedExpertsConfig = field(default_factory=FP8GroupedExpertsConfig)
    """Read by the converter `fp8.grouped_experts`."""

    dense: FP8DenseConfig = field(default_factory=FP8DenseConfig)
    """Read by the converter `fp8.dense`."""

    token_path: TokenPathConfig = field(default_factory=TokenPathConfig)
    """Read by the converter `fp8.grouped_experts`."""

    delayed: DelayedConfig = field(default_factory=DelayedConfig)
    """Read where recipe = "delayed"."""

    telemetry: FP8TelemetryConfig = field(default_factory=FP8TelemetryConfig)
    """What a run measures of itself."""

    def __post_init__(self) -> None:
        for section in fields(self):
            value = getattr(self, section.name)
            if not isinstance(value, section.type):
                raise ValueError(
                    f"[fp8] {section.name} = {value!r} must be a table: write its keys below a line "
                    f"[fp8.{section.name}]."
                )
