"""What a user can set in `[fp8.token_path]`."""

from dataclasses import dataclass
from typing import Literal

from converters.options import check_choices

Fused = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class TokenPathConfig:
    """The way of a token from the router to its experts and back, around experts in FP8."""

    fused: Fused = "auto"
    """
    Gathering, weighting and quantizing a token's rows in one kernel; un-permuting and summing them, with the shared
    expert's output, in another; backward likewise. auto: on with the hopper backend, where experts and layout allow it
    (the start table says why not). on: that, or an error. off: torchtitan's own operations.
    """

    def __post_init__(self) -> None:
        check_choices("fp8.token_path", self)
