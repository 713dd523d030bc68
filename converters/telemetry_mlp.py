"""What is measured of the expert MLP and of a single grouped GEMM, forward and backward.

    operands   x, h, g (the gradient of the output), dy13 (of y13), w13, w2      FP8 against high precision
    GEMMs      y13, out, dh, dx, dw13, dw2                                       against float32, from the operands
                                                                                 before they were quantized

Each GEMM is measured alone: its reference has the same inputs, also where they carry the error of GEMMs before it.
Where a tensor exists in FP8 only (rows that came through an FP8 all-to-all, weights that FSDP2 gathered in FP8) the
reference starts from that, or the figure is left out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from converters.backends.reference import QuantizedWeight, swiglu
from converters.telemetry import Tap, open_tap, tap_of
from converters.telemetry_rows import PlainRows, Rows
from converters.telemetry_stats import (
    ROWS,
    LargestExperts,
    Sample,
    columns,
    expand_scale,
    gemm,
    largest_experts,
    operand,
    sample_rows,
    stride,
    wgrad,
)

Quantized = tuple[Tensor, Tensor]  # q [M, K], scale
Parts = list[tuple[Tensor, Tensor | None]]  # of a weight, along N: [E, N_i, K], with a scale [E] where it is FP8
Weights = tuple[Callable[[], QuantizedWeight], Callable[[], QuantizedWeight]]


def sampled(quantized: Quantized, sample: Sample) -> Quantized:
    """The sampled rows, with a scale that broadcasts."""
    q, scale = quantized
    if scale.dim() and scale.shape[0] == q.shape[0]:
        scale = scale[sample.rows]
    q = q[sample.rows]
    return q, expand_scale(scale, q.shape)


def sample_of(tap: Tap, offs: Tensor, M: int) -> Sample:
    """The rows of [M, ...] that are looked at."""
    return tap.shared(("sample", M), offs, lambda: sample_rows(offs, M))


def experts_of(tap: Tap, offs: Tensor, M: int) -> LargestExperts:
    """The experts whose weight gradients are looked at."""
    return tap.shared(("experts", M), offs, lambda: largest_experts(offs, M))


def see_rows(tap: Tap, key: str, x: Rows, quantized: Quantized, offs: Tensor) -> Tensor:
    """Measures an operand whose rows x exist in high precision; offs: ends of the groups. -> The sampled rows."""
    sample = sample_of(tap, offs, quantized[0].shape[0])
    taken = x.take(sample.rows)
    tap.add(key, operand(taken, *sampled(quantized, sample), sample.valid, x.amax(offs)))
    return taken


def see_weight(tap: Tap, key: str, parts: Parts, weight: QuantizedWeight, label: str | None = None) -> None:
    """Measures a weight in high precision. weight: q [E, N, K] of all parts."""
    scale = expand_scale(weight.scale, weight.q.shape)
    varies = scale.dim() == 3 and scale.shape[1] > 1
    at, some, rows = 0, [], []
    for w, _ in parts:
        N, step = w.shape[1], max(1, w.shape[0] * w.shape[1] // ROWS)
        some.append(slice(at, at + N, step))
        rows.append(w[:, ::step])
        at += N
    x = _joined(rows)
    q = _joined([weight.q[:, at].view(torch.uint8) for at in some]).view(weight.q.dtype)
    scale = _joined([scale[:, at] for at in some]) if varies else scale
    scale = scale.expand(*x.shape[:2], scale.shape[2] if scale.dim() == 3 else 1).flatten(0, 1)
    amax = [torch.linalg.vector_norm(w, torch.inf) for w, _ in parts]
    amax = amax[0] if len(amax) == 1 else torch.stack(amax).amax()
    tap.add(key, operand(x.flatten(0, 1), q.flatten(0, 1), scale, None, amax), label)


def _joined(parts: list[Tensor]) -> Tensor:
    """[E, n_i, K] -> [E, n, K]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def see_shard(tap: Tap, data: Tensor, q: Tensor, scale: Tensor) -> None:
    """Measures a shard of a weight [e, N, K] as it is quantized for FSDP2's all-gather, under its own name."""
    if tap.begins("shard"):
        weight = QuantizedWeight(q=q.view(data.shape), scale=scale, q_t=q, scale_t=scale)
        see_weight(tap, "w", [(data, None)], weight, tap.name)


def open_mlp(w1: Tensor, what: str) -> Tap | None:
    """The tap of the MLP that has w1, if pass `what` of it is to be measured now."""
    return mlp_tap(w1) if open_tap(w1, what) is not None else None


def mlp_tap(w1: Tensor) -> Tap | None:
    """An MLP is shown under its own name, not that of w1."""
    tap = tap_of(w1)
    if tap is not None:
        tap.label = tap.name.removesuffix(".w1")
    return tap


def sent_rows(w1: Tensor, key: str, x: Rows, quantized: Quantized) -> None:
    """Measures rows that leave for their experts in FP8: x, or g (the gradient). w1: of this rank's experts."""
    if (tap := open_mlp(w1, f"sent {key}")) is not None:
        rows = torch.full((1,), quantized[0].shape[0], device=quantized[0].device)
        see_rows(tap, key, x, quantized, rows)


