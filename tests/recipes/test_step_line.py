"""The second line of a logged step, in the log and in TensorBoard."""

import logging
import re

import pytest
import torch

from recipes.runs import read_run
from tests.recipes.processors import make_fixture, model, train_step  # noqa: F401


def logged_lines(caplog) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()) for record in caplog.records]


def test_step_line_in_log_and_events(make, caplog, tmp_path, monkeypatch):
    now = 0.0
    processor = make(training__global_batch_size=24)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    processor.model_parts = [model()]
    with caplog.at_level(logging.INFO):
        for step in range(1, 5):
            now += 1
            train_step(processor, step, zeros=step)
    processor.close()
    lines = logged_lines(caplog)
    ours = [
        "step:  1  ms/step: 1,000.0  samples: 24  lr: 2.000e-03  batch: 24  zero grads: 1 (3.33%)  "
        "skipped: 0  non-finite: 0",
        "step:  2  ms/step: 1,000.0  samples: 48  lr: 4.000e-03  batch: 24  zero grads: 2 (6.67%)  "
        "skipped: 0  non-finite: 0",
        "step:  4  ms/step: 1,000.0  samples: 96  lr: 8.000e-03  batch: 24  zero grads: 4 (13.33%)  "
        "skipped: 0  non-finite: 0",
    ]
    steps = [i for i, line in enumerate(lines) if line.startswith("step:") and "tflops" in line]
    assert [lines[i + 1] for i in steps] == ours
    assert all(re.search(r"loss: +\d.*grad_norm:.*tflops: .*mfu", lines[i]) for i in steps)  # torchtitan's, intact
    run = read_run(tmp_path / "run")
    for tag, values in {
        "time_metrics/elapsed_per_step(ms)": [1000, 1000, 1000],
        "n_samples_seen": [24, 48, 96],
        "global_batch_size": [24, 24, 24],
        "zero_gradients": [1, 2, 4],
        "skipped_steps": [0, 0, 0],
        "non_finite_steps": [0, 0, 0],
        "lr": [pytest.approx(0.002), pytest.approx(0.004), pytest.approx(0.008)],
    }.items():
        assert list(run.series(tag).values()) == values, tag


def test_time_of_a_step_leaves_out_validation_and_counts_the_steps_after_it(make, caplog, monkeypatch):
    now = 0.0
    processor = make(metrics__log_freq=4)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    processor.model_parts = [model()]
    with caplog.at_level(logging.INFO):
        for step in range(1, 9):
            now += step  # step 3 takes three seconds
            train_step(processor, step)
            if step == 6:
                now += 100
                processor.log_validation(3.0, step)
    times = [found[1] for line in logged_lines(caplog) if (found := re.search(r"ms/step: ([\d,.]+)", line))]
    assert times == ["1,000.0", "3,000.0", "5,500.0", "7,500.0"]  # 1; mean of 2, 3, 4; of 5, 6 (the last); of 7, 8


def test_a_resumed_run_counts_from_where_it_is(make, caplog):
    processor = make()
    processor.model_parts = [model()]
    with caplog.at_level(logging.INFO):
        train_step(processor, 4, zeros=3)
    assert "samples: 32 " in caplog.text  # 4 steps of 8
    assert "zero grads: 3 (10.00%)" in caplog.text


def test_zeros_are_counted_at_logged_steps_only(make, monkeypatch):
    counted = []
    monkeypatch.setattr("recipes.finite.count_zeros", lambda grads, owns_plain: counted.append(1) or torch.zeros(2))
    processor = make(metrics__log_freq=3)
    processor.model_parts = [model()]
    seen = []
    for step in range(1, 7):
        train_step(processor, step)
        seen.append(len(counted))
    assert seen == [1, 1, 2, 2, 2, 3]
