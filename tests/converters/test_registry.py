"""Converters by name: real packages are built, installed into a folder and found through their metadata."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torchtitan.protocols.model_converter as protocol
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols.model_converter import build_model_converters

from converters import __main__ as table
from converters import registry

ROOT = Path(__file__).parents[2]
ACME = """
print("printed while imported")

class DoubleConverter:
    '''Doubles every parameter. And more.'''
    def __init__(self, job_config, parallel_dims):
        pass
    def convert(self, model):
        for p in model.parameters():
            p.data *= 2
    def post_optimizer_hook(self, model):
        pass

class AddConverter(DoubleConverter):
    @staticmethod
    def unavailable_reason():
        return "needs an abacus [brand new]"
    def convert(self, model):
        for p in model.parameters():
            p.data += 1

class NoHook:
    def convert(self, model):
        pass

def function(job_config, parallel_dims):
    pass
function.convert = function.post_optimizer_hook = function
"""
PACKAGES = {
    "acme-experts": (
        ACME,
        {
            "acme.double": "acme_experts:DoubleConverter",
            "acme.add": "acme_experts:AddConverter",
            "acme.no_hook": "acme_experts:NoHook",
            "acme.function": "acme_experts:function",
            "acme.gone": "acme_experts:Gone",
            "shared.name": "acme_experts:DoubleConverter",
            "quantize.linear.float8": "acme_experts:DoubleConverter",
        },
    ),
    "broken-experts": ("import library_that_is_not_there", {"broken.one": "broken_experts:Converter"}),
    "exiting-experts": ("raise SystemExit('no licence')", {"broken.two": "exiting_experts:Converter"}),
    "rival-experts": ("", {"shared.name": "rival_experts:Converter"}),
}


def write_package(folder: Path, name: str, source: str, entries: dict[str, str]) -> Path:
    module = name.replace("-", "_")
    folder.mkdir()
    (folder / f"{module}.py").write_text(source)
    lines = "\n".join(f'"{key}" = "{value}"' for key, value in entries.items())
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "1.2"\n[tool.setuptools]\npy-modules = ["{module}"]\n'
        f'[project.entry-points."{registry.GROUP}"]\n{lines}\n'
    )
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the packages above from wheels that it built."""
    base = tmp_path_factory.mktemp("plugins")
    sources = [write_package(base / name, name, *package) for name, package in PACKAGES.items()]
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", base / "site", *sources], check=True, capture_output=True, timeout=300)
    return base / "site"


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan's registry with its own converters only, put back after the test."""
    stock = {n: c for n, c in protocol._registry_model_converter_cls.items() if not isinstance(c, registry.Plugin)}
    monkeypatch.setattr(protocol, "_registry_model_converter_cls", stock)


@pytest.fixture
def installed(site: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of `site` are importable and in torchtitan's registry; none is imported yet."""
    monkeypatch.syspath_prepend(site)
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name.replace("-", "_"), raising=False)
    registry.install()


def converted_weight(config: JobConfig) -> torch.Tensor:
    model = torch.nn.Linear(3, 5)
    torch.nn.init.constant_(model.weight, 3.0)
    build_model_converters(config, table.ONE_PROCESS).convert(model)
    return model.weight


def job_config(*names: str) -> JobConfig:
    config = JobConfig()
    config.model.converters = list(names)
    return config


@pytest.mark.usefixtures("installed")
def test_package_is_found_through_its_metadata_and_converts() -> None:
    plugin = registry.discover()["acme.double"]
    assert (plugin.package, plugin.version, plugin.entry_point.value) == (
        "acme-experts",
        "1.2",
        "acme_experts:DoubleConverter",
    )
    assert torch.equal(converted_weight(job_config("acme.double")), torch.full((5, 3), 6.0))
    assert torch.equal(converted_weight(job_config("acme.double", "acme.add")), torch.full((5, 3), 7.0))


