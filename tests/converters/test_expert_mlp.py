"""The expert MLP against float64: accuracy, the chain rule itself, dtypes, refusals. Groups: test_token_groups.py."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from converters import expert_mlp as expert_mlp_module
from converters import mlp_gradients, scaling, weight_cache
from converters.backends import reference
from converters.config import SQNR_FLOOR_DB, Numerics
from converters.expert_mlp import expert_mlp
from converters.group_ends import spans
from tests.converters.torchao_rules import torchao_mlp
from tests.helpers import GROUPS, NAMES, exact_mlp, fp8_mlp, make_experts, sqnr_db

DECENT = {
    "sizes": (190, 64, 131, 127),
    "D": 128,
    "H": 256,
}  # 512 rows; each SQNR below is stable to 0.05 dB in the seed


def figures(experts, actual: dict[str, Tensor]) -> dict[str, float]:
    exact = exact_mlp(experts)
    return {name: sqnr_db(exact[name], actual[name]) for name in NAMES}


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns", "bf16"])
@pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])
def test_sqnr_reaches_the_recipes_floor(recipe: str, wgrad: str) -> None:
    experts = make_experts(**DECENT)
    db = figures(experts, fp8_mlp(experts, Numerics(recipe=recipe, wgrad=wgrad)))
    assert min(db.values()) >= SQNR_FLOOR_DB[recipe], db
    # Really quantized: two E4M3 operands of 31.5 dB each cannot give more than 28.5 dB.
    assert max(db.values()) < 28.5, db


@pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])
def test_sqnr_is_torchaos_within_a_third_of_a_db(recipe: str) -> None:
    experts = make_experts(**DECENT)
    ours, theirs = figures(experts, fp8_mlp(experts, Numerics(recipe=recipe))), figures(experts, torchao_mlp(experts))
    assert all(abs(ours[name] - theirs[name]) < 0.3 for name in NAMES), (ours, theirs)


def test_rowwise_scales_each_weight_row_alone_as_torchao_does() -> None:
    """A weight row 2**30 below the others of its expert survives; one scale an expert would flush it."""
    experts = make_experts((64, 64))
    w1 = experts.w1.clone()
    w1[:, 0] *= 2.0**-30
    experts = replace(experts, w1=w1)
    exact = exact_mlp(experts)
    for actual in (torchao_mlp(experts), fp8_mlp(experts, Numerics(recipe="rowwise"))):
        assert sqnr_db(exact["w2"][:, :, 0], actual["w2"][:, :, 0]) > 20


@pytest.mark.parametrize("wgrad", ["fp8_columns", "bf16"])
def test_wgrad_from_high_precision_keeps_columns_far_below_their_rows(wgrad: str) -> None:
    """A column of x 2**-22 below the rest: less than 2**-10 / 448 of its row's maximum, where row-scaled FP8 is 0."""
    experts = make_experts((96, 64))
    x = experts.x.clone()
    x[:, 0] *= 2.0**-22
    experts = replace(experts, x=x)
    exact = exact_mlp(experts)["w1"][:, :, 0]
    lost, kept = (fp8_mlp(experts, Numerics(wgrad=w))["w1"][:, :, 0] for w in ("fp8", wgrad))
    assert not lost.any()
    assert sqnr_db(exact, kept) > 22


