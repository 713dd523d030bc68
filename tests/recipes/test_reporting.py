"""What a run prints and writes: tables, run.json, events; and that it ends cleanly whatever happens."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
from torchtitan.distributed import utils as dist_utils

from converters.selection import ConversionReport, ConvertedWeight, SkippedModule
from recipes.finite import NonFiniteError
from recipes.reporting import mfu_peak
from recipes.runs import TAGS, read_run
from tests.recipes.processors import STEPS, make_fixture, model, train_step  # noqa: F401

CLIP = dist_utils.clip_grad_norm_

REPORT = ConversionReport(
    converter="fp8.grouped_experts",
    recipe="tokenwise",
    backend="reference",
    converted=tuple(
        ConvertedWeight(f"layers.{n}.moe.experts.{w}", (8, 352, 256) if w != "w2" else (8, 256, 352), "float32")
        for n in range(2, 5)
        for w in ("w1", "w2", "w3")
    ),
    skipped=(
        SkippedModule("layers.1.moe.experts", "experts in the first 2 layers (skip_first_layers)"),
        SkippedModule("output", "linear layers: not routed experts"),
    ),
)


def test_start_table_says_what_was_converted_and_what_not(make, capsys):
    make().model_parts = [model(REPORT)]
    out = capsys.readouterr().out
    assert "fp8.grouped_experts: 9 weights in FP8, recipe tokenwise, reference backend" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    # 3 layers x 2 weights x 8 x 352 x 256 x 4 bytes = 16.5 MiB; this model has none of them
    assert "layers.{2..4}.moe.experts.{w1,w3} 8 x 352 x 256 float32 16.5 MiB other ranks" in rows
    assert "layers.{2..4}.moe.experts.w2 8 x 256 x 352 float32 8.2 MiB other ranks" in rows
    assert "layers.1.moe.experts experts in the first 2 layers (skip_first_layers)" in rows


def test_start_table_of_a_bf16_run_says_so(make, capsys):
    make().model_parts = [model()]
    assert "No converter: every layer trains in the model's own precision." in capsys.readouterr().out


def test_one_rank_speaks(make, capsys, tmp_path):
    processor = make(rank=1)
    processor.model_parts = [model(REPORT)]
    train_step(processor, 1)
    processor.close()
    out = capsys.readouterr().out
    assert "weights in FP8" not in out
    assert "of 6 steps" not in out
    assert not (tmp_path / "run").exists()


def test_run_json_and_events(make, tmp_path):
    processor = make(model__converters=["fp8.grouped_experts"])
    processor.model_parts = [model(REPORT)]
    for step in range(1, STEPS + 1):
        train_step(processor, step)
    processor.log_validation(3.25, STEPS)
    processor.log_test(3.5, STEPS)
    processor.close()
    run = read_run(tmp_path / "run")
    assert run.series(TAGS["loss"]) == {1: 7.0, 2: 6.0, 4: 4.0, 6: 2.0}
    assert run.series(TAGS["val_loss"]) == {6: 3.25}
    assert run.series("validation_metrics/perplexity") == {6: pytest.approx(math.exp(3.25))}
    assert run.series(TAGS["test_loss"]) == {6: 3.5}
    assert run.series("test_metrics/perplexity") == {6: pytest.approx(math.exp(3.5))}
    results = run.info["results"]
    assert results["training"] == {"step": 6, "loss": 2.0, "perplexity": math.exp(2.0)}
    assert results["validation"] == {"step": 6, "loss": 3.25, "perplexity": math.exp(3.25)}
    assert results["test"] == {"step": 6, "loss": 3.5, "perplexity": math.exp(3.5)}
    assert (results["steps"], results["non_finite_step"]) == (6, None)
    assert run.info["seed"] == 3
    assert run.info["converters"] == ["fp8.grouped_experts"]
    assert run.info["data"]["global_batch_size"] == 8
    assert run.info["config"]["training"]["steps"] == STEPS
    assert run.info["versions"]["torchtitan"] == "0.2.2"
    assert run.info["mfu_peak"] is None
    json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)  # infinity is no JSON


def test_end_table(make, capsys, tmp_path, monkeypatch):
    clock = iter(float(n) for n in range(1000))
    monkeypatch.setattr("torchtitan.components.metrics.time.perf_counter", lambda: next(clock))
    processor = make()
    processor.model_parts = [model()]
    for step, tokens in zip(range(1, 7), (1, 100, 100, 500, 500, 300), strict=True):
        train_step(processor, step, tokens=tokens)
    processor.log_validation(3.25, 6)
    processor.log_test(3.5, 6)
    memory = processor.logger.peak_memory_gib
    processor.close()
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Trained 6 of 6 steps" in rows
    assert "training loss 2.00000 at step 6" in rows
    assert "validation loss 3.25000 at step 6, perplexity 25.7903" in rows
    assert "test loss 3.50000 at step 6, perplexity 33.1155" in rows
    assert "non-finite steps 0" in rows
    # the clock advances one second a look; steps 2, 4 and 6 logged 100, 600 and 800 tokens; step 1 is warm-up
    assert "tokens/s a device 600 (median)" in rows
    assert memory > 0.01
    assert f"peak memory a device {memory:.2f} GiB" in rows
    assert "MFU n/a (no known peak of this device)" in rows
    assert f"curves tensorboard --logdir {tmp_path / 'run' / 'tb'}" in rows
    assert f"compare python -m recipes.compare {tmp_path / 'run'} FP8_RUN" in rows


def test_a_run_that_never_logged_ends_cleanly(make, capsys):
    make().close()
    assert "Stopped after 0 of 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "bad_step", "noticed", "named"),
    [
        ({}, 4, 4, r"Step 4: loss is 4\.0, gradient norm nan"),
        ({}, 3, 4, r"Step 3: gradient norm is nan"),
        ({"metrics__log_freq": 100}, 6, 6, r"Step 6: loss is 2\.0, gradient norm nan"),  # the last step is logged
        ({"metrics__log_freq": 100, "checkpoint__enable": True, "checkpoint__interval": 3}, 3, 3, "Step 3: gradient"),
        ({"metrics__log_freq": 100, "checkpoint__enable": False, "checkpoint__interval": 3}, 3, 4, "Step 3: gradient"),
    ],
    ids=["logged", "between", "last", "checkpoint", "no checkpoint"],
)
def test_a_nan_gradient_ends_the_run_before_a_checkpoint(make, capsys, tmp_path, changes, bad_step, noticed, named):
    processor = make(**changes)
    processor.model_parts = [model()]
    for step in range(1, noticed):
        train_step(processor, step, bad=math.nan if step == bad_step else None)
    with pytest.raises(NonFiniteError, match=named + r".* 1 of 4 gradients .* reached is 0\.weight"):
        train_step(processor, noticed, bad=math.nan if noticed == bad_step else None)
    processor.close()
    assert dist_utils.clip_grad_norm_ is CLIP
    out = " ".join(capsys.readouterr().out.split())
    assert f"{noticed} of 6 steps" in out
    assert f"non-finite steps 1, step {bad_step}: the run stopped there" in out
    assert read_run(tmp_path / "run").series("non_finite_steps")[bad_step] == 1


def test_a_nan_loss_is_logged_and_ends_the_run(make, tmp_path, caplog):
    processor = make()
    processor.model_parts = [model()]
    train_step(processor, 1)
    with caplog.at_level(logging.INFO), pytest.raises(NonFiniteError, match="Step 2: loss is nan"):
        train_step(processor, 2, loss=math.nan)
    processor.close()
    assert "skipped: 0  non-finite: 1 (the run stops here)" in caplog.text
    run = read_run(tmp_path / "run")
    assert math.isnan(run.series(TAGS["loss"])[2])
    assert run.series("non_finite_steps") == {1: 0, 2: 1}
    assert run.info["results"]["training"] == {"step": 2, "loss": None, "perplexity": None}
    assert run.info["results"]["non_finite_step"] == 2


def test_a_nan_validation_loss_is_said(make, caplog):
    processor = make()
    with caplog.at_level(logging.ERROR):
        processor.log_validation(math.nan, 5)
    assert "Step 5: the validation loss is nan." in caplog.text


@pytest.mark.parametrize(
    ("flops", "device", "peak"),
    [
        (math.inf, "CPU", None),
        (312e12, "NVIDIA RTX 9000", None),  # torchtitan's answer for a device it does not know
        (312e12, "NVIDIA A100-SXM4-80GB", (312e12, "dense BF16 peak, FP8 or not")),
        (989e12, "NVIDIA H200", (989e12, "dense BF16 peak, FP8 or not")),
    ],
)
def test_mfu_has_a_named_peak_or_none(flops, device, peak):
    assert mfu_peak(flops, device) == peak


def test_mfu_of_a_known_device_names_its_peak(make, monkeypatch):
    monkeypatch.setattr("torchtitan.tools.utils.get_peak_flops", lambda name: 989e12)
    processor = make()
    processor.device_memory_monitor = SimpleNamespace(device_name="NVIDIA H200")
    processor.logger.mfus = [1.0, 30.0, 32.0, 34.0]
    assert processor._mfu() == "32.00 % of 989 TFLOP/s (dense BF16 peak, FP8 or not)"
