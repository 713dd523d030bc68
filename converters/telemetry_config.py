"""What a user can set in `[fp8.telemetry]` of a recipe: how often a run measures itself, and beside which twin."""

from dataclasses import dataclass

from converters.options import check_whole

SECTION = "fp8.telemetry"


@dataclass(frozen=True)
class FP8TelemetryConfig:
    """What FP8 does to each converted layer, measured while training; works without a converter too (loads, norms)."""

    every: int = 0
    """
    Measure every N steps, and in steps 1 and 2: amax, scales, flushed and saturated shares and SQNR of operands and
    GEMMs, gradient norms by group, loads of the experts. Scalars under `fp8/` in TensorBoard. 0: nothing at all.
    """

    twin: str = ""
    """
    Folder of the BF16 run with the same seed and data, itself trained with `fp8.telemetry.every`: at equal steps the
    share of each layer's tokens that goes to the same experts as there is recorded.
    """

    def __post_init__(self) -> None:
        check_whole(SECTION, self, ("every",), " of steps, 0 for never")
        if not isinstance(self.twin, str):
            raise ValueError(f"[{SECTION}] twin = {self.twin!r} must be the folder of a run.")
        if self.twin and not self.every:
            raise ValueError(f"[{SECTION}] twin = {self.twin!r} needs every = N, with the N of the twin.")
