"""Which linear layers `[fp8.dense]` picks, what it never picks, and what it refuses: cases 2, 6, 7, 9, 10."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import ModelConvertersContainer

from converters.config import FP8Config
from converters.dense_config import FP8DenseConfig
from converters.dense_selection import select
from converters.fp8_dense import FP8DenseConverter, convert_dense
from converters.linear_weight import FP8LinearWeight
from converters.registry import install
from tests.converters.models import expert_names, in_fp8, llama4, materialized
from tests.converters.test_conversion import ONE, job
from tests.helpers import DEVICE

REFERENCE = FP8DenseConfig(backend="reference")
ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
SHARED = tuple(f"moe.shared_experts.w{i}" for i in (1, 2, 3))
DENSE = tuple(f"feed_forward.w{i}" for i in (1, 2, 3))
NEVER = {"tok_embeddings.weight", "output.weight", "norm.weight", "moe.router.gate.weight"}


def names(layers: Any, *of: str) -> set[str]:
    return {f"layers.{i}.{name}.weight" for i in layers for name in of}


def dense_job(*converters: str, **dense: Any) -> Any:
    job_config = job(*converters)
    config = FP8DenseConfig(backend="reference", **dense)
    job_config.fp8 = replace(job_config.fp8, dense=config)
    return job_config


def test_shared_experts_dense_layers_and_attention_and_nothing_else() -> None:
    model = llama4(moe_every=2)  # layers 1 and 3 are mixtures
    report = convert_dense(model, REFERENCE)
    assert in_fp8(model) == names(range(4), *ATTENTION) | names((0, 2), *DENSE) | names((1, 3), *SHARED)
    assert len(report.converted) == len(in_fp8(model)) == 28
    left = {name for name, _ in model.named_parameters()} - in_fp8(model)
    assert left >= {"tok_embeddings.weight", "output.weight", "norm.weight", "layers.1.moe.router.gate.weight"}
    reasons = {s.fqn: s.reason for s in report.skipped}
    assert reasons["output"] == "head: never FP8"
    assert reasons["layers.1.moe.router.gate"] == "router: never FP8"
    assert reasons["layers.1.moe.experts"] == "routed experts: only the converter fp8.grouped_experts takes them"
    assert "28 linear weights in FP8 (tokenwise, reference backend)" in report.summary()
    assert "0 linear weights in FP8" in replace(report, converted=()).summary()
    notes = {w.fqn: w.note for w in report.converted}
    assert notes["layers.0.attention.wk.weight"] == "wq, wk, wv: one op"
    assert notes["layers.1.moe.shared_experts.w2.weight"] == "w1, w2, w3: one op"
    assert notes["layers.0.attention.wo.weight"] == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fqns": ["shared_experts"]}, names((1, 3), *SHARED)),
        ({"fqns": ["attention.wo"]}, names(range(4), "attention.wo")),
        ({"fqns": ["layers.[01].attention"]}, names((0, 1), *ATTENTION)),
        ({"fqns": ["layers.1"], "exclude": ["wk", "wv"]}, names((1,), "attention.wq", "attention.wo", *SHARED)),
        ({"exclude": ["attention"], "skip_first_layers": 1}, names((2,), *DENSE) | names((1, 3), *SHARED)),
        ({"fqns": ["feed_forward", "wo"], "skip_last_layers": 3}, names((0,), *DENSE, "attention.wo")),
    ],
    ids=["shared", "wo", "two layers", "excluded", "skip first", "skip last"],
)
def test_case_02_patterns_and_layers(options: dict, expected: set[str]) -> None:
    model = llama4(moe_every=2)
    convert_dense(model, FP8DenseConfig(backend="reference", **options))
    assert in_fp8(model) == expected


@pytest.mark.parametrize("pattern", ["output", "router", "router.gate", "layers.1.moe.router"])
def test_case_07_never_the_head_nor_the_router(pattern: str) -> None:
    """tt#4008: the head became FP8 because a list said `output`."""
    model = llama4(moe_every=2)
    with pytest.raises(ValueError, match=rf"'{pattern}' names .*(head|router): never FP8"):
        convert_dense(model, FP8DenseConfig(backend="reference", fqns=["wo", pattern]))
    assert not in_fp8(model)


