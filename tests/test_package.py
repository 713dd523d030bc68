"""What `pip install` puts on a machine, and what the Makefile runs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from converters.capability import TORCHAO_RANGE
from converters.registry import GROUP

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("recipes", "converters", "parallel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Our wheel, built from a copy, since setuptools writes into the folder that it builds."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", base]
    subprocess.run([*pip, source], check=True, capture_output=True, timeout=300)
    return zipfile.ZipFile(next(base.glob("titan_moe_fp8-*.whl")))


def test_wheel_has_every_module_and_recipe(wheel: zipfile.ZipFile) -> None:
    files = [p for name in PACKAGES for kind in ("*.py", "*.toml", "*.css", "*.js") for p in (ROOT / name).rglob(kind)]
    assert {str(p.relative_to(ROOT)) for p in files} <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.startswith(("tests/", "assets/"))]


def test_wheel_declares_the_converters(wheel: zipfile.ZipFile) -> None:
    path = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    declared = wheel.read(path).decode()
    assert f"[{GROUP}]" in declared
    assert "fp8.grouped_experts = converters.fp8_grouped_experts:FP8GroupedExpertsConverter" in declared


def test_torchao_range_is_the_same_in_code_and_metadata() -> None:
    low, high = TORCHAO_RANGE
    assert f"torchao>={low},<{high}" in PYPROJECT["project"]["dependencies"]


def make(*args: str) -> list[str]:
    """The commands that make would run, free of the variables of a `make test` around this process."""
    env = {"PATH": os.environ["PATH"]}
    result = subprocess.run(["make", "-n", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return [line.strip() for line in result.stdout.splitlines()]


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_make_train_runs_the_promised_command() -> None:
    assert make("train")[-1] == "torchrun --nproc_per_node=1 train.py --job.config_file recipes/llama4_fp8.toml"
    changed = make("train", "RECIPE=recipes/llama4_bf16.toml", "NGPU=4", "ARGS=--training.steps 5")[-1]
    command = "torchrun --nproc_per_node=4 train.py --job.config_file recipes/llama4_bf16.toml --training.steps 5"
    assert changed == command


@needs_make
@pytest.mark.parametrize("recipe", ["llama4", "llama4_fp8", "recipes/llama4_bf16.toml", "recipes/llama4"])
def test_make_compare_trains_both_twins(recipe: str) -> None:
    bf16, fp8, compare = make("compare", f"RECIPE={recipe}")[-3:]
    for command, twin in ((bf16, "bf16"), (fp8, "fp8")):
        run = f"--job.config_file recipes/llama4_{twin}.toml --job.dump_folder outputs/compare/llama4_{twin}"
        assert command == f"torchrun --nproc_per_node=1 train.py {run}"
    assert "recipes.compare outputs/compare/llama4_bf16 outputs/compare/llama4_fp8 --max-val-gap 0.02" in compare


@needs_make
def test_make_without_a_venv_keeps_the_torch_of_the_machine() -> None:
    commands = make("test", "VENV=", f"PYTHON={sys.executable}", "TORCH=torch")
    assert [c for c in commands if "pip install" in c and "-c .make/constraints.txt" in c]
    assert not [c for c in commands if "-m venv" in c]


def test_every_imported_package_is_declared() -> None:
    """A clean install has what pyproject.toml names: an import that something else happens to bring breaks it."""
    declared = {re.split(r"[<>=!~ \[]", d)[0] for d in PYPROJECT["project"]["dependencies"]}
    files = [ROOT / "train.py", *(f for package in PACKAGES for f in (ROOT / package).rglob("*.py"))]
    names = set()
    for node in (n for f in files for n in ast.walk(ast.parse(f.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    assert {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - set(PACKAGES) <= declared


@pytest.mark.parametrize("line", [0, 1], ids=["convert", "quantize_"])
def test_readme_snippet_runs_in_a_fresh_process(line: int) -> None:
    """`quantize_` knows our config only once its handler is registered: by the imports that the README shows. The model
    has no nn.Linear, for which alone torchao's own filter would ask.
    """
    imports, calls = re.search(r"```python\n(.*?)\n\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).groups()
    call = calls.splitlines()[line]
    code = imports + (
        "\nfrom torch import nn\nfrom torchtitan.models.moe.moe import GroupedExperts\n"
        "model = nn.Sequential(GroupedExperts(32, 16, 2, True), nn.LayerNorm(32))\n"
        f"{call}\nprint(type(model[0].w1).__name__, type(model[1].weight).__name__)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.split() == ["FP8ExpertWeight", "Parameter"]
