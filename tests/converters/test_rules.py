"""The scale rules for studying, against float64: accuracy, formats, ranges, ragged groups, where maxima come from."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from converters.config import SQNR_FLOOR_DB, Numerics
from converters.delayed_config import DelayedConfig
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from converters.rules import plain
from converters.rules.delayed import Delayed
from converters.rules.formats import E4M3, E5M2, exact_scale, pow2_scale
from converters.rules.operand import QuantizedOperand
from converters.rules.ragged import ragged
from converters.rules.rule import STATELESS, Blockwise, Rule
from converters.rules.state import DelayedState
from tests.helpers import GROUPS, NAMES, Experts, exact_mlp, fp8_mlp, make_experts, offsets, sqnr_db, with_tail

RECIPES = ("tokenwise", "rowwise", "tensorwise", "blockwise", "delayed")
DECENT = {"sizes": (190, 0, 131, 127), "D": 128, "H": 256}


def numerics(recipe: str, **config: str) -> Numerics:
    return Numerics(recipe=recipe, backend="emulated", **config)


def mlp(experts: Experts, n: Numerics) -> dict[str, Tensor]:
    """`expert_mlp`; delayed with the scales of a pass before."""
    if n.recipe != "delayed":
        return fp8_mlp(experts, n)
    state = DelayedState(2, len(experts.sizes), n.gradients, DelayedConfig())
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
        out = expert_mlp(*leaves, experts.offs, n, state)
        out.backward(experts.upstream)
    return dict(zip(NAMES, (out.detach(), *(t.grad for t in leaves)), strict=True))


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sqnr_reaches_the_recipes_floor(recipe: str, wgrad: str) -> None:
    experts = make_experts(**DECENT)
    exact, actual = exact_mlp(experts), mlp(experts, numerics(recipe, wgrad=wgrad))
    db = {name: sqnr_db(exact[name], actual[name]) for name in NAMES}
    assert min(db.values()) >= SQNR_FLOOR_DB[recipe], db
    assert max(db.values()) < 28.5, db


@pytest.mark.parametrize("recipe", RECIPES)
def test_e5m2_gradients_cost_what_their_operand_does(recipe: str) -> None:
    """An E5M2 operand has 6 dB less than an E4M3 one, 25.5 for 31.5; the forward has none."""
    experts = make_experts(**DECENT)
    exact = exact_mlp(experts)
    four, five = (mlp(experts, numerics(recipe, grad_dtype=f)) for f in ("e4m3", "e5m2"))
    loss = {name: sqnr_db(exact[name], four[name]) - sqnr_db(exact[name], five[name]) for name in NAMES}
    assert loss.pop("out") == 0
    assert all(1.5 < db < 3.5 for db in loss.values()), loss


@pytest.mark.parametrize(("fmt", "db"), [(E4M3, 31.5), (E5M2, 25.5)])
@pytest.mark.parametrize("recipe", STATELESS)
def test_an_operand_has_its_formats_sqnr_whatever_the_rule(recipe: str, fmt: object, db: float) -> None:
    """Floating point: a scale's granularity is worth nothing while values stay normal."""
    x, rows = torch.randn(300, 256), ragged(offsets((170, 0, 130)), 300)
    rule: Rule = STATELESS[recipe]()
    for quantize in (rule.rows, rule.columns):
        assert abs(sqnr_db(x, quantize(x, fmt, rows, 0).dequantized(rows)) - db) < 0.3
    w = torch.randn(3, 144, 272) * 0.02
    for dim in (1, 2):
        assert abs(sqnr_db(w, rule.weight([w], dim, 0).dequantized(rows)) - 31.5) < 0.3


def flushed_rows(operand: QuantizedOperand) -> float:
    return (operand.q.float().abs().amax(1) == 0).float().mean().item()


def test_a_scale_of_the_tensor_flushes_whole_tokens_and_one_a_token_none() -> None:
    """Gradients whose tokens differ by a log-normal factor, sigma 4: some lie 2**-20 below the largest."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 128, generator=generator) * torch.randn(1024, 1, generator=generator).mul(4).exp()
    rows = ragged(offsets((600, 424)), 1024)
    share = {r: flushed_rows(STATELESS[r]().rows(x, E4M3, rows, 0)) for r in STATELESS}
    assert share["tensorwise"] > 0.15, share
    assert share["tokenwise"] == share["rowwise"] == share["blockwise"] == 0, share
    wider = flushed_rows(STATELESS["tensorwise"]().rows(x, E5M2, rows, 0))
    assert wider < share["tensorwise"] / 10  # what E5M2 is for: 2**-16 / 57344 instead of 2**-9 / 448


@pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])
def test_emulated_equals_the_reference(recipe: str) -> None:
    experts = make_experts(**DECENT)
    emulated, reference = fp8_mlp(experts, numerics(recipe)), fp8_mlp(experts, Numerics(recipe=recipe))
    assert all(sqnr_db(reference[name], emulated[name]) > 60 for name in NAMES)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_any_groups_and_nobodys_rows(recipe: str, groups: str) -> None:
    """Each expert gets what it would get alone; rows past the last group, nan among them, change nothing."""
    experts = make_experts(GROUPS[groups], tail=3)
    state = lambda E: DelayedState(2, E, "e5m2", DelayedConfig(warm_start=True)) if recipe == "delayed" else None  # noqa: E731

    def run(e: Experts) -> dict[str, Tensor]:
        leaves = [t.clone().requires_grad_() for t in (e.x, e.w1, e.w2, e.w3)]
        out = expert_mlp(*leaves, e.offs, numerics(recipe), state(len(e.sizes)))
        out.backward(e.upstream)
        return dict(zip(NAMES, (out.detach(), *(t.grad for t in leaves)), strict=True))

    whole, poisoned = run(experts), run(with_tail(experts, torch.nan))
    assert all(torch.equal(whole[name], poisoned[name]) for name in NAMES)
    assert not whole["out"][experts.rows :].any()
    assert not whole["x"][experts.rows :].any()
    start = 0
    for e, size in enumerate(experts.sizes):
        alone = run(experts.only(e))
        rows = slice(start, start := start + size)
        assert sqnr_db(alone["out"], whole["out"][rows]) > 100
        assert all(sqnr_db(alone[w][0], whole[w][e]) > 100 or not alone[w].any() for w in ("w1", "w2", "w3"))


def test_blocks_begin_anew_with_each_group() -> None:
    """Groups of 130 and 3 rows: blocks of 128, 2 and 3. One block's maximum scales its own column alone."""
    rows = ragged(offsets((130, 3)), 135)
    x = torch.ones(135, 4)
    x[0, 0], x[128, 1], x[132, 2], x[134, 3] = 2.0**10, 2.0**11, 2.0**12, 2.0**13  # the last is nobody's
    amax = rows.amax_blocks(x)
    assert amax[:128, 0].eq(2.0**10).all()
    assert amax[128:133, 0].eq(1).all()
    assert amax[:128, 1].eq(1).all()
    assert amax[128:130, 1].eq(2.0**11).all()
    assert amax[130:133, 1].eq(1).all()
    assert amax[:130, 2].eq(1).all()
    assert amax[130:133, 2].eq(2.0**12).all()
    assert amax[:133, 3].eq(1).all()


