"""Which parameters of a model become FP8, and what happens to everything else: cases 1, 3, 6, 9, 10."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import FqnToConfig, quantize_
from torchtitan.config import JobConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import FeedForward, GroupedExperts
from torchtitan.protocols.model_converter import ModelConvertersContainer

from converters import capability
from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.expert_weight import FP8ExpertWeight
from converters.fp8_grouped_experts import FP8GroupedExpertsConverter, convert, is_routed_experts
from converters.registry import install
from recipes.job_config import JobConfig as OurSections
from tests.converters.models import expert_names, in_fp8, llama4, materialized
from tests.helpers import DEVICE

ONE = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
REFERENCE = FP8GroupedExpertsConfig(backend="reference")


def job(*converters: str, config: FP8GroupedExpertsConfig = REFERENCE) -> JobConfig:
    job_config = ConfigManager._merge_configs(JobConfig, OurSections)()
    job_config.model.converters = list(converters)
    job_config.fp8 = FP8Config(grouped_experts=config)
    return job_config


def test_case_01_quantize_without_a_filter_takes_the_routed_experts_and_nothing_else() -> None:
    model = llama4()
    quantize_(model, REFERENCE)
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert len(in_fp8(model)) == 12
    others = [p for name, p in model.named_parameters() if name not in in_fp8(model)]
    assert {type(p) for p in others} == {nn.Parameter}
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize("by", [quantize_, convert], ids=["quantize_", "convert"])
def test_case_01_zero_matches_is_an_error(by: Callable) -> None:
    for dense in (llama4(n_layers=1, moe_every=2), nn.Sequential(nn.Linear(16, 16))):
        with pytest.raises(
            ValueError, match=r"converts nothing: this model has no routed experts.*Remove the converter"
        ):
            by(dense, REFERENCE)


@pytest.mark.parametrize("filter_fn", [is_routed_experts, lambda m, fqn: fqn.endswith(".experts")], ids=["ours", "fqn"])
def test_case_01_quantize_with_a_filter_that_picks_experts(filter_fn: Callable) -> None:
    model = llama4()
    quantize_(model, REFERENCE, filter_fn=filter_fn)
    assert in_fp8(model) == expert_names(0, 1, 2, 3)


def test_case_01_a_filter_decides_alone() -> None:
    model = llama4()
    quantize_(model, REFERENCE, filter_fn=lambda m, fqn: is_routed_experts(m) and fqn.startswith("layers.2."))
    assert in_fp8(model) == expert_names(2)


def test_case_01_a_filter_that_picks_linears_converts_no_experts_behind_its_back() -> None:
    """Only torchao's default filter means the config's own selection; one that names linears has named no experts."""
    model = llama4()
    with pytest.raises(ValueError, match=r"Linear owns no weights.*let filter_fn pick expert modules"):
        quantize_(model, REFERENCE, filter_fn=lambda m, fqn: isinstance(m, nn.Linear) and "layers.1." in fqn)
    assert not in_fp8(model)


def test_case_01_a_filter_that_picks_other_modules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FeedForward owns no weights \[experts, out, in\].*is_routed_experts"):
        quantize_(llama4(), REFERENCE, filter_fn=lambda m, fqn: isinstance(m, FeedForward))


@pytest.mark.parametrize(
    "filters", [{}, {"filter_fn": None}, {"filter_fn": is_routed_experts}], ids=["default", "none", "ours"]
)
def test_case_01_quantize_passes_the_config_on(filters: dict) -> None:
    model = llama4()
    config = FP8GroupedExpertsConfig(
        backend="reference", fqns=["layers.1", "layers.3"], recipe="rowwise", experts="sequential"
    )
    quantize_(model, config, **filters)
    assert in_fp8(model) == expert_names(1, 3)
    assert model.layers["1"].moe.experts.w1._context.recipe == "rowwise"
    assert model.layers["1"].moe.experts.sequential


def bare_experts() -> GroupedExperts:
    return GroupedExperts(32, 16, 2, True)


@pytest.mark.parametrize("make", [bare_experts, lambda: nn.Sequential(bare_experts(), nn.LayerNorm(32))])
def test_case_01_a_model_without_linear_layers(make: Callable) -> None:
    """torchao's own filter would pick nothing in it, and say nothing."""
    model = make()
    quantize_(model, REFERENCE, filter_fn=is_routed_experts)
    assert len(in_fp8(model)) == 3
    (report,) = model.conversion_reports
    assert {w.fqn for w in report.converted} == in_fp8(model)
    with pytest.raises(ValueError, match=r"LayerNorm has no GroupedExperts of torchtitan's\..*fqns=\["):
        quantize_(nn.LayerNorm(32), REFERENCE, filter_fn=is_routed_experts)


