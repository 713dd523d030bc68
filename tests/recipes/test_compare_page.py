"""The page and the pictures: complete, standing alone, escaped, small; curves thinned honestly."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from recipes.compare_charts import Curve, charts, thin
from recipes.compare_html import page
from recipes.compare_numbers import Limits, Report, compare_all
from recipes.compare_plot import plot_column, plot_report
from recipes.compare_svg import ticks
from recipes.runs import Run
from tests.recipes.compared import falling, info, run, shifted

FP8 = ("fp8.grouped_experts",)
NAMED = '<script>alert("x")</script> & co'


def four(steps=range(1, 101), label: str = "fp8", noise: float = 0.01) -> Report:
    """BF16, FP8 and two seeds, with everything that a page can show."""

    def one(name: str, seed: int, shift: float, converters: tuple[str, ...] = ()) -> Run:
        random = np.random.default_rng(seed)
        norms = {step: 1 + 0.1 * float(random.random()) for step in steps}
        shares = random.dirichlet(np.ones(4)).tolist()
        load = {f"fp8/layers.1.moe/load/{e}": {steps[-1]: share} for e, share in enumerate(shares)}
        rest = {"tokens_per_second": dict.fromkeys(steps, 100.0), "memory_gib": {1: 2.0}}
        val = {steps[-1] // 2: 5.0 + shift, steps[-1]: 4.0 + shift}
        described = info(seed=seed if name.startswith("seed") else 1, converters=converters)
        metrics = {"grad_norm": norms, "val_loss": val, **rest, **load}
        return run(name, steps, shifted(shift), noise, seed, described, **metrics)

    return compare_all(
        one("bf16", 1, 0.0), [one(label, 7, 0.002, FP8)], [one("seed2", 2, 0.01), one("seed3", 3, -0.01)], Limits()
    )


class Reader(HTMLParser):
    """Tags that are open, those that were left open, and every address that a browser would fetch."""

    VOID = frozenset(("meta", "br", "path", "circle", "rect", "line", "polygon"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.fetched, self.tags, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_stands_alone_and_has_its_parts_in_order():
    text = page(four())
    reader = Reader(text)
    assert reader.open == []
    assert reader.fetched == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert reader.tags.count("script") == 2
    words = " ".join(reader.words)
    order = [
        "fp8 - bf16 = +0.0020 at step 100, band",
        "Loss",
        "Gap",
        "Gradient norm ratio",
        "Expert load",
        "fp8 in numbers",
    ]
    order += ["Validation", "Runs", "Config differences", "How it is judged"]
    places = [words.index(part) for part in order]
    assert places == sorted(places)
    for part in (
        "torchtitan version",
        "0.2.2",
        "fp8.grouped_experts",
        "tokens/s a device, median",
        "band of the seeds",
    ):
        assert part in words
    assert "prefers-color-scheme: dark" in text
    assert 'http-equiv="refresh"' not in text
    assert '<meta http-equiv="refresh" content="30">' in page(four(), reload_seconds=29.5)


def test_every_picture_of_the_page_is_well_formed_and_shows_its_curves():
    text = page(four())
    plots = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    big = {plot.attrib["aria-label"].split(".")[0]: plot for plot in plots if "viewBox" in plot.attrib}
    assert list(big) == ["Loss", "Gap", "Gradient norm ratio", "Expert load"]
    drawn = [element.attrib["class"] for element in big["Gap"].iter() if "class" in element.attrib]
    assert {"c0 band", "c1 line", "c1 dots few", "c1 points", "c2 seed", "c3 seed", "grid", "base"} <= {*drawn}
    assert drawn.index("c0 band") < drawn.index("c2 seed") < drawn.index("c1 line")  # the band lies under the rest


def test_names_are_text_and_nothing_else():
    text = page(four(label=NAMED))
    assert "<script>alert" not in text
    assert Reader(text).tags.count("script") == 2
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; co" in text


def test_2000_steps_of_four_runs_stay_below_500_kb_and_whole():
    text = page(four(range(1, 2001)))
    assert len(text.encode()) < 500_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1], parse_constant=pytest.fail)
    gap = next(chart for chart in data["charts"] if chart["key"] == "gap")
    line = next(curve for curve in gap["curves"] if curve["kind"] == "line")
    assert data["xs"][line["x"]] == list(range(1, 2001))
    assert len(line["y"]) == 2000
    assert len(page(four(range(1, 12001))).encode()) < 500_000


def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    values = np.sin(np.arange(5000) / 400)
    values[1234], values[4321], values[2000] = 9.0, -9.0, math.nan
    curve = Curve(name="", run=1, kind="line", steps=tuple(range(5000)), values=tuple(values.tolist()))
    thinned = thin(curve)
    assert len(thinned.steps) <= 1202
    assert {0, 1234, 4321, 4999} <= {*thinned.steps}
    assert all(curve.values[step] == value for step, value in zip(thinned.steps, thinned.values, strict=True))
    assert thin(curve, whole=5000) is curve


def test_runs_with_a_hole_or_one_step_are_drawn():
    a, hole = run("bf16"), run("fp8", loss=lambda step: math.nan if step == 60 else falling(step))
    text = page(compare_all(a, [hole], [], Limits()))
    path = max(re.findall(r'<path class="c1 line" d="(M[^"]*)"', text), key=len)  # the others are the legend's
    assert path.count("M") == 2
    assert "nan" not in path
    assert "NaN" not in text.split('id="data">')[1].split("</script>")[0]
    one = page(compare_all(run("bf16", [1]), [run("fp8", [1])], [], Limits()))
    assert Reader(one).open == []
    assert "Too short or too small to judge" in one


def test_several_runs_have_colours_of_their_own():
    others = [run(f"fp8_{n}", loss=shifted(0.001 * n)) for n in range(7)]
    loss, gap = charts(compare_all(run("bf16"), others, [], Limits()))
    assert [curve.colour for curve in loss.curves] == [0, 1, 2, 3, 4, 5, 1, 2]
    assert [curve.name for curve in gap.curves][:2] == ["fp8_0, each step", "fp8_0, mean of 5"]


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (-0.02, 0.021, [-0.02, -0.01, 0, 0.01, 0.02])]
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
    assert ticks(1.0, 1.0) == [1.0]


def test_pictures_are_as_large_as_they_promise(tmp_path):
    """A column of a paper is 3.35 inches: 1340 pixels at 400 an inch."""
    for draw, size in ((plot_report, (1800, 1260)), (plot_column, (1340, 1280))):
        path = tmp_path / draw.__name__
        draw(four(), path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == size
        assert len(data) > 50_000  # a blank one has 10 kB