def test_blockwise_weights_have_a_scale_a_square_of_128() -> None:
    w = torch.ones(1, 144, 272)
    w[0, 0, 0], w[0, 140, 260] = 448.0, 448.0 * 4
    scale = Blockwise().weight([w], 2, 0).scale[0]
    one = pow2_scale(torch.ones(()), E4M3)
    assert scale[:128, :128].eq(1).all()
    assert scale[128:, 256:].eq(4).all()
    assert scale[:128, 128:].eq(one).all()
    assert scale[128:, :256].eq(one).all()


def test_scales_of_zero_and_of_what_is_not_finite() -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan, 448.0])
    for scale in (pow2_scale(amax, E4M3), exact_scale(amax, E4M3)):
        assert 0 < scale[0] < torch.inf
        assert scale[1:3].isnan().all()
        assert scale[3] == 1
    assert pow2_scale(torch.tensor(57344.0), E5M2) == 1
    assert exact_scale(torch.tensor(57344.0 * 3), E5M2) == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "tokenwise"])
def test_inf_in_a_gradient_stays_visible(recipe: str) -> None:
    experts = make_experts((40, 24))
    upstream = experts.upstream.clone()
    upstream[3, 5] = torch.inf
    grads = fp8_mlp(replace(experts, upstream=upstream), numerics(recipe, grad_dtype="e5m2"))
    assert all(grads[w][0].isnan().any() and grads[w][1].isfinite().all() for w in ("w1", "w2", "w3"))


def test_one_group_is_a_linear_layer_and_bf16_comes_out_as_bf16() -> None:
    x, w, g = torch.randn(50, 64), torch.randn(1, 96, 64) * 0.02, torch.randn(50, 96)
    for recipe in ("tensorwise", "blockwise"):
        leaves = [x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()]
        y = grouped_mm(leaves[0], leaves[1].transpose(1, 2), offsets((50,)), numerics(recipe))
        y.backward(g.bfloat16())
        assert {y.dtype, leaves[0].grad.dtype, leaves[1].grad.dtype} == {torch.bfloat16}
        assert sqnr_db(x.double() @ w[0].double().t(), y) > 27
        assert sqnr_db(g.double().t() @ x.double(), leaves[1].grad[0]) > 23


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_products_that_a_module_spells_itself_follow_the_rule(recipe: str) -> None:
    x, w = torch.randn(50, 64), torch.randn(3, 96, 64) * 0.02
    weight = nn.Parameter(FP8ExpertWeight(w.clone(), numerics(recipe)))
    for y in (x @ weight[1].t(), torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets((0, 50, 0)))):
        assert 27 < sqnr_db(x.double() @ w[1].double().t(), y) < 29.5
        (dw,) = torch.autograd.grad(y, [weight], torch.randn(50, 96))
        assert dw[1].any()
        assert not dw[::2].any()


def test_a_rule_in_plain_torch_has_the_same_memory() -> None:
    """Telemetry needs FP8 and scales where kernels keep values only."""
    kernels = SimpleNamespace()
    for rule in STATELESS.values():
        assert rule(kernels).in_plain() == rule(plain)
    x, rows = torch.randn(6, 16), ragged(offsets((6,)), 6)
    rule = Delayed(torch.zeros(1, 2, 1), 0, kernels)
    made = rule.in_plain().rows(x, E4M3, rows, 0)
    assert isinstance(made, QuantizedOperand)
    assert rule.ops is kernels
    assert rule.amax.item() == x.abs().max()
    assert rule.used[0, 1] == made.outer


def test_delayed_without_a_state_is_refused() -> None:
    experts = make_experts((4, 4))
    with pytest.raises(ValueError, match=r"recipe = 'delayed' needs the state.*'tensorwise'"):
        fp8_mlp(experts, numerics("delayed"))
    with pytest.raises(ValueError, match="backend 'reference' has no recipe 'blockwise'"):
        Numerics(recipe="blockwise")
