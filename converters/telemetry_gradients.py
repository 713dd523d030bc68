"""What is measured of an MLP's backward (see telemetry_mlp.py), in the order in which it is computed.

What a step needs of one before it is kept in the tap, with a scale that tells one micro-batch from another.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from converters.backends.reference import dswiglu, swiglu
from converters.telemetry import Tap
from converters.telemetry_mlp import (
    Parts,
    Quantized,
    columns_of,
    experts_of,
    mlp_tap,
    open_mlp,
    sample_of,
    sampled,
    see_rows,
)
from converters.telemetry_rows import Rows
from converters.telemetry_stats import Sample, columns, gemm, operand, wgrad


def see_gradient(w1: Tensor, g: Rows, g8: Quantized, offs: Tensor) -> None:
    """Measures the gradient of the output, g [M, D], as it is quantized, and keeps some of it for dh and dW2."""
    if (tap := open_mlp(w1, "g")) is None:
        return
    taken = see_rows(tap, "g", g, g8, offs)
    tap.keep("g", sample_of(tap, offs, g8[0].shape[0]).thinned(taken).clone(), g8[1])
    tap.keep("g columns", g.some_columns(), g8[1])


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Measures dh [M, H] and what becomes of it, dy13 [M, 2H]. sg: the scale of g; some: columns of y13."""

    tap: Tap
    sample: Sample
    w2: Parts
    sg: Tensor
    y13: Tensor
    some: Tensor

    def see_dh(self, dh: Tensor) -> None:
        """To be called before dh is used up."""
        tap, sample = self.tap, self.sample
        taken = dh[sample.rows]
        if (g := tap.recall("g", self.sg)) is not None:
            tap.add("dh", gemm(g, columns_of(self.w2), columns(sample.thinned(taken)), sample.thin))
        tap.keep("dy13", dswiglu(taken, self.y13[sample.rows]))
        tap.keep("dy13 columns", dswiglu(columns(dh), self.some))

    def see_dy13(self, dy8: Quantized) -> None:
        """To be called with dy13 as it was quantized, after `see_dh`."""
        tap, sample = self.tap, self.sample
        taken = tap.recall("dy13")
        tap.add("dy13", operand(taken, *sampled(dy8, sample), sample.valid))
        tap.keep("dy13", sample.thinned(taken).clone(), dy8[1])
        tap.keep("dy13 columns", tap.recall("dy13 columns"), dy8[1])
        if (g := tap.recall("g columns", self.sg)) is not None:
            _keep_sides(tap, "dw2", g, swiglu(self.some))


def watch_hidden(w1: Tensor, w2: Parts, offs: Tensor, sg: Tensor, y13: Tensor) -> HiddenGradient | None:
    """What watches dh, if it is to be watched. w1: of this MLP."""
    if (tap := open_mlp(w1, "backward")) is None:
        return None
    M, H = y13.shape[0], y13.shape[1] // 2
    return HiddenGradient(tap=tap, sample=sample_of(tap, offs, M), w2=w2, sg=sg, y13=y13, some=columns(y13, [H, H]))


def see_input_gradient(w13: Parts, offs: Tensor, sdy: Tensor, sx: Tensor, dx: Tensor) -> None:
    """Measures dx [M, D]. sdy, sx: the scales of dy13 and x."""
    if (tap := mlp_tap(w13[0][0])) is None or (dy13 := tap.recall("dy13", sdy)) is None:
        return
    thin = sample_of(tap, offs, dx.shape[0]).thin
    tap.add("dx", gemm(dy13, columns_of(w13), columns(dx[thin.rows]), thin))
    x, dy13 = tap.recall("x", sx), tap.recall("dy13 columns", sdy)
    if x is not None and dy13 is not None:
        for key, part in zip(("dw1", "dw3"), dy13.chunk(2, dim=1), strict=True):
            _keep_sides(tap, key, part, x)


def see_weight_gradient(w1: Tensor, key: Literal["dw1", "dw2", "dw3"], dw: Tensor, offs: Tensor) -> None:
    """Measures dW [E, N, K] of the MLP that has w1."""
    if (tap := mlp_tap(w1)) is None:
        return
    sides = [tap.recall((key, side)) for side in range(2)]
    if sides[0] is not None and sides[1] is not None:
        tap.add("dw2" if key == "dw2" else "dw13", wgrad(*sides, [dw], experts_of(tap, offs, len(sides[0]))))


def _keep_sides(tap: Tap, key: str, *sides: Tensor) -> None:
    for i, side in enumerate(sides):
        tap.keep((key, i), side)
