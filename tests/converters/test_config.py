"""The [fp8] section: every wrong value is one sentence, its docs are `--help`, TOML and command line agree (case 8)."""

import dataclasses
import re
from pathlib import Path

import pytest
from torchtitan.config import JobConfig
from torchtitan.config.manager import ConfigManager

from converters.config import FP8Config, FP8GroupedExpertsConfig, Numerics
from converters.dense_config import FP8DenseConfig

MODULE = "--job.custom_config_module=recipes.job_config"

WRONG = [
    ("recipe", "delayed_scaling", "choose one of 'tokenwise', 'rowwise'"),
    ("recipe", None, "choose one of 'tokenwise'"),
    ("recipe", ["tokenwise"], "choose one of 'tokenwise'"),
    ("backend", "cuda", "choose one of 'auto', 'reference', 'hopper'"),
    ("wgrad", "fp16", "choose one of 'fp8', 'fp8_columns', 'bf16'"),
    ("wgrad", True, "choose one of 'fp8'"),
    ("accumulate", "float32", "choose one of 'fast', 'precise_wgrad', 'precise'"),
    ("grad_dtype", "float8_e5m2", "choose one of 'auto', 'e4m3', 'e5m2'"),
    ("experts", "loop", "choose one of 'grouped', 'sequential'"),
    ("ep_fp8_dispatch", True, "choose one of 'auto', 'on', 'off'"),
    ("fsdp_fp8_all_gather", "fp8", "choose one of 'auto', 'on', 'off'"),
    ("below_break_even", "fp8", "choose one of 'warn', 'bf16'"),
    ("skip_first_layers", -1, "must be a whole number of layers, 0 or more"),
    ("skip_first_layers", 1.5, "must be a whole number of layers"),
    ("skip_first_layers", True, "must be a whole number of layers"),
    ("skip_last_layers", "2", "must be a whole number of layers"),
    ("cache", "yes", "must be true or false"),
    ("cache", 1, "must be true or false"),
    ("fqns", "experts", "must be a list of non-empty patterns"),
    ("fqns", ["experts", ""], "must be a list of non-empty patterns"),
    ("fqns", [3], "must be a list of non-empty patterns"),
    ("fqns", 3, "must be a list of non-empty patterns"),
    ("fqns", None, "must be a list of non-empty patterns"),
]


def one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and message.startswith("[fp8")


