"""Weight quantization into both layouts: q [E, N, K] for the forward and q_t [E, K, N] for the input gradient.

One scale an expert, so q and q_t hold the same bytes. Several weights are written into one buffer, joined along N: w1
and w3 become W13 without a copy. The weights change little in an optimizer step and a power-of-two scale hardly ever,
so the last scale is carried:

    cold      amax pass, cast pass                                        6 bytes an element of BF16
    carried   cast pass with the carried scale, true amax on the side     4 bytes
              repair pass: casts again the experts whose true amax gives another scale, returns at once for the others

Carried or cold, the result is the same bits, and nobody waits for the host. A weight that lives for one pass only (as
FSDP2 gathers it) needs one layout: a byte an element less.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from converters.kernels.e4m3 import abs_bits, pow2_scale, raise_amax, reciprocal, to_e4m3
from converters.kernels.ops import operator
from converters.kernels.sizes import cdiv

CHUNK, BLOCK = 1 << 16, 8192  # elements a program of the amax pass reads, in steps of
REPAIR_PROGRAMS = 512  # they share the tiles of an expert that needs it; usually each looks at E scales and ends
BN, BK = 64, 128  # tile of the cast: 0.79 ms for 16 x 8192 x 5120 BF16 on an H200, 0.62 is the floor at 4.3 TB/s


@triton.jit
def amax_kernel(w, amax, size, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Raises amax[e], int32 bits, to the largest |value| of the `size` contiguous elements of slice e."""
    e = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    top = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, CHUNK, BLOCK):
        o = begin + i + tl.arange(0, BLOCK)
        top = tl.maximum(top, abs_bits(tl.load(w + e * size + o, mask=o < size, other=0.0).to(tl.float32)))
    raise_amax(amax + e, tl.max(top, 0))


@triton.jit
def _cast_tile(
    w, q, q_t, inverse, e, n0, k0, n_offset, N_w, N, K,
    BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Casts a tile of w [E, N_w, K] into rows n_offset and on of q (ROWS), and into q_t (COLUMNS). Returns its amax."""
    n, k = n0 + tl.arange(0, BN), k0 + tl.arange(0, BK)
    inside = (n < N_w)[:, None] & (k < K)[None, :]
    v = tl.load(w + (e * N_w + n0) * K + (tl.arange(0, BN)[:, None] * K + k[None, :]), mask=inside, other=0.0)
    v = v.to(tl.float32)
    cast = to_e4m3(v * inverse)
    if ROWS:
        tl.store(q + (e * N + n_offset + n0) * K + (tl.arange(0, BN)[:, None] * K + k[None, :]), cast, mask=inside)
    if COLUMNS:
        to = q_t + (e * K + k0) * N + n_offset + (tl.arange(0, BK)[:, None] * N + n[None, :])
        tl.store(to, tl.trans(cast), mask=(k < K)[:, None] & (n < N_w)[None, :])
    return tl.max(tl.max(abs_bits(v), 1), 0)


@triton.jit
def _cast_kernel(
    w, q, q_t, amax, carried, scale, n_offset, N_w, N, K, CARRIED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    if CARRIED:
        inverse = reciprocal(tl.load(carried + e))
    else:
        s, inverse = pow2_scale(tl.load(amax + e))
        tl.store(scale + e, s, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
    n0, k0 = tl.program_id(0) * BN, tl.program_id(1) * BK
    bits = _cast_tile(w, q, q_t, inverse, e, n0, k0, n_offset, N_w, N, K, BN, BK, ROWS, COLUMNS)
    if CARRIED:
        raise_amax(amax + e, bits)


@triton.jit
def _repair_kernel(
    w, q, q_t, amax, carried, scale, n_offset, N_w, N, K, E, PROGRAMS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    down = tl.cdiv(N_w, BN)
    tiles = down * tl.cdiv(K, BK)
    for i in range(E):
        e = i + tl.zeros((), tl.int64)
        s, inverse = pow2_scale(tl.load(amax + e))
        tl.store(scale + e, s, mask=tl.program_id(0) == 0)
        if s.to(tl.int32, bitcast=True) != tl.load(carried + e).to(tl.int32, bitcast=True):
            for t in range(tl.program_id(0), tiles, PROGRAMS):
                n0, k0 = (t % down) * BN, (t // down) * BK
                _cast_tile(w, q, q_t, inverse, e, n0, k0, n_offset, N_w, N, K, BN, BK, ROWS, COLUMNS)


def _offsets(ws: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Each weight with its first row in the joined one."""
    ends = accumulate(w.shape[1] for w in ws)
    return [(w, end - w.shape[1]) for w, end in zip(ws, ends, strict=True)]


def _launch(
    ws: Sequence[Tensor], q: Tensor, q_t: Tensor, scale: Tensor, carried: Tensor | None, rows: bool, columns: bool
) -> None:
    E, K = scale.numel(), ws[0].shape[2]
    N = sum(w.shape[1] for w in ws)
    amax = torch.zeros(E, dtype=torch.int32, device=scale.device)
    tile = {"BN": BN, "BK": BK, "ROWS": rows, "COLUMNS": columns, "num_warps": 4}
    if carried is None:
        for w in ws:
            size = w.shape[1] * K
            amax_kernel[(cdiv(size, CHUNK), E)](w, amax, size, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8)
    for w, offset in _offsets(ws):
        grid = (cdiv(w.shape[1], BN), cdiv(K, BK), E)
        where = (offset, w.shape[1], N, K)
        _cast_kernel[grid](w, q, q_t, amax, carried, scale, *where, CARRIED=carried is not None, **tile)
    if carried is not None:
        for w, offset in _offsets(ws):
            where = (offset, w.shape[1], N, K, E)
            _repair_kernel[(REPAIR_PROGRAMS,)](
                w, q, q_t, amax, carried, scale, *where, PROGRAMS=REPAIR_PROGRAMS, **tile
            )  # fmt: skip


def _empty_weight(
    ws: Sequence[Tensor], carried: Tensor | None = None, rows: bool = True, columns: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    E, _, K = ws[0].shape
    N = sum(w.shape[1] for w in ws)
    q = ws[0].new_empty((E, N, K) if rows else 0, dtype=torch.float8_e4m3fn)
    q_t = ws[0].new_empty((E, K, N) if columns else 0, dtype=torch.float8_e4m3fn)
    return q, q_t, ws[0].new_empty(E, dtype=torch.float32)


@operator(_empty_weight)
def quantize_weight(
    ws: Sequence[Tensor], carried: Tensor | None = None, rows: bool = True, columns: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """ws [E, N_i, K], any float dtype, joined along N -> q [E, N, K], q_t [E, K, N] E4M3, scale [E] float32.

    carried: scale [E] of the last quantization of the same weights, or None. It changes the time, not one bit.
    rows, columns: whether q and q_t are wanted; the one that is not is empty.
    """
    q, q_t, scale = _empty_weight(ws, carried, rows, columns)
    _launch([w.contiguous() for w in ws], q, q_t, scale, carried, rows, columns)
    return q, q_t, scale
