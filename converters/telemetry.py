"""Who measures a converted module while it trains?  A tap, found by a number that the module's op is handed.

The op's body runs at run time also under torch.compile, so a tap sees the tensors themselves in every layout. Which
module the op belongs to comes as a 0-dim int64 tensor on the CPU: an input of the graph, so layers still share one, and
reading it waits for no device. Without telemetry there is no such tensor and nothing below runs.

A tap that is open measures the first forward and the first backward it sees: with gradient accumulation the first
micro-batch, and no recomputation. What it finds stays on the device until somebody reads it.

Beside weight_cache.py the second and last state at module level, for the same reason: a custom op is handed tensors.
It holds no tap alive.
"""

import itertools
import weakref

import torch
from torch import Tensor

from converters.telemetry_stats import join

_taps: "weakref.WeakValueDictionary[int, Tap]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Tap:
    """What one converted module measures in one step. `records`: see telemetry_stats.py."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: dict[str, Tensor] = {}
        self._kept: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._ahead: set[object] = set()
        self._number = next(_numbers)
        _taps[self._number] = self

    @property
    def tag(self) -> Tensor:
        """The number, as the module hands it to its op."""
        return torch.tensor(self._number, device="cpu")

    def open(self) -> None:
        """The next forward and backward are measured; what was measured before is dropped."""
        self.records, self._kept, self._ahead = {}, {}, {"forward", "backward"}

    def close(self) -> None:
        """Nothing more is measured."""
        self._kept, self._ahead = {}, set()

    def begins(self, what: str) -> bool:
        """Whether pass `what` is to be measured; true once after `open`."""
        if what not in self._ahead:
            return False
        self._ahead.remove(what)
        return True

    def add(self, key: str, record: Tensor) -> None:
        """Records operand or GEMM `key`, together with what is there already."""
        self.records[key] = join(self.records[key], record) if key in self.records else record

    def keep(self, key: str, value: Tensor, mark: Tensor | None = None) -> None:
        """Keeps `value` for `recall`. mark: something that tells one micro-batch from another."""
        self._kept[key] = (value, mark)

    def recall(self, key: str, mark: Tensor | None = None) -> Tensor | None:
        """What was kept, once; None if there is nothing, or of other rows. All nan if another mark was kept with it."""
        value, before = self._kept.pop(key, (None, None))
        if value is None or mark is None or before is None:
            return value
        return torch.where((mark == before).all(), value, torch.nan) if mark.shape == before.shape else None


def open_tap(tag: Tensor | None, what: str) -> Tap | None:
    """The tap with this number if it is to measure pass `what`, "forward" or "backward", now."""
    if tag is None or torch.compiler.is_compiling():
        return None
    tap = _taps.get(int(tag))
    return tap if tap is not None and tap.begins(what) else None
