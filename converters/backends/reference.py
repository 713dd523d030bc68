"""FP8 experts in plain torch: any device, any group sizes; the oracle that every kernel is compared with.

Real E4M3 casts, float32 accumulation, one GEMM a group. Each function here has a twin of the same name in hopper.py.
What loops over groups reads their sizes on the host, so it is a custom op: torch.compile sees one node with a known
shape.

Scales. `x = q * scale`, scale a power of two: 2**ceil(log2(amax / 448)). Multiplying by one is exact, so an FP8 tensor
re-scaled to another row or column scale loses nothing but what becomes subnormal.
Letters. M routed rows, D model dim, H expert hidden, E experts, N and K the output and contraction dims of a GEMM.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from converters.group_ends import spans

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-30  # all-zero rows get a finite scale; a higher floor (1e-12, 1e-4 elsewhere) flushes small gradients


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which rows belong to which expert. offs: int32 [E], ends of the groups; rows past the last end are nobody's."""

    offs: Tensor

    @property
    def tables(self) -> list[Tensor]:
        """For `groups_of`: an op takes no dataclass."""
        return [self.offs]


@dataclass(frozen=True, kw_only=True)
class WgradOperand:
    """One side of the weight gradient: q [M, D] E4M3, scale [E, D]: one scale an expert and column."""

    q: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight for both directions; payload and scale never live apart.

    q [E, N, K] with scale [E] or [E, N] serves the forward, q_t [E, K, N] with scale_t [E] or [E, K] the input
    gradient.
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor
    scale_t: Tensor


def pow2_scale(amax: Tensor) -> Tensor:
    """The smallest power of two that brings amax to 448 or below. Float32, exact: exponent arithmetic, no log2.

    amax / 448 = mantissa * 2**exponent with mantissa in [0.5, 1): the scale is 2**exponent, or one less if mantissa is
    exactly 0.5. inf and nan amax give a nan scale, so that they stay visible in everything the scale touches.
    """
    mantissa, exponent = torch.frexp(amax.float().clamp_min(AMAX_FLOOR) / FP8_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, torch.nan))