def test_case_01_a_filter_of_ones_own_and_what_the_config_says_besides() -> None:
    experts = lambda m, fqn: is_routed_experts(m)  # noqa: E731
    for options in ({"fqns": ["layers.1"]}, {"skip_first_layers": 1}, {"skip_last_layers": 1}):
        with pytest.raises(ValueError, match="do nothing beside a filter_fn of your own"):
            quantize_(llama4(), replace(REFERENCE, **options), filter_fn=experts)
    model = llama4()
    quantize_(model, replace(REFERENCE, experts="sequential"), filter_fn=experts)
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert model.layers["1"].moe.experts.sequential
    with pytest.raises(ValueError, match=r"fsdp_fp8_all_gather = 'on' needs torchtitan's own forward"):
        quantize_(llama4(), replace(REFERENCE, experts="sequential", fsdp_fp8_all_gather="on"), filter_fn=experts)


def test_case_01_quantize_by_names_through_torchao() -> None:
    model = llama4()
    quantize_(model, FqnToConfig({"re:layers\\.[12]\\.moe\\.experts": REFERENCE}), filter_fn=None)
    assert in_fp8(model) == expert_names(1, 2)


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        ("0.15.0", True),
        ("0.16.0", True),
        ("0.17.0", False),
        ("0.18.0+cu128", False),
        ("0.18.1.dev20260801", False),
        ("0.19.0", True),
        ("0.19.0.dev20260901", True),
        ("1.0", True),
    ],
)
def test_case_03_torchao_outside_the_range_is_one_sentence_with_both_versions(
    installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capability, "version", lambda name: installed)
    if not refused:
        FP8GroupedExpertsConverter(job(), ONE).convert(llama4())
        return
    with pytest.raises(ValueError, match=rf"torchao {installed} is installed, torchao>=0\.17,<0\.19 is wanted"):
        FP8GroupedExpertsConverter(job(), ONE)


def test_case_03_the_installed_torchao_is_one_of_the_declared_range() -> None:
    """So this file has run on a torchao for which torchtitan's own FP8 MoE converter says `install torchao nightly`."""
    assert capability.torchao_problem() is None


@pytest.mark.parametrize("dense", ["quantize.linear.float8"])
def test_case_06_either_order_with_a_dense_converter_gives_the_same_model(dense: str) -> None:
    install()
    models = []
    for order in ([dense, "fp8.grouped_experts"], ["fp8.grouped_experts", dense]):
        job_config = job(*order)
        job_config.quantize.linear.float8.emulate = True  # torchao's, on any device
        job_config.quantize.linear.float8.filter_fqns = ["router.gate", "output"]
        model = llama4(n_layers=2)
        ModelConvertersContainer(job_config, ONE).convert(model)
        models.append(materialized(model))
    first, second = models
    kinds = [{n: (type(m), getattr(m, "weight", None).__class__) for n, m in model.named_modules()} for model in models]
    assert kinds[0] == kinds[1]
    assert type(first.layers["0"].moe.shared_experts.w1) is not nn.Linear
    assert in_fp8(first) == in_fp8(second) == expert_names(0, 1)
    second.load_state_dict(first.state_dict())
    tokens = torch.randint(0, 128, (2, 16), device=DEVICE)
    outs = [model(tokens) for model in models]
    assert torch.equal(*outs)
    upstream = torch.randn_like(outs[0])
    for out in outs:
        out.backward(upstream)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize(("D", "H"), [(20, 64), (64, 1025), (1025, 20)])
