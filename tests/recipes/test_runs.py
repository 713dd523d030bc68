"""Reading runs that were resumed, trained anew, or logged by several ranks."""

from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter
from torchtitan.config import JobConfig

from recipes.run_info import config_differences
from recipes.runs import RunError, read_run


def write(folder: Path, values: dict[int, float], tag: str = "grad_norm") -> None:
    writer = SummaryWriter(str(folder))
    for step, value in values.items():
        writer.add_scalar(tag, value, step)
    writer.close()


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    write(tmp_path / "tb" / "20260101-1000", {1: 1.0, 10: 1.0, 20: 1.0, 30: 1.0, 40: 1.0})
    write(tmp_path / "tb" / "20260101-1100", {20: 2.0, 30: 2.0})
    assert read_run(tmp_path).series("grad_norm") == {1: 1.0, 10: 1.0, 20: 2.0, 30: 2.0}


def test_starts_are_ordered_by_time_and_not_by_name(tmp_path):
    write(tmp_path / "tb" / "z", {1: 1.0, 10: 1.0})
    write(tmp_path / "tb" / "a", {10: 2.0})
    assert read_run(tmp_path).series("grad_norm") == {1: 1.0, 10: 2.0}


def test_two_starts_in_one_minute_share_a_folder(tmp_path):
    write(tmp_path / "tb" / "a", {1: 1.0, 10: 1.0, 20: 1.0})
    write(tmp_path / "tb" / "a", {1: 2.0, 10: 2.0})
    assert read_run(tmp_path).series("grad_norm") == {1: 2.0, 10: 2.0}


def test_a_start_that_logged_nothing_replaces_nothing(tmp_path):
    write(tmp_path / "tb" / "a", {1: 1.0})
    write(tmp_path / "tb" / "b", {})
    assert read_run(tmp_path).series("grad_norm") == {1: 1.0}


def test_within_a_start_the_later_event_wins(tmp_path):
    writer = SummaryWriter(str(tmp_path / "tb" / "a"))
    for value in (1.0, 2.0):
        writer.add_scalar("grad_norm", value, 10)
    writer.close()
    assert read_run(tmp_path).series("grad_norm") == {10: 2.0}


@pytest.mark.parametrize("metrics_rank", [0, 1])
def test_one_rank_is_read_where_all_ranks_logged(tmp_path, metrics_rank):
    for rank in (0, 1):
        write(tmp_path / "tb" / "a" / f"rank_{rank}", {1: float(rank)})
    (tmp_path / "run.json").write_text(f'{{"schema": 1, "metrics_rank": {metrics_rank}}}')
    assert read_run(tmp_path).series("grad_norm") == {1: float(metrics_rank)}


def test_the_tensorboard_folder_names_its_run(tmp_path):
    write(tmp_path / "run" / "tb" / "a", {1: 1.0})
    (tmp_path / "run" / "run.json").write_text('{"schema": 1}')
    run = read_run(tmp_path / "run" / "tb")
    assert run.label == "run"
    assert run.info == {"schema": 1}
    assert read_run(tmp_path / "run" / "tb" / "a").label == "run"


def test_both_spellings_of_a_scalar_are_read(tmp_path):
    writer = SummaryWriter(str(tmp_path / "tb" / "a"))
    writer.add_scalar("grad_norm", 0.5, 1, new_style=True)
    writer.add_scalar("grad_norm", 0.25, 2, new_style=False)
    writer.close()
    assert read_run(tmp_path).series("grad_norm") == {1: 0.5, 2: 0.25}


def test_files_without_a_scalar_and_strange_run_files_are_errors(tmp_path):
    write(tmp_path / "tb" / "a", {})
    with pytest.raises(RunError, match="no scalar in them yet"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 2}')
    with pytest.raises(RunError, match="is not of schema 1"):
        read_run(tmp_path)


def test_values_are_the_float32_of_the_events(tmp_path):
    write(tmp_path / "tb" / "a", {1: 1 / 3})
    assert read_run(tmp_path).series("grad_norm") == {1: float(np.float32(1 / 3))}


def test_config_differences_leave_out_where_a_run_writes():
    a, b = JobConfig().to_dict(), JobConfig().to_dict()
    b["job"]["dump_folder"], b["metrics"]["log_freq"], b["optimizer"]["lr"] = "other", 1, 1.0
    assert config_differences(a, b) == {"optimizer.lr": (8e-4, 1.0)}
