"""Do both runs send their tokens to the same experts? From the loads that [fp8.telemetry] records in either."""

from dataclasses import dataclass

from recipes.runs import Run, Series
from recipes.telemetry_tags import agreement, loads


@dataclass(frozen=True, kw_only=True)
class LoadDivergence:
    """By step, the share of rows that go to other experts in the layer where most do, and at the last step that layer.

    It is the total variation of the experts' shares, a lower bound: two tokens that swap experts are not seen.
    """

    worst: Series
    layer: str

    @property
    def last(self) -> tuple[int, float]:
        """Step and share of the last common measurement."""
        step = max(self.worst)
        return step, self.worst[step]


def load_divergence(a: Run, b: Run) -> LoadDivergence | None:
    """Layers and steps that both runs measured; None when there are none, as without telemetry in either run."""
    ours, theirs = loads(a.scalars), loads(b.scalars)
    by_step: dict[int, dict[str, float]] = {}
    for layer in sorted(ours.keys() & theirs.keys()):
        for step in sorted(ours[layer].keys() & theirs[layer].keys()):
            shares, others = ours[layer][step], theirs[layer][step]
            if len(shares) == len(others):
                by_step.setdefault(step, {})[layer] = 1 - agreement(shares, others)
    if not by_step:
        return None
    worst = {step: max(by_step[step].values()) for step in sorted(by_step)}
    last = by_step[max(by_step)]
    return LoadDivergence(worst=worst, layer=max(last, key=last.get))
