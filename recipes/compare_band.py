"""How far do two runs of one precision lie apart? The band: what the seeds of BF16 differ by, smoothed like the gap.

A single step says little: two curves that cross have no spread there. So the band at step t is the largest spread since
step t/2. Simulated (curves with an exponentially fading memory, 4,000 draws): a run that is but another seed leaves the
spread of two runs in 50 % of the draws when one step is looked at, and this band in 2 %, 5 %, 9 % or 19 % when the
curves remember 1/20, 1/8, 1/4 or all of the run's length; a third BF16 run more than halves each of these.
"""

from collections.abc import Sequence

import numpy as np

from recipes.runs import Series


def trailing_mean(values: Sequence[float], smooth: int) -> tuple[float, ...]:
    """Mean over the last `smooth` values, over fewer at the start. A nan stays in its own windows."""
    start = [sum(values[: i + 1]) / (i + 1) for i in range(min(smooth - 1, len(values)))]
    if len(values) < smooth:
        return tuple(start)
    # windows and no running sum, which would carry a nan on
    return (*start, *np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), smooth).mean(axis=1).tolist())


def spread(runs: Sequence[Series], steps: Sequence[int], smooth: int) -> tuple[float, ...]:
    """Largest difference between any two of the smoothed `runs` at each of `steps`, which all of them must have."""
    smoothed = [trailing_mean([run[step] for step in steps], smooth) for run in runs]
    return tuple(max(values) - min(values) for values in zip(*smoothed, strict=True))


def band(steps: Sequence[int], spreads: Sequence[float]) -> tuple[float, ...]:
    """The largest of `spreads` since half of each step; `steps` ascend."""
    since, values = np.searchsorted(steps, [step / 2 for step in steps]), np.asarray(spreads)
    return tuple(float(values[first : i + 1].max()) for i, first in enumerate(since))
