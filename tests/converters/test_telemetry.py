"""What telemetry measures of an op is what direct computation finds; each pass counts once, and nothing when off."""

import math

import pytest
import torch
from torch import Tensor, nn

from converters.backends import reference
from converters.config import FP8GroupedExpertsConfig, Numerics
from converters.dense_linear import dense_linear
from converters.dense_mlp import dense_mlp
from converters.expert_mlp import expert_mlp
from converters.fp8_grouped_experts import convert
from converters.grouped_mm import grouped_mm
from converters.routed_mlp import routed_mlp
from converters.telemetry import Tap, _claims, claim, release, tap_of
from converters.telemetry_records import GEMM, OPERAND, Key, gemm_records, operand_records
from converters.telemetry_stats import ROWS, expand_scale, operand, sample_rows
from tests.converters.models import llama4, materialized
from tests.helpers import Experts, exact_mlp, make_experts, offsets

OPERANDS = {"x", "h", "g", "dy13", "w13", "w2", "w"}
MLP_KEYS = OPERANDS - {"w"} | {"y13", "out", "dh", "dx", "dw13", "dw2"}


def tapped(weight: Tensor, name: str = "layers.1.moe.experts.w1") -> Tap:
    tap = Tap(name)
    claim(weight.detach(), tap)
    tap.open()
    return tap


def found_keys(tap: Tap) -> set[Key]:
    return {key for key, _ in tap.found}


def figures(tap: Tap, key: str) -> dict[str, float]:
    (at,) = {each for each in found_keys(tap) if each[1] == key}
    names, records = (OPERAND, operand_records) if key in OPERANDS else (GEMM, gemm_records)
    (record,) = records(tap.found, [at], torch.device("cpu")).tolist()
    return dict(zip(names, record, strict=True))


def sqnr(tap: Tap, key: str) -> float:
    found = figures(tap, key)
    return 10 * math.log10(found["signal"] / found["noise"])


def run(experts: Experts, numerics: Numerics) -> tuple[Tap, dict[str, Tensor]]:
    """One forward and backward, measured."""
    leaves = {n: getattr(experts, n).clone().requires_grad_() for n in ("x", "w1", "w2", "w3")}
    tap = tapped(leaves["w1"])
    out = expert_mlp(**leaves, offs=experts.offs, numerics=numerics)
    out.backward(experts.upstream)
    return tap, {"out": out.detach(), **{n: t.grad for n, t in leaves.items()}}


@pytest.mark.parametrize(
    "numerics",
    [Numerics(), Numerics(recipe="rowwise"), Numerics(cache=False), Numerics(recipe="blockwise", backend="emulated")],
    ids=str,
)
def test_operands_of_the_mlp(numerics: Numerics) -> None:
    experts = make_experts((44, 1, 7, 0, 17), tail=8)
    experts.x[-8:] = math.nan  # rows of nobody
    tap, _ = run(experts, numerics)
    assert found_keys(tap) == {("layers.1.moe.experts", key) for key in MLP_KEYS}
    x = experts.x[: experts.rows]
    found = figures(tap, "x")
    assert found["amax"] == x.abs().max()
    assert (found["finite"], found["non_finite"], found["saturated"]) == (x.numel(), 0, 0)
    assert found["signal"] == pytest.approx(x.double().square().sum().item())
    if numerics.recipe != "blockwise":
        q, scale = reference.quantize_rows(x)
        assert found["flushed"] == ((q.float() == 0) & (x != 0)).sum()
        assert found["noise"] == pytest.approx((q.float() * scale[:, None] - x).double().square().sum().item())
        assert (found["scale_max"], -found["minus_scale_min"]) == (scale.max(), scale.min())
    assert figures(tap, "w13")["amax"] == max(experts.w1.abs().max(), experts.w3.abs().max())
    assert figures(tap, "w2")["finite"] == experts.w2.numel()


@pytest.mark.parametrize("recipe", ["tokenwise", "tensorwise"])
def test_gemms_of_the_mlp(recipe: str) -> None:
    """Each GEMM's own error; the chain that ends in dx has the errors of all its GEMMs."""
    experts = make_experts((300, 1, 0, 211), seed=3)
    tap, results = run(experts, Numerics(recipe=recipe, backend="reference" if recipe == "tokenwise" else "emulated"))
    low = 28.0 if recipe == "tokenwise" else 23.8  # E4M3 x E4M3, and gradients in E5M2
    for key in ("y13", "out"):
        assert 28 < sqnr(tap, key) < 29.5, key
    for key in ("dh", "dx", "dw13", "dw2"):
        assert low < sqnr(tap, key) < low + 2, key
    exact = exact_mlp(experts)
    noise = sum(10 ** (-sqnr(tap, key) / 10) for key in ("y13", "dh", "dx"))
    chain = 20 * math.log10(exact["x"].norm() / (results["x"] - exact["x"]).norm())
    assert chain == pytest.approx(-10 * math.log10(noise), abs=1)


