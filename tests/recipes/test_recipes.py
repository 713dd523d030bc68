"""Every shipped recipe: parsed, built, explained by its header, and in step with its twin."""

import copy
import dataclasses
import functools
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4 import llama4_args
from torchtitan.models.llama4.model.model import Transformer
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols import train_spec as train_specs
from torchtitan.protocols.model_converter import build_model_converters

from converters.config import FP8Config
from converters.expert_weight import FP8ExpertWeight
from parallel.device import prepare_device
from recipes import register
from recipes.job_config import DataConfig
from recipes.job_config import JobConfig as OurConfig
from recipes.models import llama4

prepare_device()  # as train.py does: without it grouped GEMMs are switched off on a CPU

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
FP8_RECIPES = [path for path in RECIPES if "_fp8" in path.stem]
# A twin may differ in its name, its output and what makes it FP8.
TWIN_KEYS = ("job.description", "job.dump_folder", "model.converters", "fp8.")

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def values(path: Path) -> dict[str, object]:
    """The keys of a TOML file, sections joined by dots."""

    def flatten(section: dict, prefix: str) -> dict[str, object]:
        flat: dict[str, object] = {}
        for key, value in section.items():
            flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return flat

    return flatten(tomllib.loads(path.read_text()), "")


def header(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


def parse(path: Path, *args: str) -> JobConfig:
    return ConfigManager().parse_args([f"--job.config_file={path}", *args])


def test_recipes_are_found() -> None:
    assert len(RECIPES) == 16  # raise it with each new recipe: a glob that finds nothing must not pass
    assert len(FP8_RECIPES) == len(RECIPES) / 2


@every_recipe
def test_recipe_opens_with_what_a_reader_needs(path: Path) -> None:
    text = header(path)
    assert re.search("Hardware|H200", text)
    assert re.search(rf"--job\.config_file {path.relative_to(ROOT)}|make train RECIPE={path.stem}\b", text)
    if values(path)["model.flavor"] == "debug":
        for heading in ("# Purpose:", "# Hardware:", "# Launch:", "# Expected:"):
            assert heading in text
        assert re.search(r"validation loss \d\.\d\d", text)


@every_recipe
def test_recipe_states_only_what_differs_from_the_defaults(path: Path) -> None:
    def default_of(key: str) -> object:
        ours = key.startswith(("fp8.", "data."))
        return functools.reduce(getattr, key.split("."), OurConfig() if ours else JobConfig())

    # Said although they are defaults: what an FP8 recipe is about, and the split that goes with training.dataset.
    anyway = {"fp8.grouped_experts.recipe", "validation.dataset"}
    stated = {key: value for key, value in values(path).items() if key not in anyway}
    assert not {key: value for key, value in stated.items() if value == default_of(key)}


@every_recipe
def test_recipe_builds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer does it: parsed, tokenizer checked (where it is shipped), model on meta, converters applied."""
    monkeypatch.chdir(ROOT)
    config = parse(path)
    assert config.experimental.custom_import == "recipes.register"
    assert isinstance(config.data, DataConfig)
    spec = train_specs.get_train_spec(config.model.name)
    if config.model.hf_assets_path == "assets/tokenizer":
        assert spec.build_tokenizer_fn(config).eos_id is not None
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    build_model_converters(config, parallel_dims()).convert(model)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    assert experts
    assert all(isinstance(e.w1, FP8ExpertWeight) == (path in FP8_RECIPES) for e in experts)


def parallel_dims() -> ParallelDims:
    return ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


@pytest.mark.parametrize("path", FP8_RECIPES, ids=lambda path: path.stem)
def test_fp8_recipe_differs_from_its_twin_only_in_fp8(path: Path) -> None:
    twin = path.with_stem(path.stem.replace("_fp8", "_bf16"))
    assert twin.is_file()
    fp8, bf16 = values(path), values(twin)
    different = {key for key in fp8.keys() | bf16.keys() if fp8.get(key) != bf16.get(key)}
    assert "model.converters" in different
    assert not [key for key in different if not key.startswith(TWIN_KEYS)]
    assert any(name.startswith("fp8.") for name in fp8["model.converters"])
    assert not bf16.get("model.converters")


# The sections, from TOML, command line and help


def test_sections_come_from_toml_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[data]\ntext_column = "body"\ntest_fraction = 0.0\n[fp8.grouped_experts]\nrecipe = "rowwise"\n')
    module = "--job.custom_config_module=recipes.job_config"
    config = parse(file, module, "--data.test_fraction=0.25")
    assert config.data == DataConfig(text_column="body", test_fraction=0.25)
    assert isinstance(config.fp8, FP8Config)
    assert config.fp8.grouped_experts.recipe == "rowwise"


def test_wrong_section_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[job]\ncustom_config_module = "recipes.job_config"\n[data]\ntest_fraction = 2.0\n')
    with pytest.raises(ValueError, match=r"test_fraction = 2\.0 must be a share"):
        parse(file)
    file.write_text('[job]\ncustom_config_module = "recipes.job_config"\n[data]\ncolumn = "text"\n')
    with pytest.raises(ValueError, match=r"Invalid field names in .*DataConfig.*'column'"):
        parse(file)


def test_help_explains_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(ROOT / "recipes" / "llama4_fp8.toml", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Column (parquet) or key (jsonl) that holds a document's text." in text
    assert "--fp8.grouped-experts.recipe" in text


# Registration and the model


def test_registering_twice_is_the_same_as_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = train_specs._extra_train_specs
    before = dict(registry)
    register.register()
    assert registry == before
    mine = dataclasses.replace(llama4.train_spec())
    monkeypatch.setitem(registry, "llama4", mine)
    register.register()
    assert train_specs.get_train_spec("llama4") is mine


def test_llama4_is_torchtitans_with_more_flavors() -> None:
    spec = llama4.train_spec()
    assert issubclass(spec.model_cls, Transformer)
    assert {*llama4_args, "debug"} <= set(spec.model_args)
    assert "debug" not in llama4_args
    config = parse(ROOT / "recipes" / "llama4_bf16.toml")
    spec.model_args["debug"].update_from_config(config)  # writes the sequence length into it
    assert llama4.train_spec().model_args["debug"] == llama4.FLAVORS["debug"] != spec.model_args["debug"]


def test_every_gemm_of_the_debug_flavor_is_a_multiple_of_16() -> None:
    with torch.device("meta"):
        model = Transformer(copy.deepcopy(llama4.FLAVORS["debug"]))
    gate = [name for name, p in model.named_parameters() if p.ndim > 1 and any(d % 16 for d in p.shape[-2:])]
    assert [name.split(".", 2)[2] for name in gate] == ["moe.router.gate.weight"] * len(gate)  # 8 experts, never FP8
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
