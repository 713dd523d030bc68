"""What is measured of an MLP's backward (see telemetry_mlp.py), in the order in which it is computed.

What a step needs of one before it is kept in the tap, with a scale that tells one micro-batch from another.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from converters.backends.reference import dswiglu, swiglu
from converters.telemetry import Tap
from converters.telemetry_mlp import Parts, Quantized, columns_of, mlp_tap, open_mlp, sampled, see_rows
from converters.telemetry_rows import Rows
from converters.telemetry_stats import GEMM_ROWS, columns, gemm, operand, sample_rows, wgrad


def see_gradient(w1: Tensor, g: Rows, g8: Quantized, offs: Tensor) -> None:
    """Measures the gradient of the output, g [M, D], as it is quantized, and keeps some of it for dh and dW2."""
    if (tap := open_mlp(w1, "g")) is None:
        return
    see_rows(tap, "g", g, g8, offs)
    thin = sample_rows(offs, g8[0].shape[0]).thinned(GEMM_ROWS)
    tap.keep("g", g.take(thin.rows), g8[1])
    tap.keep("g columns", g.some_columns(), g8[1])


@dataclass(frozen=True, kw_only=True)
class HiddenGradient:
    """Measures dh [M, H] and what becomes of it, dy13 [M, 2H]. sg: the scale of g."""

    tap: Tap
    offs: Tensor
    w2: Parts
    sg: Tensor
    y13: Tensor

    def see_dh(self, dh: Tensor) -> None:
        """To be called before dh is used up."""
        tap, y13 = self.tap, self.y13
        sample = sample_rows(self.offs, dh.shape[0])
        thin = sample.thinned(GEMM_ROWS)
        if (g := tap.recall("g", self.sg)) is not None:
            tap.add("dh", gemm(g, columns_of(self.w2), columns(dh[thin.rows]), thin))
        tap.keep("dy13 rows", dswiglu(dh[sample.rows], y13[sample.rows]))
        tap.keep("dy13", dswiglu(dh[thin.rows], y13[thin.rows]))
        tap.keep("dy13 columns", dswiglu(columns(dh), columns(y13, _halves(y13))))

    def see_dy13(self, dy8: Quantized) -> None:
        """To be called with dy13 as it was quantized, after `see_dh`."""
        tap, sample = self.tap, sample_rows(self.offs, self.y13.shape[0])
        tap.add("dy13", operand(tap.recall("dy13 rows"), *sampled(dy8, sample), sample.valid))
        for key in ("dy13", "dy13 columns"):
            tap.keep(key, tap.recall(key), dy8[1])
        if (g := tap.recall("g columns", self.sg)) is not None:
            _keep_sides(tap, "dw2", g, swiglu(columns(self.y13, _halves(self.y13))))


def watch_hidden(w1: Tensor, w2: Parts, offs: Tensor, sg: Tensor, y13: Tensor) -> HiddenGradient | None:
    """What watches dh, if it is to be watched. w1: of this MLP."""
    tap = open_mlp(w1, "backward")
    return None if tap is None else HiddenGradient(tap=tap, offs=offs, w2=w2, sg=sg, y13=y13)


def see_input_gradient(w13: Parts, offs: Tensor, sdy: Tensor, sx: Tensor, dx: Tensor) -> None:
    """Measures dx [M, D]. sdy, sx: the scales of dy13 and x."""
    if (tap := mlp_tap(w13[0][0])) is None or (dy13 := tap.recall("dy13", sdy)) is None:
        return
    thin = sample_rows(offs, dx.shape[0]).thinned(GEMM_ROWS)
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
        tap.add("dw2" if key == "dw2" else "dw13", wgrad(*sides, [dw], offs))


def _keep_sides(tap: Tap, key: str, *sides: Tensor) -> None:
    for i, side in enumerate(sides):
        tap.keep((key, i), side)


def _halves(y13: Tensor) -> list[int]:
    return [y13.shape[1] // 2] * 2