def test_a_wrong_gemm_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference.gemm_wgrad
    monkeypatch.setattr(reference, "gemm_wgrad", lambda *a, **k: original(*a, **k) * 1.1)
    tap, _ = run(make_experts((40, 24)), Numerics())
    assert sqnr(tap, "dw13") == pytest.approx(20, abs=0.8)  # an error of a tenth
    assert sqnr(tap, "dx") > 28


def test_no_token_and_no_row() -> None:
    for sizes, tail in (((0, 0, 0), 0), ((0, 0, 0), 5)):
        tap, _ = run(make_experts(sizes, tail=tail), Numerics())
        for key in ("x", "h", "g", "dy13"):
            assert figures(tap, key)["finite"] == figures(tap, key)["non_finite"] == 0
        assert figures(tap, "out") == {"signal": 0, "noise": 0}
        assert figures(tap, "w13")["finite"] > 0


def test_nan_and_inf_are_counted_and_seen() -> None:
    experts = make_experts((20, 12))
    experts.x[3, 5], experts.x[21, 0] = math.nan, -math.inf
    tap, _ = run(experts, Numerics())
    found = figures(tap, "x")
    assert found["non_finite"] == 2
    assert math.isinf(found["amax"])
    assert math.isinf(found["scale_max"])  # a maximum over ranks would lose a nan
    assert math.isnan(found["noise"])
    assert found["flushed"] == 0


def test_flushed_and_saturated() -> None:
    x = torch.tensor([[448.0, 449.0, 2.0**-9, 2.0**-11, 0.0, -900.0], [1.0] * 6])
    q = reference.cast(x, torch.ones(2, 1))
    rows = operand(x, q, torch.ones(2, 1), torch.tensor([True, False]))
    (record,) = operand_records([(("", "x"), rows)], [("", "x")], x.device).tolist()
    found = dict(zip(OPERAND, record, strict=True))
    assert (found["flushed"], found["nonzero"], found["saturated"], found["finite"]) == (1, 5, 2, 6)
    assert (found["amax"], found["scale_max"], found["minus_scale_min"]) == (900, 1, -1)


