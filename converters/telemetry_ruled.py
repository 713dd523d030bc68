"""What is measured where a scale rule is emulated (rules/): the operands are quantized once more, at measured steps."""

from torch import Tensor

from converters.backends.reference import QuantizedWeight
from converters.rules.formats import E4M3, Format
from converters.rules.operand import QuantizedOperand
from converters.rules.ragged import Ragged
from converters.rules.rule import Rule
from converters.telemetry import is_measured
from converters.telemetry_gradients import see_gradient, see_input_gradient, see_weight_gradient, watch_hidden
from converters.telemetry_mlp import (
    Parts,
    Quantized,
    gemm_backward,
    gemm_forward,
    mlp_forward,
    mlp_weights_again,
)
from converters.telemetry_rows import PlainRows


def _quantized(operand: QuantizedOperand, rows: Ragged) -> Quantized:
    """q and a scale that broadcasts over it, of rows [M, K] or of a weight [E, N, K]."""
    q, scale, outer = operand.q, operand.scale, operand.outer
    if outer is not None:
        outer = outer.view(-1, 1, 1) if q.dim() == 3 else rows.by_row(outer)[:, None]
        scale = outer if scale is None else outer * scale
    return q, scale if scale is not None else q.new_ones((1,) * q.dim(), dtype=outer.dtype)


def _weight(rule: Rule, ws: list[Tensor], slot: int, rows: Ragged) -> QuantizedWeight:
    q, scale = _quantized(rule.weight(ws, 2, slot), rows)
    return QuantizedWeight(q=q, scale=scale, q_t=q, scale_t=scale)


def ruled_mlp_forward(
    rule: Rule, rows: Ragged, x: Tensor, w13: Parts, w2: Parts, y13: Tensor, h: Tensor, out: Tensor
) -> None:
    """To be called at the end of the forward; h [M, H]: silu(y1) * y3."""
    if not is_measured(w13[0][0]):
        return
    rule = rule.in_plain()
    weights = (lambda: _weight(rule, [w for w, _ in w13], 1, rows)), (lambda: _weight(rule, [w2[0][0]], 3, rows))
    x8, h8 = (_quantized(rule.rows(t, E4M3, rows, slot), rows) for t, slot in ((x, 0), (h, 2)))
    if not mlp_forward(w13, w2, weights, rows.offs, PlainRows(x), x8, y13, h8, out):
        mlp_weights_again(w13, w2, weights)


def ruled_mlp_backward(
    rule: Rule,
    fmt: Format,
    rows: Ragged,
    g: Tensor,
    x: Tensor,
    w13: Parts,
    w2: Parts,
    y13: Tensor,
    dh: Tensor,
    dy: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """To be called at the end of the backward; results: dx, dw13 [2, E, H, D], dw2."""
    w1, (dx, dw13, dw2) = w13[0][0], results
    if not is_measured(w1):
        return
    rule = rule.in_plain()
    g8, dy8 = _quantized(rule.rows(g, fmt, rows, 5), rows), _quantized(rule.rows(dy, fmt, rows, 4), rows)
    see_gradient(w1, PlainRows(g), g8, rows.offs)
    if (watch := watch_hidden(w1, w2, rows.offs, g8[1], y13)) is not None:
        watch.see_dh(dh)
        watch.see_dy13(dy8)
        see_input_gradient(w13, rows.offs, dy8[1], _quantized(rule.rows(x, E4M3, rows, 0), rows)[1], dx)
        for key, dw in (("dw1", dw13[0]), ("dw2", dw2), ("dw3", dw13[1])):
            see_weight_gradient(w1, key, dw, rows.offs)


def ruled_mm_forward(rule: Rule, rows: Ragged, x: Tensor, w: Tensor, y: Tensor) -> None:
    """To be called at the end of y = x @ w^T; w [E, N, K]."""
    if is_measured(w):
        rule = rule.in_plain()
        x8 = _quantized(rule.rows(x, E4M3, rows, 0), rows)
        gemm_forward([(w, None)], _weight(rule, [w], 1, rows), rows.offs, x, x8, y)


def ruled_mm_backward(
    rule: Rule, fmt: Format, rows: Ragged, g: Tensor, x: Tensor, w: Tensor, dx: Tensor, dw: Tensor
) -> None:
    """To be called at the end of the backward; w and dw [E, N, K]."""
    if is_measured(w):
        rule = rule.in_plain()
        g8, x8 = _quantized(rule.rows(g, fmt, rows, 2), rows), _quantized(rule.rows(x, E4M3, rows, 0), rows)
        gemm_backward([(w, None)], rows.offs, g, g8, x8[1], dx, [dw])
