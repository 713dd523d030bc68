"""python -m recipes.sqnr: two passes that differ in a known way, and whether the report says so."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.device import prepare_device
from recipes.gradient_groups import group_of
from recipes.sqnr import failure, main
from recipes.sqnr_measure import Report, _by_token, measure, sqnr_db
from recipes.sqnr_tables import verdict
from recipes.sqnr_twins import Twins, build_twins, read_config, twin_converters
from recipes.sqnr_watch import watched

prepare_device()
ROOT = Path(__file__).parents[2]
SMALL = (
    *("--training.local_batch_size=2", "--training.seq_len=32", "--validation.no-enable"),
    *("--training.dataset=text_files", f"--training.dataset_path={ROOT / 'recipes'}"),  # read in no time
)


def build(recipe: str = "mixtral_fp8", *overrides: str) -> Twins:
    return build_twins(read_config(str(ROOT / "recipes" / f"{recipe}.toml"), [*SMALL, *overrides]))


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the recipes' paths begin there


class OpCounter(TorchDispatchMode):
    """Names of the ops that run in it."""

    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def row(report: Report, kind: str, name: str):
    return next(r for r in report.rows if (r.kind, r.name) == (kind, name))


def test_sqnr_is_what_its_name_says() -> None:
    x = torch.randn(64)
    assert sqnr_db(x, 1.1 * x) == pytest.approx(20, abs=1e-5)
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(torch.zeros(3), torch.ones(3)) == -math.inf
    assert math.isnan(sqnr_db(x, x.clone().fill_(torch.nan)))


def test_rows_are_brought_back_to_their_tokens() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]])
    order = chosen.flatten().argsort(stable=True)
    rows = torch.stack([order, chosen.flatten()[order]], dim=1).float()  # each row says its pair and its expert
    by_token = _by_token(rows, order, chosen)
    assert by_token[:, :, 1].tolist() == [[0, 2], [1, 2], [0, 1]]
    assert (by_token[:, :, 0] // 2).tolist() == [[0, 0], [1, 1], [2, 2]]


def test_fp8_does_low_damage_and_only_where_it_is() -> None:
    twins = build()
    assert all(torch.equal(p, q) for p, q in zip(twins.reference.parameters(), twins.fp8.parameters(), strict=True))
    report = measure(twins)
    assert report.low_damage, verdict(report)
    assert "low damage" in verdict(report)
    assert {r.name.split(".", 2)[2] for r in report.rows if r.in_fp8} == {
        *("moe.experts", "moe.experts.w1", "moe.experts.w2", "moe.experts.w3")
    }
    for layer in (0, 1):
        out = row(report, "output", f"layers.{layer}.moe.experts")
        assert 22 < out.sqnr_db < 30
        assert out.alone_db == pytest.approx(out.sqnr_db, abs=1)
    assert row(report, "output", "layers.0.attention").sqnr_db == math.inf  # nothing was FP8 before it
    assert [r.name for r in report.routing] == ["layers.0.moe", "layers.1.moe"]
    damage = [r.sqnr_db for r in report.rows]
    assert damage == sorted(damage)


def test_a_broken_layer_is_named() -> None:
    twins = build()
    with torch.no_grad():
        twins.fp8.layers["1"].moe.experts.w2.mul_(-3)
    report = measure(twins)
    assert not report.low_damage
    with_errors_of_their_own = [r.name for r in report.rows if r.alone_db is not None and r.alone_db < 20]
    assert with_errors_of_their_own == ["layers.1.moe.experts"]
    assert "lowest on its own: layers.1.moe.experts" in verdict(report)


def test_tokens_that_change_experts_are_shown_and_left_out() -> None:
    twins = build()
    gate = twins.fp8.layers["0"].moe.router.gate.weight
    with torch.no_grad():
        gate.add_(torch.randn_like(gate) * 0.3 * gate.std())
    report = measure(twins)
    first, second = report.routing
    assert 0.5 < first.choices < 1
    assert first.tokens < first.choices
    assert second.choices > first.choices
    moe = row(report, "output", "layers.0.moe")
    assert moe.same_route_db > moe.sqnr_db + 3
    assert row(report, "output", "layers.0.moe.experts").sqnr_db > 22  # only tokens with the same experts are compared


def test_cold_scales_show_in_the_gradients_and_warm_up() -> None:
    """Delayed scaling turns small gradients into zeros until it has seen some: one step later nothing is left of it."""
    small = ("--training.global_batch_size=4096", "--fp8.grouped_experts.recipe=delayed")
    twins = build("mixtral_fp8", *small)
    cold = measure(twins)
    assert not cold.low_damage
    assert "gradients are all zeros in FP8" in verdict(cold)
    assert measure(twins, warmup=1).low_damage


def test_fused_token_path_has_the_experts_error_alone() -> None:
    report = measure(build("mixtral_fp8", "--fp8.token_path.fused=on"))
    assert report.low_damage
    for layer in (0, 1):
        experts = row(report, "output", f"layers.{layer}.moe.experts")
        assert 22 < experts.alone_db == experts.sqnr_db < 30
        assert 22 < row(report, "output", f"layers.{layer}.moe").same_route_db < 30


def test_fused_projections_stay_fused_and_are_measured_alone() -> None:
    twins = build("llama4_fp8", "--model.converters=fp8.dense")
    ops = []
    with OpCounter(ops):
        report = measure(twins)
    forwards = [op for op in ops if op == "titan_moe_fp8.dense_linear.default"]
    assert len(forwards) == 2 * 2 + 2 * (2 + 4)  # wq|wk|wv and wo, in two layers; then attention and each layer alone
    assert report.low_damage
    assert row(report, "output", "layers.0.moe.shared_experts").alone_db > 20
    for layer in ("wq", "wk", "wv", "wo"):
        projection = row(report, "output", f"layers.1.attention.{layer}")
        assert 25 < projection.alone_db == projection.sqnr_db < 35


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    args = [str(ROOT / "recipes" / "mixtral_fp8.toml"), [*SMALL, "--debug.seed=5"]]
    saved = build_twins(read_config(*args)).fp8.state_dict()
    dcp.save({**saved, "train_state": torch.zeros(3)}, checkpoint_id=tmp_path / "step-1")
    twins = build_twins(read_config(args[0], list(SMALL)), str(tmp_path / "step-1"))
    for model in (twins.reference, twins.fp8):
        found = model.state_dict()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_gradients_have_the_size_of_a_step() -> None:
    """A batch is one of the step's micro-batches: its gradients are smaller, and its norms are those of the step."""
    one, four = measure(build()), measure(build("mixtral_fp8", "--training.global_batch_size=8"))
    name = "layers.0.attention.wq.weight"
    ratio = row(one, "gradient", name).reference_norm / row(four, "gradient", name).reference_norm
    assert ratio == pytest.approx(4, rel=1e-3)
    assert one.norms["attention"][0] == pytest.approx(four.norms["attention"][0], rel=1e-3)
    squares = sum(norms[0] ** 2 for group, norms in one.norms.items() if group != "total")
    assert one.norms["total"][0] == pytest.approx(math.sqrt(squares))
    assert one.loss == pytest.approx(four.loss)