@pytest.mark.usefixtures("installed")
def test_nothing_is_imported_before_a_run_names_it() -> None:
    registry.check_names(["quantize.linear.float8"])
    assert not [name for name in PACKAGES if name.replace("-", "_") in sys.modules]
    registry.check_names(["acme.double"])
    assert "acme_experts" in sys.modules
    assert "broken_experts" not in sys.modules


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("broken.one", ImportError, r"'broken\.one' of broken-experts 1\.2 .*library_that_is_not_there.*update broken"),
        ("broken.two", ImportError, r"exiting-experts 1\.2 .*SystemExit: no licence"),
        ("acme.gone", ImportError, r"acme-experts 1\.2 \(acme_experts:Gone\) .*AttributeError"),
        ("acme.no_hook", TypeError, r"acme-experts 1\.2 .*has no method post_optimizer_hook"),
        ("acme.function", TypeError, r"is not a class: a model converter is a class"),
        ("shared.name", ValueError, r"'shared\.name' is declared by acme-experts 1\.2 .* and rival-experts 1\.2 "),
        ("acme.dobule", ValueError, r"Unknown converter 'acme\.dobule'.* did you mean 'acme\.double'"),
        (" acme.add", ValueError, r"did you mean 'acme\.add'.* without spaces\?"),
        ("", ValueError, r"an empty name: for no converter, write `converters = \[\]`"),
        ("zzz", ValueError, r"Unknown converter 'zzz'.*installed\? \(known: acme\.add, .*quantize\.linear\.float8"),
    ],
)
def test_error_comes_from_the_check_and_from_torchtitan_alike(name: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        registry.check_names(["acme.double", name])
    with pytest.raises(error, match=match):
        build_model_converters(job_config("acme.double", name), table.ONE_PROCESS)


@pytest.mark.usefixtures("installed")
def test_install_again_changes_nothing() -> None:
    before = dict(protocol._registry_model_converter_cls)
    registry.install()
    assert protocol._registry_model_converter_cls == before


@pytest.mark.usefixtures("fresh_registry")
def test_what_torchtitan_has_stays(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(registry.logger, "warning", warnings.append)
    monkeypatch.syspath_prepend(site)
    stock = dict(protocol._registry_model_converter_cls)
    registry.install()
    assert protocol._registry_model_converter_cls.items() >= stock.items()
    assert len(warnings) == 1
    assert "'quantize.linear.float8' of acme-experts 1.2" in warnings[0]


@pytest.mark.usefixtures("fresh_registry")
def test_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    registry.install()
    with pytest.raises(ValueError, match=r"not installed in this Python: run `pip install -e "):
        registry.check_names(["fp8.grouped_experts"])


def test_every_declared_converter_loads() -> None:
    declared = registry._declared_in_checkout()
    assert "fp8.grouped_experts" in declared
    for name, value in declared.items():
        cls = registry.Plugin(name, EntryPoint(name, value, registry.GROUP), registry.DISTRIBUTION, "0").load()
        runs, reason = table._runs_here(cls)
        assert runs or reason
        assert runs is not None, f"{cls} has no unavailable_reason()"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("joint", [" ", "="])
def test_names_on_the_command_line_equal_a_toml_list(joint: str, tmp_path: Path) -> None:
    """What torchtitan#1123 reported as different."""
    args = f"--model.converters{joint}acme.double,acme.add".split()
    toml = tmp_path / "recipe.toml"
    toml.write_text('[model]\nconverters = ["acme.double", "acme.add"]\n')
    from_toml = ConfigManager().parse_args(["--job.config_file", str(toml)])
    from_line = ConfigManager().parse_args(args)
    toml.write_text('[model]\nconverters = ["acme.add"]\n')
    line_over_toml = ConfigManager().parse_args(["--job.config_file", str(toml), *args])
    for config in (from_toml, from_line, line_over_toml):
        assert config.model.converters == ["acme.double", "acme.add"]
        assert torch.equal(converted_weight(config), torch.full((5, 3), 7.0))


def test_table_shows_every_converter_and_survives_broken_ones(site: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "converters"]
    result = subprocess.run([*command, "--json"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    double = rows["acme.double"]
    assert double["class_name"] == "acme_experts.DoubleConverter"
    assert (double["package"], double["version"], double["purpose"]) == (
        "acme-experts",
        "1.2",
        "Doubles every parameter",
    )
    assert double["runs"] is None
    assert rows["acme.add"]["reason"] == "needs an abacus [brand new]"
    assert "library_that_is_not_there" in rows["broken.one"]["reason"]
    assert "no licence" in rows["broken.two"]["reason"]
    assert "rival-experts" in rows["shared.name"]["reason"]
    assert rows["quantize.linear.float8"]["package"] == "torchtitan"
    # torchtitan 0.2.2 imports a class that the torchao of our range no longer has (torchtitan#2460).
    assert "MoETrainingConfig" in rows["quantize.grouped_mm.float8"]["reason"]


@pytest.mark.usefixtures("installed")
def test_table_is_readable_on_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table.main([])
    printed = capsys.readouterr()
    for text in ("acme.double", "acme-experts 1.2", "Doubles every", "[brand new]", "broken.one", "unknown"):
        assert text in printed.out
    assert "printed while imported" not in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