@pytest.mark.parametrize("M", [ROWS + 700, 90])
def test_sampled_rows_belong_to_somebody_and_are_spread(M: int) -> None:
    sample = sample_rows(offsets((M // 2, 0, M // 4)), M)
    rows = sample.rows[sample.valid]
    assert len(rows.unique()) == len(rows) >= min(ROWS, M // 2 + M // 4) // 2
    assert rows.max() < M // 2 + M // 4
    assert set(sample.expert[sample.valid].tolist()) == {0, 2}
    assert ((sample.expert == 2) == (sample.rows >= M // 2))[sample.valid].all()


def test_scales_of_any_granularity_broadcast() -> None:
    shape = torch.Size((4, 200, 300))
    for scale in (torch.rand(()), torch.rand(4), torch.rand(4, 200), torch.rand(4, 2, 3), torch.rand(4, 1, 300)):
        wide = expand_scale(scale, shape).expand(shape)
        at = (2, 130, 259)
        dims = zip(at, scale.shape, shape, strict=False)
        where = tuple(i // 128 if n == -(-N // 128) else min(i, n - 1) for i, n, N in dims)
        assert wide[at] == scale[where]


def routed(experts: Experts, numerics: Numerics, before: bool) -> tuple[Tap, Tensor]:
    """The fused path, top-2 of 30 tokens, and the rows that a path without fusion would have."""
    T, E = 30, len(experts.sizes)
    x = experts.x[:T].clone().requires_grad_()
    chosen = torch.stack([torch.randperm(E)[:2] for _ in range(T)]).flatten()
    order = chosen.argsort(stable=True)
    slots = torch.empty(2 * T, dtype=torch.int32)
    slots[order] = torch.arange(2 * T, dtype=torch.int32)
    scores = torch.rand(2 * T)
    ws = [w.clone().requires_grad_() for w in (experts.w1, experts.w2, experts.w3)]
    tap = tapped(ws[0])
    offs = chosen.bincount(minlength=E).cumsum(0).int()
    out = routed_mlp(x, scores, slots.view(T, 2), None, *ws, offs, before, numerics)
    out.backward(experts.upstream[:T])
    rows = x.detach()[order // 2]
    return tap, rows * scores[:, None] if before else rows


@pytest.mark.parametrize("before", [True, False])
def test_the_fused_token_path_has_rows_too(before: bool) -> None:
    tap, rows = routed(make_experts((20, 20, 20)), Numerics(), before)
    assert {key for _, key in found_keys(tap)} == MLP_KEYS
    found = figures(tap, "x")
    assert found["amax"] == pytest.approx(rows.abs().max().item(), rel=1e-6)
    assert found["signal"] == pytest.approx(rows.double().square().sum().item(), rel=1e-5)
    for key in MLP_KEYS - OPERANDS:
        assert 27 < sqnr(tap, key) < 31, key


def test_dense_layers_are_one_group() -> None:
    x, upstream = torch.randn(50, 64, requires_grad=True), torch.randn(50, 64)
    w1, w2, w3 = (nn.Parameter(torch.randn(s) * 0.02) for s in ((96, 64), (64, 96), (96, 64)))
    tap = tapped(w1, "layers.0.feed_forward.w1")
    dense_mlp(x, w1, w2, w3, Numerics()).backward(upstream)
    assert {label for label, _ in found_keys(tap)} == {"layers.0.feed_forward"}
    assert figures(tap, "w2")["finite"] == w2.numel()
    wq, wk, wv = (nn.Parameter(torch.randn(n, 64) * 0.02) for n in (64, 32, 32))
    taps = [tapped(w, f"layers.0.attention.w{n}") for w, n in ((wq, "q"), (wk, "k"), (wv, "v"))]
    torch.cat(dense_linear(x, [wq, wk, wv], Numerics()), dim=1).backward(torch.randn(50, 128))
    keys = ("x", "g", "w", "y", "dx", "dw")
    assert found_keys(taps[0]) == {("layers.0.attention.wq+wk+wv", key) for key in keys}
    assert not taps[1].found
    assert all(27.5 < sqnr(taps[0], key) < 31 for key in ("y", "dx", "dw"))


def test_every_expert_of_a_loop_counts_once() -> None:
    """Sequential experts: views of one weight, one after the other; a second micro-batch is not measured."""
    experts = make_experts((9, 14, 5))
    w = experts.w1.clone().requires_grad_()
    tap = tapped(w, "experts.gate")
    for _ in range(2):
        for e, rows in enumerate(experts.x.split(experts.sizes)):
            y = grouped_mm(rows, w[e : e + 1].transpose(1, 2), offsets((len(rows),)), Numerics(cache=False))
            y.backward(torch.randn_like(y))
    assert figures(tap, "x")["finite"] == experts.x.numel()
    assert figures(tap, "w")["finite"] == w.numel()
    assert 27.5 < sqnr(tap, "dw") < 30


def test_another_micro_batch_in_between_gives_no_wrong_weight_gradient() -> None:
    a, b = (make_experts((20, 12), seed=s) for s in (1, 2))
    ws = {n: getattr(a, n).clone().requires_grad_() for n in ("w1", "w2", "w3")}
    tap = tapped(ws["w1"])
    outs = [expert_mlp(e.x, **ws, offs=e.offs, numerics=Numerics()) for e in (a, b)]
    outs[1].backward(b.upstream)  # b first
    assert math.isnan(figures(tap, "dw13")["noise"])
    assert sqnr(tap, "dw2") > 27


def test_recomputation_counts_once() -> None:
    experts = make_experts((20, 12))
    ws = {n: getattr(experts, n).clone().requires_grad_() for n in ("w1", "w2", "w3")}
    tap, x = tapped(ws["w1"]), experts.x.clone().requires_grad_()
    mlp = lambda x: expert_mlp(x, **ws, offs=experts.offs, numerics=Numerics())  # noqa: E731
    torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False).backward(experts.upstream)
    assert figures(tap, "x")["finite"] == figures(tap, "g")["finite"] == experts.x.numel()


def test_off_means_nothing_is_claimed_and_graphs_do_not_change() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.print_readable(print_output=False))
        return graph

    model = materialized(llama4(n_layers=1))
    convert(model, FP8GroupedExpertsConfig(backend="reference"))
    experts, counts = model.layers["0"].moe.experts, torch.tensor([5, 0, 9, 2])
    release()
    assert not _claims
    taps = []
    for measured in (False, True):
        torch._dynamo.reset()
        if measured:
            taps.append(tapped(experts.w1._data))
        torch.compile(experts, fullgraph=True, backend=backend)(torch.randn(16, 64), counts)
    assert graphs[0] == graphs[1]
    assert ("layers.1.moe.experts", "x") in found_keys(taps[0])


def test_nothing_is_held_alive() -> None:
    w = torch.randn(2, 32, 16)
    tap = tapped(w)
    assert tap_of(w[1]) is tap  # a view
    assert tap_of(torch.randn(2, 32, 16)) is None
    del tap
    assert tap_of(w) is None
    tap = Tap("w")
    claim(w, tap)
    del w
    release()
    assert not _claims


def test_compiled_values_are_those_of_eager() -> None:
    torch._dynamo.reset()
    experts = make_experts((20, 0, 12), tail=4)
    records = []
    for wrap in (lambda f: f, torch.compile(fullgraph=True, backend="aot_eager")):
        ws = [getattr(experts, n).clone().requires_grad_() for n in ("w1", "w2", "w3")]
        tap, x = tapped(ws[0]), experts.x.clone().requires_grad_()
        mlp = wrap(lambda x, ws: expert_mlp(x * 1.5, *ws, experts.offs, Numerics()) * 2)
        mlp(x, ws).backward(experts.upstream)
        records.append({key: figures(tap, key) for key in MLP_KEYS})
    assert records[0] == records[1]