def _values(w: Tensor, scale: Tensor | None) -> Tensor:
    return w.float() if scale is None else w.float() * scale.view(-1, 1, 1)


def parts_of(weights: list[Tensor], scale: Tensor | None) -> Parts:
    """Weights [E, N_i, K], or [N_i, K] as of one expert, as they are measured."""
    return [(w if w.dim() == 3 else w.unsqueeze(0), scale) for w in weights]


def _sizes(parts: Parts) -> list[int]:
    return [w.shape[1] for w, _ in parts]


def _rows_of(parts: Parts) -> Tensor:
    """Some rows of a weight, as `columns(output, _sizes(parts))` picks them: float32 [E, parts * C, K]."""
    return _joined([_values(w[:, :: stride(w.shape[1])], scale) for w, scale in parts])


def columns_of(parts: Parts) -> Tensor:
    """Some columns of a weight, the rows of its transpose: float32 [E, C, N]."""
    return _joined([_values(w[:, :, :: stride(w.shape[2])], scale) for w, scale in parts]).mT


def mlp_forward(
    w13: Parts,
    w2: Parts,
    weights: Weights,
    offs: Tensor,
    x: Rows | None,
    x8: Quantized,
    y13: Tensor,
    h8: Quantized,
    out: Tensor,
) -> bool:
    """To be called at the end of the forward. x None: the rows are here in FP8 only. -> Whether it was measured."""
    if (tap := open_mlp(w13[0][0], "forward")) is None:
        return False
    sample = sample_of(tap, offs, y13.shape[0])
    thin, y = sample.thin, y13[sample.rows]
    h = swiglu(y)
    tap.add("h", operand(h, *sampled(h8, sample), sample.valid))
    tap.add("out", gemm(sample.thinned(h), _rows_of(w2), columns(out[thin.rows]), thin))
    if x is not None:
        taken = sample.thinned(see_rows(tap, "x", x, x8, offs))
        tap.add("y13", gemm(taken, _rows_of(w13), columns(sample.thinned(y), _sizes(w13)), thin))
        tap.keep("x", x.some_columns(), x8[1])
    _see_weights(tap, w13, w2, weights)
    return True


def _see_weights(tap: Tap, w13: Parts, w2: Parts, weights: Weights) -> None:
    for key, parts, weight in (("w13", w13, weights[0]), ("w2", w2, weights[1])):
        if parts[0][1] is None:
            see_weight(tap, key, parts, weight())


def mlp_weights_again(w13: Parts, w2: Parts, weights: Weights) -> None:
    """The weights of a second micro-batch, added to those of the first: does what is cached still have its scale?"""
    if torch._C._current_graph_task_id() == -1 and (tap := open_mlp(w13[0][0], "again")) is not None:
        _see_weights(tap, w13, w2, weights)


def gemm_forward(
    w: Parts, weight: QuantizedWeight | None, offs: Tensor, x: Tensor, x8: Quantized, y: Tensor | list[Tensor]
) -> None:
    """To be called at the end of y [M, N] = x [M, K] @ W^T, whole or [M, N_i] of each part. weight: where W is not FP8
    already.
    """
    if (tap := open_tap(w[0][0], "forward")) is None:
        return
    y = y if isinstance(y, Tensor) else torch.cat(y, dim=1)
    tap.label = "+".join([tap.name, *(_last(part) for part, _ in w[1:])])
    sample = sample_of(tap, offs, x.shape[0])
    taken = sample.thinned(see_rows(tap, "x", PlainRows(x), x8, offs))
    if w[0][1] is None:
        see_weight(tap, "w", w, weight)
    tap.add("y", gemm(taken, _rows_of(w), columns(y[sample.thin.rows], _sizes(w)), sample.thin))
    tap.keep(_place(w), columns(x).clone(), x8[1])


def gemm_backward(w: Parts, offs: Tensor, g: Tensor, g8: Quantized, sx: Tensor, dx: Tensor, dw: list[Tensor]) -> None:
    """To be called at the end of the backward: g [M, N], dx [M, K], dw: parts [E, N_i, K]; sx: the scale of x."""
    if (tap := open_tap(w[0][0], "backward")) is None:
        return
    sample = sample_of(tap, offs, g.shape[0])
    taken = sample.thinned(see_rows(tap, "g", PlainRows(g), g8, offs))
    tap.add("dx", gemm(taken, columns_of(w), columns(dx[sample.thin.rows]), sample.thin))
    if (x := tap.recall(_place(w), sx)) is not None:
        tap.add("dw", wgrad(columns(g, _sizes(w)), x, dw, experts_of(tap, offs, len(g))))


def _last(weight: Tensor) -> str:
    tap = tap_of(weight)
    return "?" if tap is None else tap.name.rpartition(".")[2]


def _place(w: Parts) -> tuple[object, ...]:
    return w[0][0].storage_offset(), w[0][0].shape