@pytest.mark.parametrize("by", ["convert", "quantize_"])
def test_case_09_sizes_that_are_no_multiple_of_16_are_refused_at_conversion(D: int, H: int, by: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"good": GroupedExperts(64, 64, 2, True), "bad": GroupedExperts(D, H, 3, True)})
    convert_it = {
        "convert": lambda: convert(model, REFERENCE),
        "quantize_": lambda: quantize_(model["bad"], REFERENCE, is_routed_experts),
    }
    with pytest.raises(ValueError, match=rf"w1 has shape \(3, {H}, {D}\).*multiples of 16"):
        convert_it[by]()
    assert not in_fp8(model), "half a conversion is worse than none"


def test_case_10_a_second_conversion_is_a_no_op_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4(n_layers=2)
    convert(model, REFERENCE)
    before = dict(model.named_parameters())
    with caplog.at_level(logging.INFO):
        convert(model, REFERENCE)
        quantize_(model, REFERENCE)
        quantize_(model, REFERENCE, filter_fn=is_routed_experts)
    assert caplog.text.count("is in FP8 already (tokenwise, reference): left as it is") == 3 * 2
    for name, p in model.named_parameters():
        assert p is before[name]
        assert type(getattr(p, "_data", None)) in (Tensor, type(None))


@pytest.mark.parametrize("filter_fn", [None, is_routed_experts], ids=["default_filter", "filter"])
@pytest.mark.parametrize("by", ["convert", "quantize_"])
def test_case_10_a_second_conversion_to_something_else_is_an_error(by: str, filter_fn: Callable | None) -> None:
    model = llama4(n_layers=2)
    convert(model, REFERENCE)
    other = FP8GroupedExpertsConfig(backend="reference", recipe="rowwise")
    again = {"convert": lambda: convert(model, other), "quantize_": lambda: quantize_(model, other, filter_fn)}
    with pytest.raises(ValueError, match=r"in FP8 already \(tokenwise.*cannot be converted again \(rowwise"):
        again[by]()
    assert {p._context.recipe for p in model.parameters() if isinstance(p, FP8ExpertWeight)} == {"tokenwise"}


def test_converter_class_converts_logs_and_needs_our_section(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    with caplog.at_level(logging.INFO):
        converter = FP8GroupedExpertsConverter(job(), ONE)
        converter.convert(model)
    assert in_fp8(model) == expert_names(0, 1, 2, 3)
    assert "12 expert weights in FP8" in caplog.text
    converter.post_optimizer_hook(model)
    converter.post_optimizer_hook([model])
    with pytest.raises(ValueError, match=r"section \[fp8\].*--job.custom_config_module=recipes.job_config"):
        FP8GroupedExpertsConverter(JobConfig(), ONE)


def test_named_hopper_backend_is_refused_without_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = llama4()
    with pytest.raises(ValueError, match=r"'hopper' needs an NVIDIA GPU.*no GPU.*Set backend = 'reference'"):
        convert(model, FP8GroupedExpertsConfig(backend="hopper"))
    assert not in_fp8(model)


def test_deepcopy_of_a_converted_model_is_converted_and_apart() -> None:
    model = llama4(n_layers=1)
    convert(model, REFERENCE)
    model = materialized(model)
    other = copy.deepcopy(model)
    assert in_fp8(other) == in_fp8(model)
    experts = other.layers["0"].moe.experts
    assert experts.forward.__self__ is experts
    tokens = torch.randint(0, 128, (2, 16), device=DEVICE)
    wanted = model(tokens)
    assert torch.equal(other(tokens), wanted)
    with torch.no_grad():
        experts.w2.zero_()
    assert not torch.equal(other(tokens), wanted)
    assert torch.equal(model(tokens), wanted)


def test_print_shows_what_runs() -> None:
    model = llama4(n_layers=1)
    convert(model, REFERENCE)
    assert "GroupedExperts(fp8: tokenwise, reference)" in repr(model)