@dataclass(frozen=True)
class Exact:
    """A backend that quantizes nothing, in float64: what is left is the chain rule of expert_mlp.py."""

    groups, groups_of = staticmethod(reference.groups), staticmethod(reference.groups_of)
    WgradOperand = reference.WgradOperand
    gemm_wgrad_hp = staticmethod(reference.gemm_wgrad_hp)

    @staticmethod
    def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.new_ones(x.shape[0])

    def swiglu_rows(self, y13: Tensor) -> tuple[Tensor, Tensor]:
        return self.quantize_rows(reference.swiglu(y13))

    def dswiglu_rows(self, dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
        return self.quantize_rows(reference.dswiglu(dh, y13))

    def quantize_weight(self, weights: list[Tensor], **_: object) -> reference.QuantizedWeight:
        w, one = torch.cat(weights, dim=1), torch.ones(len(weights[0]), dtype=torch.float64)
        return reference.QuantizedWeight(q=w, scale=one, q_t=w.transpose(1, 2).contiguous(), scale_t=one)

    def gemm_rows(self, q: Tensor, _: Tensor, w: Tensor, __: Tensor, groups: object, *___: object) -> Tensor:
        out = q.new_zeros(q.shape[0], w.shape[1])
        for e, (begin, end) in enumerate(spans(groups.offs, len(q))):
            out[begin:end] = q[begin:end] @ w[e].t()
        return out

    def wgrad_operand(self, q: Tensor, _: Tensor, __: object) -> reference.WgradOperand:
        return reference.WgradOperand(q=q.clone(), scale=q.new_ones(1))

    def wgrad_operand_hp(self, x: Tensor, _: object) -> reference.WgradOperand:
        return self.wgrad_operand(x, x, None)

    def gemm_wgrad(self, a: reference.WgradOperand, b: reference.WgradOperand, groups: object, *_: object) -> Tensor:
        return torch.stack([a.q[i:j].t() @ b.q[i:j] for i, j in spans(groups.offs, len(a.q))])


@pytest.mark.parametrize("wgrad", ["fp8", "fp8_columns"])
def test_unquantized_path_passes_gradcheck(wgrad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (expert_mlp_module, mlp_gradients, scaling, weight_cache):
        monkeypatch.setattr(module, "get_backend", lambda name: Exact())
    experts = make_experts((3, 0, 2), D=4, H=3, tail=2)
    # std 1, so that the SwiGLU is far from linear
    inputs = [t.double().requires_grad_() for t in (experts.x, experts.w1 * 50, experts.w2 * 50, experts.w3 * 50)]
    numerics = Numerics(wgrad=wgrad, cache=False)  # gradcheck perturbs through .data: no version counts
    assert torch.autograd.gradcheck(lambda *t: expert_mlp(*t, experts.offs, numerics), inputs)


@pytest.mark.parametrize("recipe", ["tokenwise", "rowwise"])
def test_bfloat16_inputs_give_bfloat16_and_the_same_accuracy(recipe: str) -> None:
    experts = make_experts(**DECENT)
    tensors = {name: getattr(experts, name).bfloat16() for name in ("x", "w1", "w2", "w3", "upstream")}
    actual = fp8_mlp(replace(experts, **tensors), Numerics(recipe=recipe))
    assert {t.dtype for t in actual.values()} == {torch.bfloat16}
    db = figures(replace(experts, **{k: t.float() for k, t in tensors.items()}), actual)
    assert min(db.values()) >= SQNR_FLOOR_DB[recipe] - 0.3, db  # y13, h and the gradients rounded to 8 bits


@pytest.mark.parametrize("recipe", ["tokenwise", "tensorwise"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_autocast_rounds_nothing_within(recipe: str, wgrad: str) -> None:
    """It gives the output's dtype; products of FP8 values are summed up in float32 as ever."""
    emulated = recipe == "tensorwise"
    numerics = Numerics(recipe=recipe, wgrad=wgrad, backend="emulated" if emulated else "reference")
    e, results = make_experts((44, 1, 0, 19), tail=3), []
    for enabled in (False, True):
        leaves = [e.x.bfloat16().requires_grad_(), *(w.clone().requires_grad_() for w in (e.w1, e.w2, e.w3))]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = expert_mlp(*leaves, e.offs, numerics)
            results.append([out, *torch.autograd.grad(out, leaves, e.upstream.bfloat16())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_computes_in_its_dtype_and_keeps_the_gradients_dtypes() -> None:
    experts = make_experts(GROUPS["unaligned"])
    leaves = [t.clone().requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = expert_mlp(*leaves, experts.offs, Numerics())
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out, leaves, experts.upstream.bfloat16())
    assert {g.dtype for g in grads} == {torch.float32}
    plain = fp8_mlp(experts, Numerics())
    for name, actual in zip(NAMES, (out, *grads), strict=True):
        assert sqnr_db(plain[name], actual.float()) > 24, name


def test_plain_and_wrapped_weights_give_the_same_bits() -> None:
    experts = make_experts(GROUPS["unaligned"], tail=3)
    leaves = [t.clone().requires_grad_() for t in (experts.x, experts.w1, experts.w2, experts.w3)]
    out = expert_mlp(*leaves, experts.offs, Numerics())
    grads = torch.autograd.grad(out, leaves, experts.upstream)
    wrapped = fp8_mlp(experts, Numerics())
    assert all(torch.equal(t, wrapped[name]) for name, t in zip(NAMES, (out, *grads), strict=True))


def test_non_contiguous_rows_and_gradients_and_int64_offsets() -> None:
    experts = make_experts(GROUPS["unaligned"])
    x = experts.x.t().contiguous().t().requires_grad_()
    out = expert_mlp(x, experts.w1, experts.w2, experts.w3, experts.offs.long(), Numerics())
    out.backward(experts.upstream.t().contiguous().t())
    wanted = fp8_mlp(experts, Numerics())
    assert torch.equal(out, wanted["out"])
    assert torch.equal(x.grad, wanted["x"])


@pytest.mark.parametrize("frozen", ["x", "w1", "w2", "w3"])
def test_one_frozen_input_changes_no_other_gradient(frozen: str) -> None:
    experts = make_experts(GROUPS["unaligned"])
    leaves = {n: getattr(experts, n).clone().requires_grad_(n != frozen) for n in NAMES[1:]}
    expert_mlp(**leaves, offs=experts.offs, numerics=Numerics()).backward(experts.upstream)
    wanted = fp8_mlp(experts, Numerics())
    assert leaves[frozen].grad is None
    assert all(torch.equal(t.grad, wanted[n]) for n, t in leaves.items() if n != frozen)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(4, 32)},
        {"x": torch.zeros(2, 2, 64)},
        {"w2": torch.zeros(5, 96, 64)},
        {"w3": torch.zeros(5, 48, 64)},
        {"offs": torch.zeros(6, dtype=torch.int32)},
    ],
    ids=lambda w: f"{next(iter(w))}{tuple(next(iter(w.values())).shape)}",
)
def test_shapes_that_do_not_belong_together_are_named(wrong: dict[str, Tensor]) -> None:
    experts = make_experts(GROUPS["unaligned"])
    inputs = {n: getattr(experts, n) for n in ("x", "w1", "w2", "w3", "offs")} | wrong
    shape = ", ".join(map(str, next(iter(wrong.values())).shape))
    with pytest.raises(ValueError, match=rf"expert_mlp takes x \[M, D\].*got .*\({shape},?\)"):
        expert_mlp(**inputs, numerics=Numerics())
