"""A comparison as one HTML page that stands alone: nothing is fetched, and without its script the charts still show."""

import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from recipes.compare_charts import Chart, Curve, charts, thin
from recipes.compare_facts import Facts, config_facts, provenance, run_facts, tiles, validation_facts
from recipes.compare_numbers import Comparison, Report
from recipes.compare_svg import draw
from recipes.compare_tables import band_note, notes, smoothing_note, summary_rows
from recipes.compare_verdict import BETTER, RULES, SAME, UNKNOWN, WORSE
from recipes.run_info import versions

FOLDER = Path(__file__).parent / "compare_page"
# word -> class in the style sheet, sign, headline
LOOKS = {
    SAME: ("same", "=", "Same"),
    WORSE: ("worse", "▲", "Worse"),
    BETTER: ("better", "▼", "Better"),
    UNKNOWN: ("unknown", "?", "Too short or too small to judge"),
}
ZOOMS = (("All", 1), ("Last half", 0.5), ("Last tenth", 0.1))


def page(report: Report, reload_seconds: float | None = None) -> str:
    """The page. `reload_seconds`: the browser reads it again after so long, for runs that go on."""
    drawn = [_thinned(chart) for chart in charts(report)]
    title = " and ".join(c.b.label for c in report.comparisons)
    body = [
        _header(report, title),
        *(_verdict(comparison) for comparison in report.comparisons),
        _zooms(),
        *_figures(drawn),
        *(_losses(comparison) for comparison in report.comparisons),
        _section("Validation", "At the steps where all were validated.", validation_facts(report)),
        _section("Runs", "What was run, how fast, in how much memory, with which versions.", run_facts(report)),
        _section("Config differences", "Keys that may change numbers and that differ.", config_facts(report)),
        _notes(report),
        _rules(report),
        _footer(),
    ]
    again = f'<meta http-equiv="refresh" content="{math.ceil(reload_seconds)}">' if reload_seconds else ""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">' + again,
            f"<title>{escape(title)} against {escape(report.reference.label)}</title>",
            f"<style>\n{_read('style.css')}</style>\n</head>\n<body>\n<main>",
            *(part for part in body if part),
            f'</main>\n<script type="application/json" id="data">{_data(drawn)}</script>',
            f"<script>\n{_read('script.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _header(report: Report, title: str) -> str:
    heading = f"{escape(title)} <small>against {escape(report.reference.label)}</small>"
    return (
        f"<header><p>Training runs compared</p><h1>{heading}</h1><p>{escape(provenance(report.reference))}</p></header>"
    )


def _verdict(comparison: Comparison) -> str:
    look, sign, headline = LOOKS[comparison.word]
    if comparison.exceeded and comparison.word != WORSE:
        look, sign, headline = "worse", "!", "Beyond the limit"
    lines = [comparison.verdict, *comparison.exceeded]
    said = "".join(f'<span class="line">{escape(line)}</span><br>' for line in lines).removesuffix("<br>")
    cells = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(number)}<small>{escape(more)}</small></dd></div>"
        for what, number, more in tiles(comparison)
    )
    icon = f'<span class="icon" aria-hidden="true">{sign}</span>'
    return (
        f'<div class="verdict {look}"><div class="said">{icon}<div><strong>{headline}</strong>{said}</div></div>'
        f'<dl class="tiles">{cells}</dl></div>'
    )


def _zooms() -> str:
    """Hidden until the script is there to serve them."""
    buttons = "".join(f'<button type="button" data-last="{share}">{name}</button>' for name, share in ZOOMS)
    return f'<nav aria-label="Steps shown" hidden>{buttons}<output></output></nav>'


