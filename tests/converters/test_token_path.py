"""`[fp8.token_path] fused` on torchtitan's whole MoE layer: the same function, balance counters and reports."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import MoE

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import FP8GroupedExpertsConverter, convert
from converters.token_config import TokenPathConfig
from converters.token_path import FuseTokenPath, layout_problem, switch_token_path
from recipes.models.mixtral.balance import Balance, BalancedMoE
from tests.converters.models import llama4
from tests.converters.test_moe_layer import BATCH, LENGTH, D, moe_layer, run
from tests.helpers import DEVICE, sqnr_db

ORDERS = pytest.mark.parametrize("before", [True, False], ids=["score_before", "score_after"])


def fuse(fused: str) -> FuseTokenPath:
    return partial(switch_token_path, fused=fused)


def pair(layer: MoE, **config: object) -> tuple[MoE, MoE]:
    """Copies of a layer with FP8 experts, without and with the fused path."""
    models = [nn.ModuleDict({"moe": copy.deepcopy(layer)}) for _ in range(2)]
    for model, fused in zip(models, ("off", "on"), strict=True):
        convert(model, FP8GroupedExpertsConfig(backend="reference", **config), fuse=fuse(fused))
        assert model["moe"].fused_tokens if fused == "on" else not hasattr(model["moe"], "fused_tokens")
    return models[0]["moe"], models[1]["moe"]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, upstream = (torch.randn(BATCH, LENGTH, D, device=DEVICE, dtype=dtype) for _ in range(2))
    return x, upstream


@ORDERS
@pytest.mark.parametrize("args", [{"top_k": 1, "num_shared_experts": 0}, {"top_k": 2}, {"top_k": 8}], ids=str)
def test_layer_equals_torchtitans_path(before: bool, args: dict) -> None:
    titan, ours = pair(moe_layer(score_before_experts=before, **args))
    x, upstream = inputs()
    wanted, actual = run(titan, x, upstream), run(ours, x, upstream)
    assert wanted.keys() == actual.keys()
    assert all(sqnr_db(wanted[name], actual[name]) > 110 for name in wanted)
    assert torch.equal(titan.tokens_per_expert, ours.tokens_per_expert)
    assert ours.tokens_per_expert.sum() == BATCH * LENGTH * ours.router.top_k


@ORDERS
def test_bfloat16_layer_is_no_further_from_float32(before: bool) -> None:
    layer = moe_layer(score_before_experts=before)
    x, upstream = inputs(torch.bfloat16)
    wanted = run(layer, x.float(), upstream.float())
    layer.bfloat16().expert_bias = layer.expert_bias.float()
    figures = [{n: sqnr_db(wanted[n], t) for n, t in run(moe, x, upstream).items()} for moe in pair(layer)]
    assert all(ours > titan - 0.3 for titan, ours in zip(*(f.values() for f in figures), strict=True)), figures


def test_balanced_by_force_and_with_route_norm() -> None:
    titan, ours = pair(moe_layer(_debug_force_load_balance=True, route_norm=True, route_scale=2.5))
    x, upstream = inputs()
    wanted, actual = run(titan, x, upstream), run(ours, x, upstream)
    assert all(sqnr_db(wanted[name], actual[name]) > 110 for name in wanted)
    assert ours.tokens_per_expert.unique().numel() == 1


def test_auxiliary_loss_of_a_subclass_stays() -> None:
    """Mixtral's layer adds its loss in a forward of its own, then calls torchtitan's."""
    grads = []
    for coef in (1.0, 0.0):
        layer = moe_layer(num_shared_experts=0, score_before_experts=False)
        layer.__class__, layer.balance = BalancedMoE, Balance(coef=coef, layers=1)
        torch.manual_seed(0)
        x, upstream = inputs()
        titan, ours = (run(moe, x, upstream)["router.gate.weight"] for moe in pair(layer))
        assert sqnr_db(titan, ours) > 110
        grads.append(ours)
    assert sqnr_db(grads[1], grads[0]) < 40


def test_eval_computes_the_same_and_counts_as_torchtitan_does() -> None:
    titan, ours = pair(moe_layer())
    x, _ = inputs()
    with torch.no_grad():
        outs = [moe.eval()(x) for moe in (titan, ours)]
    assert sqnr_db(*outs) > 110
    assert torch.equal(titan.tokens_per_expert, ours.tokens_per_expert)


@ORDERS
def test_fullgraph_equals_eager(before: bool) -> None:
    _, eager = pair(moe_layer(score_before_experts=before))
    compiled = copy.deepcopy(eager)
    torch._dynamo.reset()
    x, upstream = inputs()
    wanted = run(eager, x, upstream)
    leaf = x.clone().requires_grad_()
    out = torch.compile(compiled, fullgraph=True, backend="aot_eager")(leaf)
    out.backward(upstream)
    actual = {"out": out.detach(), "x": leaf.grad, **{n: p.grad for n, p in compiled.named_parameters()}}
    assert all(sqnr_db(wanted[name], actual[name]) > 110 for name in wanted)
    assert torch.equal(eager.tokens_per_expert, compiled.tokens_per_expert)


def test_recomputation_gives_the_same_bits() -> None:
    _, plain = pair(moe_layer())
    again = copy.deepcopy(plain)
    x, upstream = inputs()
    wanted = run(plain, x, upstream)
    leaf = x.clone().requires_grad_()
    checkpoint(again, leaf, use_reentrant=False).backward(upstream)
    assert torch.equal(wanted["x"], leaf.grad)
    assert all(torch.equal(wanted[name], p.grad) for name, p in again.named_parameters())


def test_nothing_in_high_precision_with_a_row_a_choice_is_saved() -> None:
    """Scores before the experts: y13 alone is saved in BF16 for each of the M rows; the rest is FP8 or [T, D]."""
    saved: list[Tensor] = []
    _, ours = pair(moe_layer(num_shared_experts=0, top_k=3).bfloat16())
    ours.expert_bias = ours.expert_bias.float()
    x, _ = inputs(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(x.requires_grad_())
    M = 3 * BATCH * LENGTH
    wide = [t for t in saved if t.dim() == 2 and t.shape[0] == M and t.dtype != torch.float8_e4m3fn]
    assert [(tuple(t.shape), t.dtype) for t in wide] == [((M, 2 * 192), torch.bfloat16)]


def job(fused: str, **parallelism: object) -> JobConfig:
    config = JobConfig()
    config.fp8 = FP8Config(FP8GroupedExpertsConfig(backend="reference"), token_path=TokenPathConfig(fused))
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def dims(ranks: int = 1, **degrees: int) -> ParallelDims:
    ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    return ParallelDims(**{**ones, **degrees}, world_size=ranks)


@pytest.mark.parametrize(
    ("problem", "degrees", "dispatches", "comm"),
    [
        (None, {}, False, "standard"),
        (None, {"dp_shard": 2, "ep": 2}, True, "standard"),
        (None, {"tp": 2, "ep": 2}, True, "standard"),
        ("rows travel to their experts in BF16", {"dp_shard": 2, "ep": 2}, False, "standard"),
        ("cuts the experts' hidden dim", {"tp": 2}, False, "standard"),
        ("cuts the experts' hidden dim", {"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, True, "standard"),
        ("'deepep' has a token path of its own", {"dp_shard": 2, "ep": 2}, True, "deepep"),
    ],
)
def test_layouts(problem: str | None, degrees: dict, dispatches: bool, comm: str) -> None:
    ranks = degrees.get("tp", 1) * degrees.get("dp_shard", 1)
    found = layout_problem(job("auto", expert_parallel_comm_backend=comm), dims(ranks, **degrees), dispatches)
    assert found is None if problem is None else problem in found


def report_of(fused: str, **config: object) -> str:
    model = llama4()
    converter = FP8GroupedExpertsConverter(job(fused, **config), dims())
    converter.convert(model)
    return model.conversion_reports[0].notes[0]


def test_report_says_what_runs() -> None:
    assert report_of("on") == "token path: fused in 4 MoE layers"
    assert report_of("auto") == "token path: torchtitan's (fused = 'auto', reference backend)"
    assert report_of("off") == "token path: torchtitan's (fused = 'off', reference backend)"


def test_on_is_refused_where_it_cannot_be() -> None:
    model = nn.ModuleDict({"moe": moe_layer()})
    config = FP8GroupedExpertsConfig(backend="reference", wgrad="bf16")
    with pytest.raises(ValueError, match=r"fused = 'on' is not possible here: .*wgrad = 'bf16'.* set fused = 'auto'"):
        convert(model, config, fuse=fuse("on"))


@pytest.mark.parametrize(
    ("ep", "config", "remedy"),
    [
        (1, {"skip_last_layers": 1}, r"layers\.3\.moe stay in BF16 \(experts in the last .*\(skip_last_layers\)\)"),
        (1, {"skip_first_layers": 2}, r"layers\.0\.moe stay in BF16 \(experts in the first .*\(skip_first_layers\)\)"),
        (1, {"fqns": ["layers.0"]}, r"layers\.1\.moe stay in BF16 \(.* no pattern of fqns names\)"),
        (
            2,
            {"skip_last_layers": 1, "ep_fp8_dispatch": "on"},
            r"layers\.3\.moe stay in BF16 \(.*\(skip_last_layers\)\)",
        ),
        (2, {}, r"in BF16 \(with ep_fp8_dispatch = 'on' they travel in FP8\)"),
        (2, {"wgrad": "bf16"}, r"wgrad = 'bf16'"),
        (2, {"experts": "sequential"}, r"experts = 'grouped'"),
        (1, {"experts": "sequential"}, r"experts = 'grouped'"),
    ],
    ids=str,
)
def test_on_names_the_option_that_is_in_its_way(ep: int, config: dict, remedy: str) -> None:
    job_config = job("on")
    experts = FP8GroupedExpertsConfig(backend="reference", **config)
    job_config.fp8 = FP8Config(experts, token_path=TokenPathConfig("on"))
    converter = FP8GroupedExpertsConverter(job_config, dims(ep, dp_shard=ep, ep=ep))
    with pytest.raises(ValueError, match=rf"{remedy}.*\. Change that, or set fused = 'auto'\.$"):
        converter.convert(llama4())


def test_on_with_rows_that_travel_in_fp8() -> None:
    job_config = job("on")
    experts = FP8GroupedExpertsConfig(backend="reference", ep_fp8_dispatch="on")
    job_config.fp8 = FP8Config(experts, token_path=TokenPathConfig("on"))
    model = llama4()
    FP8GroupedExpertsConverter(job_config, dims(2, dp_shard=2, ep=2)).convert(model)
    assert model.conversion_reports[0].notes[0] == "token path: fused in 4 MoE layers"


def test_a_layer_with_another_forward_keeps_it() -> None:
    class Another(MoE):
        def forward(self, x: Tensor) -> Tensor:
            return x

    layers = [moe_layer(), moe_layer()]
    layers[1].__class__ = Another
    model = nn.ModuleDict({"a": layers[0], "b": layers[1]})
    numerics = SimpleNamespace(recipe="tokenwise", wgrad="fp8", backend="hopper")
    note = switch_token_path(model, [layer.experts for layer in layers], numerics, {}, "auto")
    assert note == "token path: fused in 1 MoE layers, torchtitan's in 1"
    assert [layer.fused_tokens for layer in layers] == [True, False]
    with pytest.raises(ValueError, match="b and its experts do not both run the forward"):
        switch_token_path(model, [layer.experts for layer in layers], numerics, {}, "on")


def test_unknown_switch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[fp8.token_path\] fused = 'yes' is unknown"):
        TokenPathConfig("yes")