def test_groups_of_parameters() -> None:
    twins = build("llama4_fp8")
    found = {group_of(name) for name, _ in twins.fp8.named_parameters()}
    assert found == {"embedding", "attention", "experts", "shared_expert", "router", "norms", "head"}
    names = set(watched(twins.fp8))
    assert {"layers.0", "layers.1.attention.wq", "layers.0.moe.shared_experts", "norm", "output"} <= names
    assert not any(isinstance(twins.fp8.get_submodule(name), nn.ModuleDict) for name in names)


def test_twin_keeps_what_is_not_fp8() -> None:
    args = ["--model.converters=experts.sequential,fp8.grouped_experts"]
    recipe = str(ROOT / "recipes" / "mixtral_fp8.toml")
    assert twin_converters(read_config(recipe, args)) == ["experts.sequential"]
    sequential = read_config(recipe, ["--fp8.grouped_experts.experts=sequential"])
    assert twin_converters(sequential) == ["experts.sequential"]
    assert twin_converters(read_config(recipe, [])) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, recipe = tmp_path / "sqnr.json", str(ROOT / "recipes" / "mixtral_bf16.toml")
    converted = [recipe, "--converters", "fp8.grouped_experts", *SMALL, "--out", str(out)]
    assert main([*converted, "--floor", "20", "--rows", "3"]) == 0
    assert "worst first (3 of" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["low_damage"] is True
    assert found["converters"] == {"reference": [], "fp8": ["fp8.grouped_experts"]}
    assert {"logits_db", "loss", "rows", "routing", "norms", "versions", "verdict"} <= found.keys()
    assert main([*converted, "--floor", "300"]) == 1
    assert "below the floor of 300 dB" in capsys.readouterr().out
    assert main([recipe]) == 2
    assert "has no FP8 converter" in capsys.readouterr().err
    assert main([recipe, "--converters", "fp8.grouped_experts", "--checkpoint", str(tmp_path)]) == 2
    assert "is no checkpoint of torchtitan" in capsys.readouterr().err


def test_nan_is_a_failure() -> None:
    twins = build()
    with torch.no_grad():
        twins.fp8.layers["1"].moe.experts.w1[0, 0, 0] = torch.nan
    assert "nan or inf" in failure(measure(twins), None)