@pytest.mark.parametrize(("name", "value", "rule"), WRONG, ids=lambda v: str(v)[:24])
def test_wrong_value_is_refused_in_one_sentence(name: str, value: object, rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"[fp8.grouped_experts] {name} = {value!r}")) as error:
        FP8GroupedExpertsConfig(**{name: value})
    assert rule in str(error.value)
    assert one_sentence(str(error.value)), error.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"wgrad": "bf16", "accumulate": "precise_wgrad"},
            "accumulate = 'precise_wgrad' does nothing with wgrad = 'bf16'.*or set 'precise' for the other GEMMs",
        ),
        (
            {"recipe": "rowwise", "backend": "hopper"},
            "recipe = 'rowwise' has no hopper backend: .*backend = 'reference'",
        ),
        ({"recipe": "delayed", "backend": "reference"}, "'delayed' has no reference backend: .*backend = 'auto'"),
        ({"grad_dtype": "e5m2", "backend": "hopper"}, "grad_dtype = 'e5m2' has no hopper backend: .*'auto'"),
        ({"grad_dtype": "e5m2", "ep_fp8_dispatch": "on"}, "ep_fp8_dispatch = 'on' needs .*E4M3.* = 'off'"),
        ({"backend": "emulated", "fsdp_fp8_all_gather": "on"}, "fsdp_fp8_all_gather = 'on' needs .* = 'off'"),
        ({"ep_fp8_dispatch": "on", "recipe": "rowwise"}, "ep_fp8_dispatch = 'on' needs .*got 'rowwise'.* = 'off'"),
        ({"ep_fp8_dispatch": "on", "wgrad": "bf16"}, "ep_fp8_dispatch = 'on' needs .*'bf16'.* = 'off'"),
        ({"fsdp_fp8_all_gather": "on", "recipe": "rowwise"}, "fsdp_fp8_all_gather = 'on' needs .*got 'rowwise'.*'off'"),
    ],
    ids=str,
)
def test_combinations_that_cannot_be_are_refused_with_a_remedy(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8GroupedExpertsConfig(**options)


@pytest.mark.parametrize("value", [3, None, "tokenwise", {"recipe": "tokenwise"}], ids=str)
def test_a_section_that_is_no_table_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^\[fp8\] grouped_experts = .* must be a table"):
        FP8Config(grouped_experts=value)


@pytest.mark.parametrize(("name", "value", "rule"), [w for w in WRONG if isinstance(w[1], (str, int, float, list))])
def test_wrong_value_in_a_toml_file_is_the_same_sentence(name: str, value: object, rule: str, tmp_path: Path) -> None:
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    with pytest.raises(ValueError, match=re.escape(f"[fp8.grouped_experts] {name} = ") + f".*{rule}"):
        parse(tmp_path, f"[fp8.grouped_experts]\n{name} = {text}")


def test_unknown_key_in_a_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Invalid field names.*recipie"):
        parse(tmp_path, '[fp8.grouped_experts]\nrecipie = "tokenwise"')


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("recipe", "per_tensor", "tokenwise"), ("skip_first_layers", "-1", "0 or more"), ("skip_last_layers", "x", "int")],
)
def test_wrong_value_on_the_command_line_stops_with_the_rule(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises((SystemExit, ValueError)) as stop:
        ConfigManager().parse_args([MODULE, f"--fp8.grouped_experts.{option}={value}"])
    output = " ".join(capsys.readouterr()) + str(stop.value)
    assert said in output.lower()
    assert option.replace("_", "-") in output or option in output


def parse(tmp_path: Path, toml: str = "", *args: str) -> JobConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    return ConfigManager().parse_args([f"--job.config_file={path}", MODULE, *args])


TOML_LISTS = """
[model]
converters = ["quantize.linear.float8", "fp8.grouped_experts"]
[fp8.grouped_experts]
fqns = ["layers.0.moe.experts", "layers.[2-3]"]
"""


@pytest.mark.parametrize("separator", ["=", " "])
def test_case_08_a_comma_list_on_the_command_line_is_a_toml_list(separator: str, tmp_path: Path) -> None:
    options = {
        "--model.converters": "quantize.linear.float8,fp8.grouped_experts",
        "--fp8.grouped_experts.fqns": "layers.0.moe.experts,layers.[2-3]",
    }
    args = [part for name, value in options.items() for part in f"{name}{separator}{value}".split(" ")]
    from_file, from_args = parse(tmp_path, TOML_LISTS), parse(tmp_path, "", *args)
    assert from_file.model.converters == from_args.model.converters == ["quantize.linear.float8", "fp8.grouped_experts"]
    assert from_file.fp8 == from_args.fp8
    assert from_args.fp8.grouped_experts.fqns == ["layers.0.moe.experts", "layers.[2-3]"]


def test_case_08_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    config = parse(tmp_path, TOML_LISTS, "--model.converters=fp8.grouped_experts", "--fp8.grouped_experts.fqns=experts")
    assert config.model.converters == ["fp8.grouped_experts"]
    assert config.fp8.grouped_experts.fqns == ["experts"]


def test_every_option_can_be_set_in_both_ways(tmp_path: Path) -> None:
    values = {
        "recipe": "rowwise",
        "fqns": ["experts"],
        "experts": "sequential",
        "backend": "reference",
        "skip_first_layers": 1,
        "skip_last_layers": 2,
        "wgrad": "bf16",
        "accumulate": "precise",
        "grad_dtype": "e4m3",
        "ep_fp8_dispatch": "off",
        "fsdp_fp8_all_gather": "off",
        "below_break_even": "bf16",
        "cache": False,
    }
    assert set(values) == {f.name for f in dataclasses.fields(FP8GroupedExpertsConfig)}
    toml = "\n".join(f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in values.items())
    args = [
        f"--fp8.grouped_experts.{k}={v[0] if isinstance(v, list) else v}" for k, v in values.items() if k != "cache"
    ]
    wanted = FP8GroupedExpertsConfig(**values)
    assert parse(tmp_path, f"[fp8.grouped_experts]\n{toml}").fp8.grouped_experts == wanted
    assert parse(tmp_path, "", *args, "--fp8.grouped_experts.no-cache").fp8.grouped_experts == wanted
    assert parse(tmp_path).fp8 == FP8Config()


def test_docs_become_help(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # wider, and tyro sets sections side by side
    with pytest.raises(SystemExit, match="0"):
        ConfigManager().parse_args([MODULE, "--help"])
    shown = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for field in dataclasses.fields(FP8GroupedExpertsConfig):
        assert f"--fp8.grouped-experts.{field.name.replace('_', '-')}" in shown, field.name
    for doc in (
        "Scale rule. tokenwise: one scale a token for activations and gradients",
        "Which experts: patterns of whole path components with shell wildcards",
        "hopper: Triton kernels for tokenwise on sm90. reference: tokenwise and rowwise in plain torch",
        "Leave the experts of the first N transformer layers in BF16",
        "Operands of the weight gradient",
        "How the hopper backend keeps sums of FP8 products",
        "Experts that are too small, or will get too few rows at a time, for FP8 to be faster",
        "Quantize a weight once per optimizer step",
    ):
        assert doc in shown, doc


def test_every_field_has_a_doc_that_help_would_show() -> None:
    """A string literal must follow each field: tyro reads the source."""
    source = Path(__file__).parents[2] / "converters" / "config.py"
    body = source.read_text().split("class FP8GroupedExpertsConfig")[1].split("def __post_init__")[0]
    for field in dataclasses.fields(FP8GroupedExpertsConfig):
        assert re.search(rf'\n    {field.name}: [^\n]*\n    """', body), field.name


def test_configs_are_frozen_and_numerics_travel_as_a_string() -> None:
    for config, name in (
        (FP8GroupedExpertsConfig(), "recipe"),
        (FP8Config(), "grouped_experts"),
        (Numerics(), "recipe"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(config, name, "rowwise")
    for numerics in (Numerics(), Numerics(recipe="rowwise", wgrad="bf16", accumulate="precise", cache=False)):
        assert Numerics.parse(numerics.key) == numerics
        hash(numerics)


def test_short_form_of_numerics_says_what_differs_from_the_default() -> None:
    assert str(Numerics()) == "tokenwise, reference"
    numerics = Numerics(backend="hopper", wgrad="bf16", accumulate="precise")
    assert str(numerics) == "tokenwise, hopper, wgrad=bf16, precise"


def test_what_accumulate_does_beside_a_weight_gradient_in_bf16() -> None:
    """'precise' still is of the other GEMMs; the default of fp8.dense is no wish of the user's."""
    for accumulate in ("fast", "precise"):
        assert FP8GroupedExpertsConfig(wgrad="bf16", accumulate=accumulate).accumulate == accumulate
    assert FP8DenseConfig(wgrad="bf16").accumulate == "precise_wgrad"
