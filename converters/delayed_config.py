"""What a user can set in `[fp8.delayed]`: scales from the amax history, for recipes = "delayed"."""

from dataclasses import dataclass, fields
from typing import Literal

from torchao.core.config import AOBaseConfig

from converters.options import check_choices, check_switches, check_whole

SECTION = "fp8.delayed"


@dataclass(frozen=True)
class DelayedConfig(AOBaseConfig):
    """TransformerEngine's delayed scaling: a cast uses the scale that earlier maxima have given."""

    amax_history_len: int = 1024
    """How many maxima an operand remembers: one a micro-batch (update = "microbatch") in which it has occurred."""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """max: the scale comes from the largest maximum remembered. most_recent: from the last one."""

    margin: int = 0
    """Leaves a factor of 2**margin between the maximum and the format's largest value."""

    weights: Literal["every_microbatch", "cached", "cached_stale_scale"] = "every_microbatch"
    """
    When weights are quantized. cached: in the first micro-batch of a step, and the scale stays with the data.
    cached_stale_scale: the same data, but multiplied by the scale of the latest update: a bug of TransformerEngine 1.7
    and before (TransformerEngine#1047), to reproduce its runs and for nothing else.
    """

    warm_start: bool = False
    """The first use of an operand takes its maximum now. false: it is cast with scale 1, as TransformerEngine does."""

    update: Literal["microbatch", "step"] = "microbatch"
    """
    When scales are updated. microbatch: after every forward and every backward of a module. step: once, after the
    optimizer's step, so that all micro-batches of the first step are cast with scale 1.
    """

    def __post_init__(self) -> None:
        check_choices(SECTION, self)
        for name, least in (("amax_history_len", 1), ("margin", -64)):
            check_whole(SECTION, self, (name,), f", {least} or more", least)
        check_switches(SECTION, self)

    @property
    def key(self) -> str:
        """All of it as one string: custom ops take no dataclasses. `DelayedConfig.parse` is the inverse."""
        return "/".join(str(getattr(self, f.name)) for f in fields(self))

    @staticmethod
    def parse(key: str) -> "DelayedConfig":
        """The config whose `key` this is."""
        length, algo, margin, weights, warm, when = key.split("/")
        return DelayedConfig(int(length), algo, int(margin), weights, warm == "True", when)
