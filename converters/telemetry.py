"""Who measures a converted weight while it trains?  A tap, found by the storage of the weight.

The bodies of our ops run at run time also under torch.compile, so what a tap sees are the tensors themselves, in every
layout. They are plain tensors, of which the weight tells whose GEMM it is: by its storage, which its views share, and
which FSDP2 fills again at each gather. So graphs are the same with telemetry and without, and no op has an argument for
it. Without telemetry nothing has claimed a storage, and an op's body asks one empty dict.

A tap that is open measures the first forward and the first backward of a weight, or of a view of it (one expert's):
with gradient accumulation the first micro-batch, and no recomputation. What it finds stays on the device until somebody
reads it.

Beside weight_cache.py the second and last state at module level, for the same reason. It holds nothing alive.
"""

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from converters.telemetry_records import Found, Key

T = TypeVar("T")

_claims: "dict[int, tuple[StorageWeakRef, weakref.ref[Tap]]]" = {}


class Tap:
    """What the products with one weight measure in one step.

    found: see telemetry_records.py, which makes records of it. label: what it is shown under; whoever measures may
    change it, at first it is the weight's own name.
    """

    def __init__(self, name: str) -> None:
        self.name = self.label = name
        self.found: list[tuple[Key, Found]] = []
        self._kept: dict[object, tuple[Tensor, Tensor | None]] = {}
        self._shared: dict[object, tuple[Tensor, object]] = {}
        self._done: set[object] = set()
        self.is_open = False

    def open(self) -> None:
        """The next passes are measured; what was measured before is dropped."""
        self.close()
        self.found, self.is_open = [], True

    def close(self) -> None:
        """Nothing more is measured."""
        self._kept, self._shared, self._done, self.is_open = {}, {}, set(), False

    def begins(self, what: object) -> bool:
        """Whether `what` is to be measured now: the first time after `open`."""
        if not self.is_open or what in self._done:
            return False
        self._done.add(what)
        return True

    def add(self, key: str, rows: Found, label: str | None = None) -> None:
        """Notes what was found of operand or GEMM `key`, beside what is there already."""
        self.found.append(((label or self.label, key), rows))

    def shared(self, what: object, offs: Tensor, make: Callable[[], T]) -> T:
        """What `make` finds of the groups of rows that end at `offs`: once for all passes that have this tensor."""
        key = (what, offs.data_ptr())  # nobody else's address as long as it is held here
        if key not in self._shared:
            self._shared[key] = (offs, make())
        return self._shared[key][1]

    def keep(self, key: object, value: Tensor, mark: Tensor | None = None) -> None:
        """Keeps `value` for `recall`. mark: something that tells one micro-batch from another."""
        self._kept[key] = (value, mark)

    def recall(self, key: object, mark: Tensor | None = None) -> Tensor | None:
        """What was kept, once; None if there is nothing, or of other rows. All nan if another mark was kept with it."""
        value, before = self._kept.pop(key, (None, None))
        if value is None or mark is None or before is None:
            return value
        if mark.shape != before.shape:
            return None
        if mark.data_ptr() == before.data_ptr():  # the tensor that was kept, as backward has it of its forward
            return value
        return torch.where(((mark == before) | mark.isnan()).all(), value, torch.nan)


def claim(data: Tensor, tap: Tap) -> None:
    """Products with the plain tensor `data`, or a view of it, are this tap's from now on."""
    storage = data.untyped_storage()
    _claims[storage._cdata] = (StorageWeakRef(storage), weakref.ref(tap))


def release() -> None:
    """Forgets the storages and taps that are gone."""
    for key, (storage, tap) in list(_claims.items()):
        if storage.expired() or tap() is None:
            del _claims[key]


def tap_of(weight: Tensor) -> Tap | None:
    """The tap of a plain weight. A storage's address is its own as long as a claim refers to it."""
    if not _claims or torch.compiler.is_compiling():
        return None
    claimed = _claims.get(weight.untyped_storage()._cdata)
    return None if claimed is None else claimed[1]()


def is_measured(weight: Tensor) -> bool:
    """Whether something may be measured of this weight now; to be asked before an expensive preparation."""
    tap = tap_of(weight)
    return tap is not None and tap.is_open


def open_tap(weight: Tensor, what: str) -> Tap | None:
    """The tap of this weight if pass `what` of it, as it is or as this view, is to be measured now."""
    tap = tap_of(weight)
    return tap if tap is not None and tap.begins((what, weight.storage_offset(), weight.shape)) else None
