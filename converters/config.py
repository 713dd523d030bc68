"""What a user can set in `[fp8]` of a recipe, and the part of it that travels with every weight.

`FP8Config` is the job-config section (its string docs become `--help`), `FP8GroupedExpertsConfig` also the config for
`torchao.quantization.quantize_`. Modules and tensors only ever see `Numerics`: small, frozen, hashable.
"""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from torchao.core.config import AOBaseConfig

from converters.dense_config import FP8DenseConfig
from converters.telemetry_config import FP8TelemetryConfig
from converters.token_config import TokenPathConfig

Recipe = Literal["tokenwise", "rowwise"]
Backend = Literal["auto", "reference", "hopper"]
Wgrad = Literal["fp8", "fp8_columns", "bf16"]
Accumulate = Literal["fast", "precise"]
Toggle = Literal["auto", "on", "off"]
Experts = Literal["grouped", "sequential"]
BelowBreakEven = Literal["warn", "bf16"]

CHOICES = {
    "experts": Experts,
    "recipe": Recipe,
    "backend": Backend,
    "wgrad": Wgrad,
    "accumulate": Accumulate,
    "fsdp_fp8_all_gather": Toggle,
    "ep_fp8_dispatch": Toggle,
    "below_break_even": BelowBreakEven,
}

# SQNR in dB that a recipe must reach against float64 on normal inputs (weights std 0.02), per output and gradient.
# Two E4M3 operands of 31.5 dB each give 28.5 dB for one GEMM; two GEMMs and a SwiGLU in a row leave 23 to 24.
SQNR_FLOOR_DB = {"tokenwise": 23.0, "rowwise": 23.0}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the GEMMs of one weight are computed. `backend` is resolved: never "auto".

    temporary: the weight is a view, or gathered for one pass; what is quantized from it is not kept, even with `cache`.
    fp8_all_gather: FSDP2 gathers the weight in FP8.
    used_once: one forward and one backward are all that use it between two optimizer steps; what was quantized from it
    is dropped on the way.
    """

    recipe: Recipe = "tokenwise"
    backend: Literal["reference", "hopper"] = "reference"
    wgrad: Wgrad = "fp8"
    accumulate: Accumulate = "fast"
    cache: bool = True
    temporary: bool = False
    fp8_all_gather: bool = False
    used_once: bool = False

    @property
    def key(self) -> str:
        """All of it as one string: custom ops take no dataclasses. `Numerics.parse` is the inverse."""
        return "/".join(str(getattr(self, f.name)) for f in fields(self))

    @staticmethod
    def parse(key: str) -> "Numerics":
        """The numerics whose `key` this is."""
        values = ({"True": True, "False": False}.get(v, v) for v in key.split("/"))
        return Numerics(**{f.name: value for f, value in zip(fields(Numerics), values, strict=True)})

    @property
    def wgrad_from_hp(self) -> bool:
        """Whether the weight gradient starts from high precision, so that backward needs x itself."""
        return self.wgrad != "fp8" or self.recipe == "rowwise"

    def __str__(self) -> str:
        extra = [f"wgrad={self.wgrad}"] * (self.wgrad != "fp8") + ["precise"] * (self.accumulate == "precise")
        return f"{self.recipe}, {self.backend}" + "".join(f", {e}" for e in extra)


def _check_choice(section: str, name: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"[{section}] {name} = {value!r} is unknown: choose one of {', '.join(map(repr, allowed))}.")


@dataclass(frozen=True)
class FP8GroupedExpertsConfig(AOBaseConfig):
    """Routed experts in FP8: which, by which scale rule, on which backend."""

    recipe: Recipe = "tokenwise"
    """
    Scale rule. tokenwise: one scale a token for activations and gradients, one scale an expert for weights, and the
    weight gradient re-scaled from the same FP8 bytes. rowwise: torchao's rule, every GEMM quantizes its own operands
    from high precision, one scale a row of the contraction.
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
    """auto: hopper where it can run, else reference. reference: plain torch, any device. hopper: Triton on sm90."""

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
    """fast: tensor-core accumulation over the whole contraction. precise: promoted to float32 every 128 elements."""

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
    Experts that will get too few rows at a time for FP8 to be faster, by the job's batch and the measured table
    (hopper backend only). warn: one sentence at start. bf16: that, and they stay in BF16.
    """

    cache: bool = True
    """Quantize a weight once per optimizer step and reuse it in every micro-batch, in backward and in recomputation."""

    def __post_init__(self) -> None:
        section = "fp8.grouped_experts"
        for name, choices in CHOICES.items():
            _check_choice(section, name, getattr(self, name), choices)
        for name in ("skip_first_layers", "skip_last_layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"[{section}] {name} = {value!r} must be a whole number of layers, 0 or more.")
        if not isinstance(self.cache, bool):
            raise ValueError(f"[{section}] cache = {self.cache!r} must be true or false.")
        if not isinstance(self.fqns, list) or not all(isinstance(p, str) and p for p in self.fqns):
            raise ValueError(f"[{section}] fqns = {self.fqns!r} must be a list of non-empty patterns.")
        if self.ep_fp8_dispatch == "on" and (self.recipe, self.wgrad) != ("tokenwise", "fp8"):
            raise ValueError(
                f"[{section}] ep_fp8_dispatch = 'on' needs recipe = 'tokenwise' and wgrad = 'fp8', since rows arrive "
                f"at the experts in FP8 only; got {self.recipe!r} and {self.wgrad!r}. Set ep_fp8_dispatch = 'off'."
            )
        if self.fsdp_fp8_all_gather == "on" and self.recipe != "tokenwise":
            raise ValueError(
                f"[{section}] fsdp_fp8_all_gather = 'on' needs recipe = 'tokenwise', whose weights have one scale an "
                f"expert; got {self.recipe!r}. Set fsdp_fp8_all_gather = 'off'."
            )
        if self.backend == "hopper" and self.recipe == "rowwise":
            raise ValueError(
                f"[{section}] recipe = 'rowwise' has no hopper backend: use recipe = 'tokenwise', or "
                "backend = 'reference'."
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
