"""The house: imports go one way, files and functions stay small, the top level is what the README says."""

import ast
import graphlib
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("train", "recipes", "converters", "parallel")  # each may import itself and what stands right of it
TOP_LEVEL = {
    *("README.md", "recipes", "converters", "parallel", "train.py", "tests", "assets"),
    *("pyproject.toml", "Makefile", "LICENSE", "CONTRIBUTING.md"),
}
MAX_FILE_LINES = {"code": 250, "tests": 300}
MAX_FUNCTION_LINES = {"code": 60, "kernel": 80}
MEDIAN_FUNCTION_LINES = 16
# (file, imported top-level name) -> why that import has to wait until the function runs.
LATE_IMPORTS = {
    ("parallel/device.py", "torchtitan"): "it copies the device type when it is imported, prepare_device comes before",
    ("train.py", "parallel"): "torchtitan copies sys.argv and the device type when it is imported",
    ("train.py", "recipes"): "after prepare_device",
    ("train.py", "torchtitan"): "after prepare_device",
}


def python_files(*folders: str) -> list[Path]:
    """Files of the given layers or folders, relative to the root."""
    found = [p for f in folders for p in ([ROOT / f"{f}.py"] if f == "train" else (ROOT / f).rglob("*.py"))]
    return sorted(p.relative_to(ROOT) for p in found)


CODE = python_files(*LAYERS)
TESTS = python_files("tests")


def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports: `from a import b` gives both a and a.b, of which one may be no module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def wrong_way(layer: str, names: list[str]) -> list[str]:
    """Imports of a layer that stands left of `layer`, or of the tests."""
    forbidden = {*LAYERS[: LAYERS.index(layer)], "tests"}
    return [n for n in names if n.split(".")[0] in forbidden]


def test_every_layer_has_files() -> None:
    assert {p.parts[0].removesuffix(".py") for p in CODE} == set(LAYERS)


def test_wrong_way_sees_a_wrong_import() -> None:
    names = imported(ast.parse("from recipes.compare import main").body[0])
    assert wrong_way("converters", names) == ["recipes.compare.main"]
    assert wrong_way("recipes", names) == []


@pytest.mark.parametrize("path", CODE, ids=str)
def test_imports_go_one_way(path: Path) -> None:
    names = [name for node in ast.walk(tree(path)) for name in imported(node)]
    assert not wrong_way(path.parts[0].removesuffix(".py"), names)


@pytest.mark.parametrize("path", [*CODE, *TESTS], ids=str)
def test_imports_are_absolute(path: Path) -> None:
    assert not [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom) and n.level]


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    modules = {".".join(p.with_suffix("").parts).removesuffix(".__init__"): p for p in CODE}
    graph = {}
    for module, path in modules.items():
        names = [name for node in tree(path).body for name in imported(node)]
        targets = {n if n in modules else n.rpartition(".")[0] for n in names} & set(modules)
        graph[module] = targets - {module}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_imports_inside_functions_are_on_the_list() -> None:
    late = {
        (str(path), name.split(".")[0])
        for path in CODE
        for function in functions(path)
        for node in ast.walk(function)
        for name in imported(node)
    }
    assert late == set(LATE_IMPORTS), "an import inside a function, or a stale line of LATE_IMPORTS"


@pytest.mark.parametrize("path", [*CODE, *TESTS], ids=str)
def test_file_is_small(path: Path) -> None:
    limit = MAX_FILE_LINES["tests" if path.parts[0] == "tests" else "code"]
    assert len((ROOT / path).read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", CODE, ids=str)
def test_functions_are_small(path: Path) -> None:
    def limit(function: ast.FunctionDef) -> int:
        is_kernel = any(re.search(r"\bjit\b", ast.unparse(d)) for d in function.decorator_list)  # triton's or gluon's
        return MAX_FUNCTION_LINES["kernel" if is_kernel else "code"]

    sizes = {f.name: (f.end_lineno - f.lineno + 1, limit(f)) for f in functions(path)}
    assert not {name: size for name, (size, most) in sizes.items() if size > most}


def test_median_function_is_small() -> None:
    sizes = [f.end_lineno - f.lineno + 1 for path in CODE for f in functions(path)]
    assert statistics.median(sizes) <= MEDIAN_FUNCTION_LINES


@pytest.mark.parametrize("path", [p for p in CODE if p.name == "__init__.py"], ids=str)
def test_package_states_its_question(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "an __init__.py opens with the question that its folder answers"


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_no_gradient_of_ones(path: Path) -> None:
    """Ones as the upstream gradient pass a backward that ignores it, as in nanotron's fp8/linear.py."""
    chains = [ast.unparse(n) for n in ast.walk(tree(path)) if isinstance(n, ast.Call)]
    assert not [c for c in chains if c.endswith(".sum().backward()")]


def git_files() -> list[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [name for name in listing.stdout.splitlines() if (ROOT / name).exists()]


def test_top_level_is_fixed() -> None:
    top = {name.split("/")[0] for name in git_files()}
    assert {name for name in top if not name.startswith(".")} == TOP_LEVEL
    assert ".ci/run" in git_files()


def test_no_large_files() -> None:
    assert not {name: size for name in git_files() if (size := (ROOT / name).stat().st_size) > 1_000_000}


def file_map(readme: str) -> list[str]:
    """Paths of the README's file map: the code block with a line for `converters/`, nested by indentation."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    paths: list[str] = []
    for block in (b for b in blocks if re.search(r"^converters/", b, flags=re.MULTILINE)):
        parents: list[tuple[int, str]] = []
        for line in filter(str.strip, block.splitlines()):
            indent = len(line) - len(line.lstrip())
            parents = [(i, p) for i, p in parents if i < indent]
            path = (parents[-1][1] if parents else "") + line.split()[0]
            paths.append(path)
            if path.endswith("/"):
                parents.append((indent, path))
    return paths


def test_file_map_reads_nested_lines() -> None:
    readme = (
        "```\ntrain.py  entry\nconverters/  numbers\n  registry.py  names\n  backends/\n    hopper.py\nassets/\n```\n"
    )
    expected = ["train.py", "converters/", "converters/registry.py", "converters/backends/"]
    assert file_map(readme) == [*expected, "converters/backends/hopper.py", "assets/"]


def test_readme_file_map_matches_the_tree() -> None:
    paths = file_map((ROOT / "README.md").read_text())
    assert not [p for p in paths if not (ROOT / p).exists()]
    if paths:
        folders = {f"{name.split('/')[0]}/" for name in git_files() if "/" in name and not name.startswith(".")}
        assert folders <= set(paths)
