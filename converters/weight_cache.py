"""Quantized weights, made once per optimizer step and reused: by every micro-batch, by backward, by recomputation.

An entry belongs to the storage and place of the weights it was made from and holds their version counters: whatever
writes into a weight (optimizer, checkpoint load, init) ends it. Payload and scale are one object, so a fresh scale can
never meet an old payload: the bug that turned weights to zero elsewhere (TransformerEngine#1047). An old entry is not
dead, though: its amax is a good guess for the next one, which the hopper backend checks on the device. Where a step
uses a weight once (`Numerics.used_once`), each layout is dropped after its use: none is left when gradients peak. Then
q_t is made together with q, in one reading of the weight, unless it would be in the way until backward wants it.

An entry dies with its weights. A storage's Python object lives as long as the storage, also where only C++ holds that
one (torch gives it back when it is asked for again), so a weak reference to it calls us, once a storage and at no cost
to a lookup.

The one mutable state at module level in this project: custom ops receive plain tensors, so what they share must be
reachable from here. Views of a weight, and weights that live only from an all-gather to the next reshard, are not
cached (expert_weight.py).
"""

import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import QuantizedWeight
from converters.config import Numerics

Key = tuple


@dataclass(frozen=True)
class _Entry:
    storages: tuple[weakref.ref, ...]
    versions: tuple[int, ...]
    quantized: QuantizedWeight

    def is_dead(self) -> bool:
        """Whether a storage is gone, whose address may be another one's by now."""
        return any(ref() is None for ref in self.storages)


_entries: dict[Key, _Entry] = {}
_dead: deque[Key] = deque()  # keys of entries one of whose storages has gone
_lock = threading.Lock()  # autograd runs a device's backward on a thread of its own


def quantize(weights: list[Tensor], numerics: Numerics, **options: object) -> QuantizedWeight:
    """weights [E, N_i, K], joined along N, quantized now. options: those of the backend's quantize_weight."""
    backend = get_backend(numerics.backend)
    return backend.quantize_weight(weights, per_row=numerics.recipe == "rowwise", **options)


def fp8_weight(
    weights: list[Tensor], scale: Tensor | None, numerics: Numerics, *, backward: bool, both: bool = True
) -> QuantizedWeight:
    """Plain weights [E, N_i, K], or [N_i, K] as of one expert, joined along N: with `scale` [E] as FSDP2 gathered them
    in FP8, else as `quantized` has them.
    """
    if scale is None:
        return quantized(weights, numerics, backward=backward, both=both)
    parts = [w if w.dim() == 3 else w.unsqueeze(0) for w in weights]
    return get_backend(numerics.backend).join_weight(parts, scale, backward)


def quantized(
    weights: list[Tensor], numerics: Numerics, *, backward: bool, transposed: bool = False, both: bool = True
) -> QuantizedWeight:
    """weights [E, N_i, K], or [N_i, K] as of one expert, joined along N: from the cache while they are unchanged, if
    `numerics` allows it.

    backward: whether q_t is wanted now, or q. Without the cache only that one is made. both: make and keep q_t together
    with q also where each is used once.
    transposed: they are given as [E, K, N_i]. A transposed view, or one with an expert dim, made before this would not
    share their version counters.
    """

    def orient(w: Tensor) -> Tensor:
        w = w if w.dim() == 3 else w.unsqueeze(0)
        return w.transpose(1, 2) if transposed else w

    def make(**options: object) -> QuantizedWeight:
        return quantize([orient(w) for w in weights], numerics, **options)

    if not numerics.cache or numerics.temporary or any(w.is_inference() for w in weights):
        return make(forward=not backward, backward=backward)
    place = tuple((w.untyped_storage()._cdata, w.storage_offset(), w.shape, w.stride(), w.dtype) for w in weights)
    key = (place, transposed, numerics.recipe, numerics.backend)
    versions = tuple(w._version for w in weights)
    try:
        with _lock:
            entry = _entries.get(key)
            if entry is not None and entry.is_dead():
                entry = None
            previous = None if entry is None else entry.quantized
            fresh = entry is not None and entry.versions == versions
            if fresh and (previous.q_t if backward else previous.q).numel():
                found = previous
            elif fresh and numerics.used_once:  # dropped after its use, and used once more
                return make(previous=previous, forward=not backward, backward=backward)
            else:
                found = make(previous=previous, backward=backward or both or not numerics.used_once)
            if found is not previous or numerics.used_once:
                kept = _without_used(found, backward) if numerics.used_once else found
                storages = entry.storages if entry else _watched(weights, key)
                _entries[key] = _Entry(storages, versions, kept)
            return found
    finally:
        if _dead:
            _drop_dead()


def _watched(weights: list[Tensor], key: Key) -> tuple[weakref.ref, ...]:
    """References to the weights' storages; when one goes, so does the entry at `key`."""
    return tuple(weakref.ref(w.untyped_storage(), partial(_bury, key)) for w in weights)


def _bury(key: Key, storage: weakref.ref) -> None:
    _dead.append(key)
    _drop_dead()


def _drop_dead() -> None:
    """Drops what `_dead` names, but what lives at a key by now. It never waits for the lock, since a storage may go at
    any time, also in a thread that has it: whoever has it comes here after its release.
    """
    while _dead and _lock.acquire(blocking=False):
        try:
            while _dead:
                key = _dead.popleft()
                if (entry := _entries.get(key)) is not None and entry.is_dead():
                    del _entries[key]
        finally:
            _lock.release()


def _without_used(w: QuantizedWeight, backward: bool) -> QuantizedWeight:
    """w without the layouts that a step with one micro-batch has done with; the scale stays, a guess for the next."""
    none = w.q.new_empty(0)
    return replace(w, q=none, q_t=none if backward else w.q_t)


def cached_bytes() -> int:
    """Memory of all entries."""
    with _lock:
        kept = [e.quantized for e in _entries.values()]
    _drop_dead()
    tensors = {id(t): t for w in kept for t in (w.q, w.q_t, w.scale, w.scale_t)}  # one scale may serve both layouts
    return sum(t.numel() * t.element_size() for t in tensors.values())


def clear() -> None:
    """Drops every entry."""
    with _lock:
        _entries.clear()
    _drop_dead()