def cast(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as E4M3, saturating at 448; nan stays nan. Bytes equal on every torch: the clamp comes before the
    cast.
    """
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def groups(offs: Tensor, M: int) -> Groups:
    """offs: int32 [E]. M: rows of the buffer, at least offs[-1]."""
    return Groups(offs=offs)


def groups_of(tables: list[Tensor], M: int) -> Groups:
    """The groups of M rows with these `Groups.tables`."""
    return Groups(offs=tables[0])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, D] -> q [M, D], scale [M]."""
    scale = pow2_scale(x.abs().amax(1))
    return cast(x, scale[:, None]), scale


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def swiglu(y13: Tensor) -> Tensor:
    """y13 [M, 2H] -> silu(left) * right, [M, H], in float32; float64 stays, for gradcheck."""
    y1, y3 = _wide(y13).chunk(2, dim=1)
    return torch.nn.functional.silu(y1) * y3


def dswiglu(dh: Tensor, y13: Tensor) -> Tensor:
    """Gradient of `swiglu`: dh [M, H], y13 [M, 2H] -> [M, 2H], in float32; float64 stays."""
    y1, y3 = _wide(y13).chunk(2, dim=1)
    dh, sigmoid = _wide(dh), torch.sigmoid(y1)
    return torch.cat([dh * y3 * sigmoid * (1 + y1 * (1 - sigmoid)), dh * y1 * sigmoid], dim=1)


def swiglu_rows(y13: Tensor) -> tuple[Tensor, Tensor]:
    """y13 [M, 2H] -> q [M, H], scale [M]."""
    return quantize_rows(swiglu(y13))


def dswiglu_rows(dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
    """dh [M, H], y13 [M, 2H] -> q [M, 2H], scale [M] over both halves. dh is used up: a backend may write q over it."""
    return quantize_rows(dswiglu(dh, y13))


def wgrad_operand(q: Tensor, scale: Tensor, groups: Groups) -> WgradOperand:
    """Row-scaled FP8 re-scaled to one scale an expert and column: exact but for new subnormals."""
    return wgrad_operand_hp(q.float() * scale[:, None], groups)


def wgrad_operand_hp(x: Tensor, groups: Groups) -> WgradOperand:
    """x [M, D] quantized with one scale an expert and column."""
    q, scale = _columns(x, groups.offs)
    return WgradOperand(q=q, scale=scale)


@torch.library.custom_op("titan_moe_fp8::reference_columns", mutates_args=())
def _columns(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.zeros(x.shape, dtype=FP8, device=x.device)
    scale = x.new_ones((offs.numel(), x.shape[1]), dtype=torch.float32)
    for e, (begin, end) in enumerate(spans(offs, x.shape[0])):
        if begin < end:
            scale[e] = pow2_scale(x[begin:end].abs().amax(0))
            q[begin:end] = cast(x[begin:end], scale[e])
    return q, scale


@_columns.register_fake
def _(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((offs.shape[0], x.shape[1]), dtype=torch.float32)


def quantize_weight(
    weights: list[Tensor],
    per_row: bool = False,
    previous: QuantizedWeight | None = None,
    forward: bool = True,
    backward: bool = True,
) -> QuantizedWeight:
    """weights [E, N_i, K], joined along N (w1 and w3 become one GEMM).

    per_row False: one scale an expert, so q and q_t are the same bytes. True: one scale a row of each contraction.
    previous: may save a backend the search for an amax, never changes the result. forward, backward: is q, q_t wanted?
    """
    w = torch.cat(weights, dim=1)
    scale = pow2_scale(w.abs().amax(2) if per_row else w.abs().amax((1, 2)))
    scale_t = pow2_scale(w.abs().amax(1)) if per_row else scale
    shape, none = (w.shape[0], -1, 1), w.new_empty(0, dtype=FP8)
    q = cast(w, scale.view(shape)) if forward else none
    q_t = cast(w.transpose(1, 2), scale_t.view(shape)).contiguous() if backward else none
    return QuantizedWeight(q=q, scale=scale, q_t=q_t, scale_t=scale_t)


def amax_slices(w: Tensor) -> Tensor:
    """w [e, ...] -> float32 [e], the largest |value| of each slice."""
    return w.abs().amax(tuple(range(1, w.dim()))).float() if w.numel() else w.new_zeros(len(w), dtype=torch.float32)


def cast_slices(w: Tensor, scale: Tensor) -> Tensor:
    """w [e, ...], scale [e] -> E4M3 of w's shape."""
    return cast(w, scale.view(-1, *[1] * (w.dim() - 1)))


def join_weight(parts: list[Tensor], scale: Tensor, transposed: bool) -> QuantizedWeight:
    """A weight that is FP8 already: parts E4M3 [E, N_i, K], joined along N, with one scale an expert, [E].

    Only the layout that is asked for is made, q_t for the input gradient or q; the other one is empty.
    """
    q = torch.cat([p.view(torch.uint8) for p in parts], dim=1)
    none = q.new_empty(0).view(FP8)
    if transposed:
        return QuantizedWeight(q=none, scale=scale, q_t=q.transpose(1, 2).contiguous().view(FP8), scale_t=scale)
    return QuantizedWeight(q=q.view(FP8), scale=scale, q_t=none, scale_t=scale)


def gemm_rows(
    q: Tensor,
    scale: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    groups: Groups,
    out_dtype: torch.dtype,
    accumulate: str = "fast",
) -> Tensor:
    """y[m] = (q[m] * scale[m]) @ (w_q[e] * w_scale[e])^T for the rows m of expert e.

    q [M, K], scale [M], w_q [E, N, K], w_scale [E] or [E, N] -> [M, N]; rows of no group: 0. Sums are always float32.
    """
    return _rows_times_weights(q, scale, w_q, w_scale.view(w_q.shape[0], -1), groups.offs, out_dtype)


@torch.library.custom_op("titan_moe_fp8::reference_gemm_rows", mutates_args=())
def _rows_times_weights(
    q: Tensor, scale: Tensor, w_q: Tensor, w_scale: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    out = scale.new_zeros((q.shape[0], w_q.shape[1]), dtype=out_dtype)
    for e, (begin, end) in enumerate(spans(offs, q.shape[0])):
        if begin < end:
            acc = q[begin:end].float() @ w_q[e].float().t()
            out[begin:end] = (acc * (scale[begin:end, None] * w_scale[e])).to(out_dtype)
    return out


@_rows_times_weights.register_fake
def _(q: Tensor, scale: Tensor, w_q: Tensor, w_scale: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return scale.new_empty((q.shape[0], w_q.shape[1]), dtype=out_dtype)


def gemm_wgrad(
    a: WgradOperand, b: WgradOperand, groups: Groups, out_dtype: torch.dtype, accumulate: str = "fast"
) -> Tensor:
    """dw[e] = a_e^T @ b_e, zeros for no rows: a of [M, N], b of [M, K] -> [E, N, K]."""
    dw = _rows_contracted(a.q, b.q, groups.offs, torch.float32)
    return (dw * a.scale[:, :, None] * b.scale[:, None, :]).to(out_dtype)


def gemm_wgrad_hp(a: Tensor, b: Tensor, groups: Groups, out_dtype: torch.dtype) -> Tensor:
    """The weight gradient from high precision operands: a [M, N], b [M, K] -> [E, N, K]."""
    return _rows_contracted(a, b, groups.offs, out_dtype)


@torch.library.custom_op("titan_moe_fp8::reference_gemm_wgrad", mutates_args=())
def _rows_contracted(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = torch.zeros((offs.numel(), a.shape[1], b.shape[1]), dtype=out_dtype, device=a.device)
    for e, (begin, end) in enumerate(spans(offs, a.shape[0])):
        if begin < end:
            out[e] = (a[begin:end].float().t() @ b[begin:end].float()).to(out_dtype)
    return out


@_rows_contracted.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((offs.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)