def test_never_through_a_pattern_that_takes_everything() -> None:
    model = llama4(moe_every=2)
    convert_dense(model, FP8DenseConfig(backend="reference", fqns=["*"]))
    assert in_fp8(model) == names(range(4), *ATTENTION) | names((0, 2), *DENSE) | names((1, 3), *SHARED)


def test_a_head_under_another_name_is_known_by_its_shape() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(96, 32), "unembed": nn.Linear(32, 96), "other": nn.Linear(32, 32)})
    convert_dense(model, FP8DenseConfig(backend="reference", fqns=["*"]))
    assert in_fp8(model) == {"other.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fqns": ["shared_expert"]}, r"fqns: 'shared_expert' matches no linear layer.*shared_experts"),
        ({"exclude": ["wz"]}, r"exclude: 'wz' matches no linear layer"),
        ({"fqns": ["tok_embeddings"]}, r"'tok_embeddings' matches no linear layer"),
        (
            {"skip_first_layers": 4},
            r"converts nothing: layers\.0\.attention\.wq and 27 more: in the first 4 layers \(skip_first_layers\); "
            r"layers\.0\.moe\.router\.gate and 3 more: router: never FP8; output: head: never FP8\. Remove the",
        ),
    ],
    ids=str,
)
def test_case_07_what_picks_nothing_is_an_error(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_dense(llama4(), FP8DenseConfig(backend="reference", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "rowwis"}, r"\[fp8.dense\] recipe = 'rowwis' is unknown"),
        ({"below_break_even": "on"}, r"below_break_even = 'on' is unknown: choose one of 'warn', 'bf16'"),
        ({"skip_last_layers": -1}, r"skip_last_layers = -1 must be a whole number"),
        ({"fqns": "attention"}, r"fqns = 'attention' must be a list of non-empty patterns"),
        ({"exclude": [""]}, r"exclude = \[''\] must be a list"),
        ({"cache": 1}, r"cache = 1 must be true or false"),
        ({"recipe": "tensorwise", "fsdp_fp8_all_gather": "on"}, r"'on' needs recipe = .*got 'tensorwise'.*'off'"),
        ({"recipe": "delayed", "fsdp_fp8_all_gather": "on"}, r"'on' needs recipe = 'tokenwise'.*got 'delayed'.*'off'"),
    ],
    ids=str,
)
def test_values_that_no_recipe_may_have(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8DenseConfig(**options)


def test_the_section_must_be_a_table() -> None:
    with pytest.raises(ValueError, match=r"\[fp8\] dense = 'tokenwise' must be a table"):
        FP8Config(dense="tokenwise")


def test_case_09_sizes_that_no_gemm_reads_are_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 1025)})
    with pytest.raises(ValueError, match=r"a\.weight has shape \(1025, 64\).*multiples of 16.*\[fp8\.dense\] exclude"):
        convert_dense(model, FP8DenseConfig(backend="reference", fqns=["a"]))
    convert_dense(
        nn.ModuleDict({**model, "b": nn.Linear(64, 64)}),
        FP8DenseConfig(backend="reference", fqns=["*"], exclude=["a"]),
    )


def test_case_10_a_second_conversion_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = llama4()
    convert_dense(model, REFERENCE)
    before = dict(model.named_parameters())
    with caplog.at_level(logging.INFO):
        convert_dense(model, REFERENCE)
    assert "are in FP8 already" in caplog.text
    assert all(p is before[name] for name, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"is in FP8 already.*convert a model once"):
        convert_dense(model, FP8DenseConfig(backend="reference", wgrad="bf16"))


