"""Runs that are written down here, each with one thing wrong, and what diagnosis says of them."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from recipes.diagnose import healthy, main
from recipes.diagnose_rules import findings
from recipes.diagnose_view import View
from recipes.runs import read_run
from recipes.telemetry import Telemetry
from tests.converters.models import llama4, materialized
from tests.helpers import DEVICE

STEPS = (1, 2, 50, 100)
OPERANDS = ("x", "h", "g", "dy13", "w13", "w2")
GEMMS = ("y13", "out", "dh", "dx", "dw13", "dw2")
HEALTHY = {
    **{f"{key}/sqnr_db": 31.5 for key in OPERANDS},
    **{f"{key}/sqnr_db": 28.5 for key in GEMMS},
    **{f"{key}/{share}": 0.0 for key in OPERANDS for share in ("flushed", "saturated")},
    **{f"{key}/scale_{end}": 2.0**-10 for key in OPERANDS for end in ("min", "max")},
}
LAYERS = range(4)


def module(layer: int) -> str:
    return f"layers.{layer}.moe.experts"


def write(folder: Path, changes: dict[str, dict[int, float]] | None = None, **fp8: dict) -> Path:
    """A healthy run of four layers with some tags changed at some steps. fp8: sections of its config."""
    scalars = {f"fp8/{module(n)}/{name}": dict.fromkeys(STEPS, v) for n in LAYERS for name, v in HEALTHY.items()}
    for tag, series in (changes or {}).items():
        scalars.setdefault(tag, {}).update(series)
    writer = SummaryWriter(str(folder / "tb"))
    for tag, series in scalars.items():
        for step, value in series.items():
            writer.add_scalar(tag, value, step)
    writer.close()
    config = {"grouped_experts": {"recipe": "tokenwise", "wgrad": "fp8", "grad_dtype": "auto"}} | fp8
    info = {"schema": 1, "recipe": "recipes/x.toml", "config": {"fp8": config}}
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def diagnose(folder: Path, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, str]:
    code = main([str(folder), *options])
    return code, re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_healthy_run_says_so_in_one_line(tmp_path, capsys):
    code, out = diagnose(write(tmp_path), capsys)
    assert code == 0
    assert "x.toml: 4 modules in FP8, 4 steps measured, 1 to 100 Healthy: every operand and GEMM" in out
    assert "->" not in out


def test_without_telemetry_it_says_how_to_get_it(tmp_path, capsys):
    writer = SummaryWriter(str(tmp_path / "tb"))
    writer.add_scalar("grad_norm", 1.0, 1)
    writer.close()
    code, out = diagnose(tmp_path, capsys)
    assert code == 2
    assert "--fp8.telemetry.every 100" in out
    assert "[fp8.telemetry] every = 100" in out
    assert main([str(tmp_path / "nowhere")]) == 2


def test_a_cold_start_of_delayed_scaling_has_its_name(tmp_path, capsys):
    changes = {f"fp8/{module(2)}/{key}/scale_{end}": {1: 1.0} for key in OPERANDS for end in ("min", "max")}
    changes[f"fp8/{module(2)}/dy13/flushed"] = {1: 0.9996}
    changes[f"fp8/{module(2)}/h/flushed"] = {1: 0.41}
    changes[f"fp8/{module(2)}/dx/sqnr_db"] = {1: 0.02}
    changes[f"fp8/{module(2)}/dy13/sqnr_db"] = {1: 0.0}
    changes[f"fp8/{module(2)}/g/scale_max"][2] = 5.2e-9
    run = write(tmp_path, changes, grouped_experts={"recipe": "delayed", "grad_dtype": "e4m3"})
    code, out = diagnose(run, capsys)
    assert code == 1
    assert "cold scale: layers.2.moe.experts" in out
    assert "until step 1 every scale is 1. Flushed to zero: dy13 100 %, h 41 %." in out
    assert "SQNR: dx 0.0 dB. Scale of g at step 2: 5.2e-09" in out
    assert "[fp8.delayed] warm_start = true" in out
    assert '[fp8.grouped_experts] recipe = "tokenwise"' in out
    assert "gradient" not in out.replace("gradients", "")  # the cold step is not reported a second time


def without(run: Path, tags: dict[str, tuple[int, ...]]) -> View:
    """The run as it reads where nothing was measured: some tags lack some steps."""
    read = read_run(run)
    scalars = {t: {s: v for s, v in series.items() if s not in tags.get(t, ())} for t, series in read.scalars.items()}
    return View(dataclasses.replace(read, scalars=scalars))


def test_gradients_behind_one_that_is_all_zero_are_cold_one_measured_step_longer(tmp_path):
    """`delayed_all_cold` of recipes/issue1152: in step 1 there is no dy13, and so no scale of it, no dx and no dw13."""
    changes = {f"fp8/{module(2)}/{key}/scale_{end}": {1: 1.0} for key in OPERANDS for end in ("min", "max")}
    changes |= {f"fp8/{module(2)}/dy13/scale_{end}": {2: 1.0} for end in ("min", "max")}
    changes |= {f"fp8/{module(2)}/g/flushed": {1: 0.97}, f"fp8/{module(2)}/dy13/flushed": {2: 1.0}}
    changes |= {f"fp8/{module(2)}/{key}/sqnr_db": {1: 0.0} for key in ("g", "dh", "dw2")}
    changes |= {f"fp8/{module(2)}/{key}/sqnr_db": {2: 0.0} for key in ("dy13", "dx", "dw13")}
    run = write(tmp_path, changes, grouped_experts={"recipe": "delayed", "grad_dtype": "e4m3"})
    behind = [f"fp8/{module(2)}/{tag}" for tag in ("dx/sqnr_db", "dw13/sqnr_db", "dy13/sqnr_db")]
    behind += [f"fp8/{module(2)}/dy13/scale_{end}" for end in ("min", "max")]
    for unseen, until in (((1,), "until step 2 scales are 1"), ((1, 50, 100), "until step 2 scales are 1")):
        (found,) = findings(without(run, dict.fromkeys(behind, unseen)))
        assert (found.kind, found.module) == ("cold scale", module(2))
        assert until in found.what
        assert "Flushed to zero: dy13 100 %, g 97 %." in found.what
        assert "SQNR: dh 0.0 dB, dx 0.0 dB, dw13 0.0 dB" in found.what
        assert found.damage == 31.5


def test_a_finding_in_experts_and_dense_layers_names_the_options_of_both(tmp_path, capsys):
    dense, cold = "layers.1.attention.wo", {1: 1.0, 2: 0.01}
    changes = {f"fp8/{m}/g/scale_{e}": cold for m in (dense, module(1)) for e in ("min", "max")}
    changes |= {f"fp8/{m}/g/flushed": {1: 1.0} for m in (dense, module(1))}
    run = write(tmp_path, changes, grouped_experts={"recipe": "delayed"}, dense={"recipe": "delayed"})
    _, out = diagnose(run, capsys)
    assert out.count("[fp8.delayed] warm_start = true") == 1
    assert out.count('[fp8.dense] recipe = "tokenwise"') == 1
    assert out.count('[fp8.grouped_experts] recipe = "tokenwise"') == 1


def test_a_run_that_has_only_begun_is_cold_by_delayed_scaling_alone(tmp_path, capsys):
    changes = {f"fp8/{module(n)}/{key}/scale_{e}": {1: 1.0} for n in LAYERS for key in OPERANDS for e in ("min", "max")}
    changes[f"fp8/{module(2)}/dy13/flushed"] = {1: 0.9996}
    tags = dict.fromkeys(read_run(write(tmp_path, changes)).scalars, STEPS[1:])
    assert [f.kind for f in findings(without(tmp_path, tags))] == ["gradient flushed to zero"]
    delayed = write(tmp_path / "delayed", changes, grouped_experts={"recipe": "delayed"})
    assert [f.kind for f in findings(without(delayed, tags))] == ["cold scale"]
    del changes[f"fp8/{module(2)}/dy13/flushed"]
    mild = without(write(tmp_path / "mild", changes, grouped_experts={"recipe": "delayed"}), tags)
    assert findings(mild) == []
    assert "Nothing to judge yet" in healthy(mild)


def test_a_real_cold_start_is_found(tmp_path, capsys):
    """From the op to the report: delayed scaling in a small model."""
    torch.manual_seed(0)
    model = llama4(n_layers=1)
    config = FP8Config(grouped_experts=FP8GroupedExpertsConfig(recipe="delayed"))
    convert(model, config.grouped_experts)
    model = materialized(model)
    telemetry, writer = Telemetry([model], 1, owns_plain=True), SummaryWriter(str(tmp_path / "tb"))
    for step in (1, 2):
        out = model(torch.randint(0, 128, (2, 16), device=DEVICE))
        out.backward(torch.randn_like(out) * 1e-5)
        for tag, value in telemetry.end_step(step, None).items():
            writer.add_scalar(tag, value, step)
    telemetry.remove()
    writer.close()
    code, out = diagnose(tmp_path, capsys)
    assert code == 1
    assert "cold scale: layers.0.moe.experts" in out
    assert "Flushed to zero: dy13 100 %" in out


def test_an_expert_that_wakes_up_late_is_cold(tmp_path, capsys):
    run = write(tmp_path, {f"fp8/{module(1)}/x/scale_max": {50: 1.0}}, grouped_experts={"recipe": "delayed"})
    code, out = diagnose(run, capsys)
    assert code == 1
    assert "x: at step 50 the scale of an expert that had no token before is still 1" in out


@pytest.mark.parametrize(
    ("recipe", "said", "unsaid"),
    [
        ("tokenwise", ['wgrad = "fp8_columns"', 'wgrad = "bf16"', "skip_first_layers = 1"], ["margin", "recipe ="]),
        ("delayed", ['recipe = "tokenwise"', "margin = 3", 'wgrad = "bf16"'], ["fp8_columns"]),
    ],
)
def test_a_saturated_gradient(tmp_path, capsys, recipe, said, unsaid):
    changes = {f"fp8/{module(0)}/g/{k}": {50: v} for k, v in {"sqnr_db": 12.0, "saturated": 0.0008}.items()}
    run = write(tmp_path, changes, grouped_experts={"recipe": recipe}, delayed={"margin": 2})
    code, out = diagnose(run, capsys)
    assert code == 1
    expected = 31.5 if recipe == "tokenwise" else 25.5
    assert f"gradient saturated: {module(0)} " in out
    assert f"g (gradient of the output): SQNR 12.0 dB at step 50, of {expected}, 0.08 % saturated at step 50" in out
    assert all(text in out for text in said)
    assert not any(text in out for text in unsaid)


def test_the_worst_module_comes_first_and_what_stays_is_listed(tmp_path, capsys):
    changes = {
        f"fp8/{module(1)}/dy13/flushed": dict.fromkeys(STEPS, 0.05),
        f"fp8/{module(3)}/dy13/flushed": dict.fromkeys(STEPS, 0.02),
        f"fp8/{module(3)}/dy13/sqnr_db": {100: 17.0},
    }
    code, out = diagnose(write(tmp_path, changes), capsys)
    assert code == 1
    assert "gradient flushed to zero: layers.{1,3}.moe.experts" in out
    assert out.index("SQNR 17.0 dB at step 100") < out.index("5 % flushed at step 1")
    assert 'fqns = ["layers.0.moe.experts", "layers.2.moe.experts"]' in out
    assert "and 1 more, less damaged: --top 2" in diagnose(tmp_path, capsys, "--top", "1")[1]


def test_a_scale_that_belongs_to_other_data(tmp_path, capsys):
    changes = {f"fp8/{module(0)}/w2/sqnr_db": {1: 3.0}, f"fp8/{module(0)}/w2/flushed": {1: 0.078}}
    code, out = diagnose(write(tmp_path, changes, grouped_experts={"recipe": "delayed"}), capsys)
    assert code == 1
    assert "stale scale" in out
    assert "w2: SQNR 3.0 dB at step 1 with only 7.8 % flushed to zero" in out
    assert 'weights = "cached"' in out


def test_a_nan_comes_before_everything(tmp_path, capsys):
    changes = {f"fp8/{module(n)}/x/non_finite": {100: 0.25} for n in (2, 3)}
    changes[f"fp8/{module(1)}/h/non_finite"] = {50: 0.5}
    changes[f"fp8/{module(1)}/h/sqnr_db"] = {50: math.nan}
    changes[f"fp8/{module(0)}/x/sqnr_db"] = dict.fromkeys(STEPS, 20.0)
    code, out = diagnose(write(tmp_path, changes), capsys)
    assert code == 1
    assert out.index("inf or nan") < out.index("activation imprecise")
    assert out.index("h (hidden rows, input of w2): 50 % inf or nan, first at step 50") < out.index(
        "x (input rows): 25 %"
    )


def test_a_gemm_that_is_worse_than_its_operands(tmp_path, capsys):
    code, out = diagnose(write(tmp_path, {f"fp8/{module(3)}/dw13/sqnr_db": {100: 15.0}}), capsys)
    assert code == 1
    assert "dw13 (weight gradients of w1 and w3): SQNR 15.0 dB at step 100, of 28.5, from sound operands" in out
    assert 'wgrad = "fp8_columns"' in out


def test_one_bad_step_of_many_is_an_accident(tmp_path, capsys):
    series = dict.fromkeys(range(3, 103), 31.5) | {60: 5.0}
    changes = {
        f"fp8/{module(0)}/x/{k}": s for k, s in {"sqnr_db": series, "flushed": dict.fromkeys(series, 0.0)}.items()
    }
    assert diagnose(write(tmp_path, changes), capsys)[0] == 0


def test_dense_layers_are_excluded_by_name(tmp_path, capsys):
    name = "layers.1.attention.wq+wk+wv"
    changes = {f"fp8/{name}/{k}": dict.fromkeys(STEPS, v) for k, v in {"x/sqnr_db": 20.0, "x/flushed": 0.0}.items()}
    run = write(tmp_path, changes, dense={"recipe": "tokenwise", "wgrad": "bf16", "exclude": ["attention.wo"]})
    code, out = diagnose(run, capsys)
    assert code == 1
    assert '[fp8.dense] exclude = ["attention.wo", "layers.1.attention"]' in out


@pytest.mark.parametrize(("steps", "code"), [((2, 100), 1), ((50, 100), 0)], ids=["early", "late"])
def test_routing_that_left_the_twin(tmp_path, capsys, steps, code):
    series = {1: 1.0} | dict.fromkeys(steps, 0.7)
    found, out = diagnose(write(tmp_path, {"fp8/layers.1.moe/twin_agreement": series}), capsys)
    assert found == code
    assert f"at step {steps[0]} the loads of the experts agree with the twin's to 70 %, at the end to 70 %" in out


def test_loads_are_notes(tmp_path, capsys):
    changes = {
        "fp8/layers.1.moe/load_max_over_mean": dict.fromkeys(STEPS, 6.0),
        "fp8/layers.2.moe/empty_experts": {1: 0.0, 2: 3.0},
    }
    code, out = diagnose(write(tmp_path, changes), capsys)
    assert code == 0
    assert "Healthy" in out
    assert "the busiest expert has 6.0 times the mean load" in out
    assert "an expert without a token in 50 % of the measured steps; most at step 2, 3" in out


def test_a_bf16_run_has_nothing_in_fp8(tmp_path, capsys):
    writer = SummaryWriter(str(tmp_path / "tb"))
    writer.add_scalar("fp8/grad_norm/experts", 1.0, 1)
    writer.close()
    code, out = diagnose(tmp_path, capsys)
    assert code == 0
    assert "nothing is in FP8 here" in out
