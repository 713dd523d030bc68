"""How are the GEMMs of one weight computed?  The part of the config that travels with every weight: small, frozen,
hashable, and a string where an op takes no dataclass.
"""

import functools
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from converters.fingerprint import CODE

Recipe = Literal["tokenwise", "rowwise", "tensorwise", "blockwise", "delayed"]
Backend = Literal["auto", "reference", "hopper", "emulated"]
Wgrad = Literal["fp8", "fp8_columns", "bf16"]
Accumulate = Literal["fast", "precise_wgrad", "precise"]
GradDtype = Literal["auto", "e4m3", "e5m2"]

# SQNR in dB that a recipe must reach against float64 on normal inputs (weights std 0.02), per output and gradient.
# Two E4M3 operands of 31.5 dB each give 28.5 dB for one GEMM; two GEMMs and a SwiGLU in a row leave 23 to 24. An E5M2
# operand has 25.5 dB, so one with an E4M3 partner gives 24.5, and a gradient through two of them about 20.
SQNR_FLOOR_DB = {"tokenwise": 23.0, "rowwise": 23.0, "tensorwise": 19.5, "blockwise": 23.0, "delayed": 19.5}

OWN_GRAD_DTYPE = {"tokenwise": "e4m3", "rowwise": "e4m3", "blockwise": "e4m3", "tensorwise": "e5m2", "delayed": "e5m2"}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How the GEMMs of one weight are computed. `backend` is resolved: never "auto". Unknown values are a ValueError.

    temporary: the weight is a view, or gathered for one pass; what is quantized from it is not kept, even with `cache`.
    fp8_all_gather: FSDP2 gathers the weight in FP8.
    used_once: one forward and one backward are all that use it between two optimizer steps; what was quantized from it
    is dropped on the way.
    key: all of it as one string, since ops take no dataclasses, and which code this is (fingerprint.py);
    `Numerics.parse` is the inverse. temporary_key: that of the same, but temporary. Made once: an op asks for one at
    each call. The key is in the repr for torch.compile's cache, which knows a weight by that.
    """

    recipe: Recipe = "tokenwise"
    backend: Literal["reference", "hopper", "emulated"] = "reference"
    wgrad: Wgrad = "fp8"
    accumulate: Accumulate = "fast"
    cache: bool = True
    temporary: bool = False
    fp8_all_gather: bool = False
    used_once: bool = False
    grad_dtype: GradDtype = "auto"
    key: str = field(init=False, compare=False)
    temporary_key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                allowed = ", ".join(map(repr, known))
                raise ValueError(f"Numerics {name} = {getattr(self, name)!r} is unknown: choose one of {allowed}.")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Numerics {name} = {getattr(self, name)!r} must be true or false.")
        if self.backend == "hopper" and self.recipe == "rowwise":
            raise ValueError("backend 'hopper' has no recipe 'rowwise': 'reference' and 'emulated' have.")
        if self.backend != "emulated" and needs_emulation(self.recipe, self.grad_dtype):
            raise ValueError(
                f"backend {self.backend!r} has no recipe {self.recipe!r} with {self.gradients} gradients: only "
                "'emulated' has."
            )
        for name, temporary in (("key", self.temporary), ("temporary_key", True)):
            values = (temporary if n == "temporary" else getattr(self, n) for n in INIT_FIELDS)
            object.__setattr__(self, name, "/".join([*map(str, values), CODE]))

    @staticmethod
    @functools.cache
    def parse(key: str) -> "Numerics":
        """The numerics whose `key` this is."""
        values = ({"True": True, "False": False}.get(v, v) for v in key.split("/")[:-1])
        return Numerics(**dict(zip(INIT_FIELDS, values, strict=True)))

    @property
    def gradients(self) -> Literal["e4m3", "e5m2"]:
        """The format of dY: the one that was asked for, or the recipe's own."""
        return OWN_GRAD_DTYPE[self.recipe] if self.grad_dtype == "auto" else self.grad_dtype

    @property
    def wgrad_from_hp(self) -> bool:
        """Whether the weight gradient starts from high precision, so that backward needs x itself."""
        return self.wgrad != "fp8" or self.recipe == "rowwise"

    def __str__(self) -> str:
        extra = [f"wgrad={self.wgrad}"] * (self.wgrad != "fp8") + [self.accumulate] * (self.accumulate != "fast")
        extra += [f"{self.gradients} gradients"] * (self.gradients != OWN_GRAD_DTYPE[self.recipe])
        return f"{self.recipe}, {self.backend}" + "".join(f", {e}" for e in extra)


INIT_FIELDS = tuple(f.name for f in fields(Numerics) if f.init)
# Not options.check_choices: torch.compile traces numerics that are made in its graph, but no types.
SWITCHES = tuple(f.name for f in fields(Numerics) if f.type is bool)
CHOICES = {f.name: get_args(f.type) for f in fields(Numerics) if get_args(f.type)}


def needs_emulation(recipe: str, grad_dtype: str) -> bool:
    """Whether only the emulated backend computes this: anything but tokenwise and rowwise with E4M3 gradients."""
    own = OWN_GRAD_DTYPE[recipe] if grad_dtype == "auto" else grad_dtype
    return recipe not in ("tokenwise", "rowwise") or own == "e5m2"