def test_case_06_either_order_gives_the_same_model() -> None:
    install()
    models = []
    for order in (["fp8.dense", "fp8.grouped_experts"], ["fp8.grouped_experts", "fp8.dense"]):
        model = llama4(n_layers=2, moe_every=2)
        ModelConvertersContainer(dense_job(*order), ONE).convert(model)
        models.append(materialized(model))
    first, second = models
    assert (
        in_fp8(first)
        == in_fp8(second)
        == (names((0, 1), *ATTENTION) | names((0,), *DENSE) | names((1,), *SHARED) | expert_names(1))
    )
    second.load_state_dict(first.state_dict())
    tokens = torch.randint(0, 128, (2, 16), device=DEVICE)
    outs = [model(tokens) for model in models]
    assert torch.equal(*outs)
    upstream = torch.randn_like(outs[0])
    for out in outs:
        out.backward(upstream)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_checkpoints_are_plain_and_load_both_ways() -> None:
    fp8, bf16 = llama4(n_layers=2, moe_every=2), llama4(n_layers=2, moe_every=2)
    convert_dense(fp8, REFERENCE)
    fp8, bf16 = materialized(fp8), materialized(bf16)
    state = fp8.state_dict()
    assert {type(t) for t in state.values()} == {Tensor}
    assert state.keys() == bf16.state_dict().keys()
    bf16.load_state_dict(state)
    for assign in (False, True):
        fp8.load_state_dict(copy.deepcopy(bf16.state_dict()), assign=assign)
        assert isinstance(fp8.layers["0"].attention.wq.weight, FP8LinearWeight)
        assert all(torch.equal(t, bf16.state_dict()[name]) for name, t in fp8.state_dict().items())


@pytest.mark.parametrize(
    ("degrees", "dense", "message"),
    [
        ({"tp": 4}, {}, r"wk\.weight has shape \(32, 64\), and parallelism.tensor_parallel_degree = 4 cuts its dim 0"),
        ({"tp": 4}, {"fqns": ["shared_experts"]}, r"w1\.weight has shape \(96, 64\).*dim 0 into parts of 24"),
    ],
    ids=str,
)
def test_tensor_parallelism_that_no_gemm_reads_is_refused(degrees: dict, dense: dict, message: str) -> None:
    dims = ParallelDims(
        **{**dict.fromkeys(("dp_replicate", "dp_shard", "cp", "pp", "ep", "etp"), 1), "world_size": 4}, **degrees
    )
    with pytest.raises(ValueError, match=message):
        FP8DenseConverter(dense_job(**dense), dims).convert(llama4())


def test_a_gather_asked_for_by_name_that_cannot_be_is_refused() -> None:
    job_config = dense_job(fsdp_fp8_all_gather="on")
    job_config.training.enable_cpu_offload = True
    with pytest.raises(ValueError, match=r"\[fp8.dense\] fsdp_fp8_all_gather = 'on' does not go with"):
        FP8DenseConverter(job_config, ONE).convert(llama4())


def test_a_run_without_the_section_is_told() -> None:
    job_config = dense_job()
    del job_config.fp8
    with pytest.raises(ValueError, match=r"fp8\.dense reads the job-config section \[fp8\]"):
        FP8DenseConverter(job_config, ONE)


def test_units_are_what_runs_as_one() -> None:
    units, _ = select(
        llama4(n_layers=2, moe_every=2), FP8DenseConfig(exclude=["layers.1.attention.wv", "layers.0.feed_forward.w2"])
    )
    kinds = {u.fqn: u.kind for u in units}
    assert kinds == {
        "layers.0.attention": "qkv",
        "layers.0.attention.wo": "linear",
        "layers.0.feed_forward.w1": "linear",
        "layers.0.feed_forward.w3": "linear",
        "layers.1.attention.wq": "linear",
        "layers.1.attention.wk": "linear",
        "layers.1.attention.wo": "linear",
        "layers.1.moe.shared_experts": "mlp",
    }
    sizes = {u.fqn: (u.K, u.N) for u in units}
    assert sizes["layers.0.attention"] == (64, 128)
    assert sizes["layers.1.moe.shared_experts"] == (64, 96)
