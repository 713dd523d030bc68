"""The README: its tables are the committed measurements, its commands and files exist."""

import json
import re
from pathlib import Path

import pytest

from recipes.readme_tables import RESULTS, ROOT, TABLES, render

README = (ROOT / "README.md").read_text()


def test_tables_are_the_committed_results() -> None:
    assert render(README) == README, "run: python -m recipes.readme_tables"


@pytest.mark.parametrize("name", [name for name, (file, _) in TABLES.items() if (RESULTS / file).is_file()])
def test_every_table_is_shown_and_filled(name: str) -> None:
    body = re.search(f"<!-- table:{name} -->\n(.*?)<!-- end:{name} -->", README, re.DOTALL)
    assert body, name
    assert body[1].count("\n| ") >= 3, "a heading, a rule and at least one row"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.name)
def test_a_result_says_where_and_how_it_was_measured(path: Path) -> None:
    environment = json.loads(path.read_text())["environment"]
    assert {"date", "gpu", "versions", "command"} <= set(environment)
    assert environment["command"].startswith(("python", "torchrun", "make"))


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.MULTILINE))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_named_recipes_exist() -> None:
    for name in re.findall(r"recipes/[\w{},]+\.toml", README):
        head, options, tail = re.fullmatch(r"([^{]*)(?:\{([^}]*)\})?(.*)", name).groups()
        for option in (options or "").split(","):
            assert (ROOT / f"{head}{option}{tail}").is_file(), f"{head}{option}{tail}"