def _figures(drawn: Sequence[Chart]) -> Iterable[str]:
    every = [step for chart in drawn for curve in chart.curves for step in (curve.steps[0], curve.steps[-1])]
    for chart in drawn:
        ordered = sorted(enumerate(chart.curves), key=lambda pair: pair[1].kind == "seed")  # drawn first, named last
        legend = "".join(f"<li>{_legend_entry(curve, i)}</li>" for i, curve in ordered)
        yield (
            f'<figure id="chart-{chart.key}"><h2>{escape(chart.title)}</h2><p>{escape(chart.about)}</p>'
            f'<ul class="legend">{legend}</ul>{draw(chart, min(every), max(every))}</figure>'
        )


def _legend_entry(curve: Curve, index: int) -> str:
    marks = f"c{curve.colour} {curve.kind}"
    samples = {
        "band": f'<rect class="{marks}" y="1" width="22" height="12"/>',
        "points": f'<path class="{marks}" d="M11 2l5 5l-5 5l-5 -5z"/>',
        "rings": f'<circle class="{marks}" cx="11" cy="7" r="5"/>',
        "dots": "".join(f'<circle class="{marks}" cx="{x}" cy="{y}" r="2"/>' for x, y in ((4, 5), (11, 9), (18, 4))),
        "guide": f'<line class="{marks}" x1="0" x2="22" y1="7" y2="7"/>',
    }
    sample = samples.get(curve.kind, f'<path class="{marks}" d="M2 7L20 7"/>')
    picture = f'<svg width="22" height="14" aria-hidden="true">{sample}</svg>'
    said = f"{picture}<span>{escape(curve.name)}</span><b></b>"
    return f'<button type="button" aria-pressed="true" data-curve="{index}">{said}</button>'


def _losses(comparison: Comparison) -> str:
    rows = [(row[0], row[1:]) for row in summary_rows(comparison)]
    heads = (comparison.a.label, comparison.b.label, "difference", "ratio", "band")
    about = f"At common steps, at full precision. Smoothed: {smoothing_note(comparison)}."
    return _section(f"{comparison.b.label} in numbers", about, Facts(heads=heads, rows=rows))


def _section(title: str, about: str, facts: Facts | None) -> str:
    if facts is None:
        return ""
    heads = "".join(f"<th scope=col>{escape(head)}</th>" for head in ("", *facts.heads))
    kind = ' class="text"' if facts.text else ""
    rows = []
    for what, cells in facts.rows:
        inner = ' class="in"' if what.startswith(" ") else ""
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th scope=row{inner}>{escape(what.strip())}</th>{numbers}</tr>")
    table = f"<table{kind}><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section><h2>{escape(title)}</h2><p>{escape(about)}</p><div class="wide">{table}</div></section>'


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes(report))
    return f'<section><h2>Notes</h2><ul class="notes">{items}</ul></section>' if items else ""


def _rules(report: Report) -> str:
    lines = [*RULES, *([band_note(report)] if report.seeds else [])]
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f"<section><details><summary>How it is judged</summary>{paragraphs}</details></section>"


def _footer() -> str:
    now, used = datetime.now(UTC).isoformat(sep=" ", timespec="minutes"), versions()
    return f"<footer>Made {now} by python -m recipes.compare, titan-moe-fp8 {used['titan-moe-fp8']}.</footer>"


def _thinned(chart: Chart) -> Chart:
    curves = tuple(thin(curve) for curve in chart.curves)
    return Chart(key=chart.key, title=chart.title, about=chart.about, base=chart.base, curves=curves)


def _data(drawn: Sequence[Chart]) -> str:
    """What the script draws: each list of steps once, values with six digits (compare.json has all of them)."""
    lists: dict[tuple[int, ...], int] = {}
    shown = []
    for chart in drawn:
        curves = [
            {"run": c.colour, "kind": c.kind, "x": lists.setdefault(c.steps, len(lists)), "y": _digits(c, chart)}
            for c in chart.curves
        ]
        shown.append({"key": chart.key, "base": chart.base, "curves": curves})
    text = json.dumps({"xs": list(lists), "charts": shown}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _digits(curve: Curve, chart: Chart) -> list[float | None]:
    form = ".4g" if chart.base == 0 else ".6g"
    return [float(format(value, form)) if math.isfinite(value) else None for value in curve.values]
