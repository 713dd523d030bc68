"""Draws a chart as SVG, for the page before its script runs, or where no script may run: print, mail, previews."""

import math
from html import escape
from itertools import pairwise

from recipes.compare_charts import FEW, Chart, Curve, thin, value_range

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 12, 28
# What the width resolves; the script draws from all points.
POINTS = 420  # above FEW: dots that are many stay small


def draw(chart: Chart, first: int, last: int) -> str:
    """An <svg> of `chart` from step `first` to step `last`. Colours and widths come from the page's style sheet."""
    frame = _Frame(chart, first, last)
    parts = [_grid(frame), *(_curve(thin(curve, POINTS, POINTS), frame) for curve in chart.curves)]
    label = f"{escape(chart.title)}. {escape(chart.about)}"
    head = f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{label}">'
    clip = (
        f'<clipPath id="clip-{chart.key}"><rect x="{LEFT - 6}" y="{TOP}" width="{WIDTH - LEFT - RIGHT + 12}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>'
    )
    return f'{head}{clip}{parts[0]}<g clip-path="url(#clip-{chart.key})">{"".join(parts[1:])}</g></svg>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) between `low` and `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    width = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [width * i for i in range(math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9) + 1)]


class _Frame:
    """Turns steps and values into coordinates."""

    def __init__(self, chart: Chart, first: int, last: int) -> None:
        self.first, self.last, self.base = first, max(last, first + 1), chart.base
        self.low, self.high = value_range(chart)

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _grid(frame: _Frame) -> str:
    parts, rows = [], ticks(frame.low, frame.high)
    places = max(0, -math.floor(math.log10(rows[1] - rows[0]) + 1e-9)) if len(rows) > 1 else 3
    for value in rows:
        y = frame.y(value)
        base = ' class="base"' if frame.base is not None and math.isclose(value, frame.base, abs_tol=1e-12) else ""
        parts.append(f'<line{base} x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.{places}f}</text>')
    for step in ticks(frame.first, frame.last, 6):
        if step == int(step):
            x = f"{frame.x(step):.1f}"
            parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{int(step):,}</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
    return f'<g class="grid">{"".join(parts)}</g>'


def _curve(curve: Curve, frame: _Frame) -> str:
    points = [
        (frame.x(s), frame.y(v) if math.isfinite(v) else None) for s, v in zip(curve.steps, curve.values, strict=True)
    ]
    marks = f"c{curve.colour} {curve.kind}"
    if curve.kind == "band":
        upper = " ".join(f"{x:.1f},{y:.1f}" for x, y in points if y is not None)
        lower = " ".join(
            f"{frame.x(s):.1f},{frame.y(-v):.1f}" for s, v in zip(curve.steps[::-1], curve.values[::-1], strict=True)
        )
        return f'<polygon class="{marks}" points="{upper} {lower}"/>'
    if curve.kind == "guide":
        ends = [(frame.y(sign * curve.values[0])) for sign in (1, -1)]
        return "".join(
            f'<line class="{marks}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>' for y in ends
        )
    if curve.kind in ("dots", "rings", "points"):
        few = curve.kind == "dots" and len(points) < FEW
        return "".join(_mark(curve.kind, marks, x, y, few) for x, y in points if y is not None)
    return f'<path class="{marks}" d="{_path(points)}"/>'


def _mark(kind: str, marks: str, x: float, y: float, few: bool) -> str:
    if kind == "points":
        return f'<path class="{marks}" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>'
    radius = 5 if kind == "rings" else 2.4 if few else 1.6
    return f'<circle class="{marks}{" few" * few}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _path(points: list[tuple[float, float | None]]) -> str:
    """A nan or inf leaves a hole."""
    begins = [points[0][1] is not None, *(before[1] is None for before, _ in pairwise(points))]
    drawn = zip(begins, points, strict=True)
    return "".join(f"{'M' if begin else 'L'}{x:.1f} {y:.1f}" for begin, (x, y) in drawn if y is not None)
