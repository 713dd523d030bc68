"""Which tile a grouped GEMM gets, by shape: a small table measured on an H200. Nothing is tuned at run time."""

from dataclasses import dataclass
from functools import cache

import torch

BM, BK = 128, 128  # rows of a tile (groups.py knows it too) and bytes of contraction a step, one swizzled row of shared memory


@dataclass(frozen=True)
class Tile:
    """bn: columns. stages: depth of the load ring. out_bufs: store buffers a half tile. order: rows of a band."""

    bn: int
    stages: int
    out_bufs: int
    order: int


def rows_tile(M: int, N: int, K: int, E: int, itemsize: int, precise: bool) -> Tile:
    """For y[M, N] = x[M, K] @ w[e]^T with E experts and an output of `itemsize` bytes an element."""
    if precise:
        return Tile(bn=128, stages=4, out_bufs=1, order=16)
    order = 16 if M >= 512 * E else 4
    return Tile(bn=256, stages=4 if itemsize == 2 else 3, out_bufs=1, order=order)


def wgrad_tile(M: int, N: int, K: int, E: int, itemsize: int, precise: bool) -> Tile:
    """For dw[e][N, K] = a[N, tokens] @ b[K, tokens]^T over M tokens of E experts."""
    if precise:
        return Tile(bn=128, stages=4, out_bufs=1, order=4)
    return Tile(bn=256, stages=4 if itemsize == 2 else 3, out_bufs=1, order=8 if M >= 8192 * E else 4)


@cache
def programs(device: torch.device) -> int:
    """One program a streaming multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
