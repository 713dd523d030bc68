"""Which tile a grouped GEMM gets, by shape: a small table measured on an H200. Nothing is tuned at run time.

In a whole forward and backward the order matters less than in runs of one kernel: 2 to 16, and bands that end with
their expert, are all within 2 % at scout, maverick/4 and small (recipes.bench).
"""

from dataclasses import dataclass
from functools import cache

import torch

ROWS = 64  # of a tile, for one of its two compute partitions
BK = 128  # bytes of contraction a step, one swizzled row of shared memory


@dataclass(frozen=True)
class Tile:
    """bn: columns. stages: of the load ring. pieces: that 64 rows are stored in. order: rows of a band of tiles."""

    bn: int
    stages: int
    pieces: int
    order: int


# TFLOP/s in runs of 60 ms, W13 forward / W2 forward / W13 dgrad, by rows an expert (H200, torch 2.11, triton 3.6):
#    order        4                   8                   16                  32
#    8192         1224 1074 1216      1240 1260 1293      1279 1275 1296      1257 1251 1245
#    4096          832 1072 1124      1204 1226 1213      1229 1238 1237      1122 1117 1143
#    1024         1050 1117 1118      1139 1161 1163      1149 1163 1191      1135 1074 1036
#    256          1006  838  790       859  842  823       836  825  785       812  832  716
#    128           711  673  607       702  689  674       732  678  642       683  693  615
def rows_tile(M: int, N: int, K: int, E: int, itemsize: int, precise: bool) -> Tile:
    """For y[M, N] = x[M, K] @ w[e]^T with E experts and an output of `itemsize` bytes an element."""
    order = 16 if M >= 512 * E else 8
    if precise:
        return Tile(bn=128, stages=4, pieces=1, order=order)
    return Tile(bn=256, stages=3, pieces=1 if itemsize == 2 else 2, order=order)


# TFLOP/s, dW13 / dW2, the same way:
#    order        2               4               8               16
#    8192         1306 1243       1289 1259       1330 1259       1317 1283
#    4096         1213 1168       1227 1211       1232 1253       1259 1255
#    1024         1063 1027       1021 1017       1048 1002        946  925
#    256           621  607        601  610        611  609        564  552
#    128           405  381        381  353        383  372        375  351
def wgrad_tile(M: int, N: int, K: int, E: int, itemsize: int, precise: bool) -> Tile:
    """For dw[e][N, K] = a[N, tokens] @ b[K, tokens]^T over M tokens of E experts."""
    if precise:
        return Tile(bn=128, stages=4, pieces=1, order=8)
    return Tile(bn=256, stages=3, pieces=1 if itemsize == 2 else 2, order=8)


@cache
def programs(device: torch.device) -> int:
    """One program a streaming multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count
