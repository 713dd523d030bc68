"""What a user can set in `[fp8.dense]` of a recipe: dense layers in FP8, which and how."""

from dataclasses import dataclass, field
from typing import Literal

from converters.numerics import Accumulate, Backend, Wgrad
from converters.options import check_choices, check_patterns, check_switches, check_whole

SECTION = "fp8.dense"


@dataclass(frozen=True)
class FP8DenseConfig:
    """Shared experts, dense FFN layers and attention projections in FP8. Options with the names of
    `[fp8.grouped_experts]` mean what they mean there.
    """

    recipe: Literal["tokenwise", "tensorwise", "blockwise", "delayed"] = "tokenwise"
    """
    Scale rule. tokenwise: one scale a token for activations and gradients, one scale for the weights of a GEMM (wq, wk
    and wv are one GEMM, and so are w1 and w3), and the weight gradient re-scaled from the same FP8 bytes. The others:
    for studying, emulated, no gain in speed, and not under tensor parallelism; see `[fp8.grouped_experts]`.
    """

    fqns: list[str] = field(default_factory=list)
    """
    Which linear layers: patterns of whole path components with shell wildcards, e.g. `shared_experts`, `attention`,
    `layers.[0-3]`, `attention.wo`. Empty: shared experts, dense FFN layers and attention projections. A pattern picks
    any other linear layer too, but never the router's or the head. A pattern that matches nothing is an error.
    """

    exclude: list[str] = field(default_factory=list)
    """Patterns of what stays in BF16, though `fqns` would pick it. One that matches nothing is an error."""

    backend: Backend = "auto"
    """As in `[fp8.grouped_experts]`: hopper and reference are for tokenwise, emulated is for the other rules."""

    skip_first_layers: int = 0
    """Leave the first N transformer layers in BF16."""

    skip_last_layers: int = 0
    """Leave the last N transformer layers in BF16."""

    wgrad: Wgrad = "fp8"
    """Operands of the weight gradient, as in `[fp8.grouped_experts]`."""

    accumulate: Accumulate = "precise_wgrad"
    """
    How a GPU keeps sums, as in `[fp8.grouped_experts]`. A dense weight gradient sums over all tokens at a time: 14 bits
    over 16384 of them take 1 to 4 % off it, by an emulation with real gradients. Losses on an H200 have not shown it
    (Scout's width, step 37: 5.033 fast, 5.036 precise_wgrad, 5.034 with wgrad = "bf16"); it costs 1 % of a step there.
    With wgrad = "bf16", precise_wgrad and fast are the same.
    """

    fsdp_fp8_all_gather: Literal["auto", "on", "off"] = "auto"
    """FSDP2 gathers weights in FP8, half the bytes of BF16. auto: on where it can be (tokenwise, no CPU offload)."""

    below_break_even: Literal["warn", "bf16"] = "bf16"
    """
    Layers too small for FP8 to be faster with the job's batch, by the measured table (hopper backend only). bf16: they
    stay in BF16, and the table at start says so. warn: one sentence at start.
    """

    cache: bool = True
    """
    Quantize a weight once per optimizer step and reuse it in every micro-batch, in backward and in recomputation. The
    table at start has its memory. The shards that FSDP2 gathers in FP8 (fsdp_fp8_all_gather) are kept either way: from
    step to step or, with one micro-batch and no recomputation, until backward has gathered them.
    """

    @property
    def grad_dtype(self) -> str:
        """Of gradients in FP8: the recipe's own."""
        return "auto"

    def __post_init__(self) -> None:
        check_choices(SECTION, self)
        if self.backend != "auto" and (self.backend == "emulated") != (self.recipe != "tokenwise"):
            raise ValueError(
                f"[{SECTION}] recipe = {self.recipe!r} has no backend {self.backend!r}: set backend = 'auto'."
            )
        if self.fsdp_fp8_all_gather == "on" and self.recipe != "tokenwise":
            raise ValueError(
                f"[{SECTION}] fsdp_fp8_all_gather = 'on' needs recipe = 'tokenwise', since emulated rules quantize a "
                f"weight at each use; got {self.recipe!r}. Set fsdp_fp8_all_gather = 'off'."
            )
        check_whole(SECTION, self, ("skip_first_layers", "skip_last_layers"), " of layers, 0 or more")
        check_switches(SECTION, self)
        check_patterns(SECTION, self, ("fqns", "exclude"))
