"""A checkpoint from which a run cannot go on is named, with what to do, before torch misses a key."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager

from recipes.resuming import check_resumable
from tests.converters.test_conversion import job

MODEL = {"output.weight": torch.zeros(2)}
FULL = MODEL | {"optimizer.state.output.weight.exp_avg": torch.zeros(2), "train_state": b"1"}


class Unbuilt(CheckpointManager):
    """torchtitan's, without its states."""

    def __init__(self, folder: Path) -> None:
        self.enable, self.folder = True, str(folder)

    def close(self) -> None:
        pass


def manager(folder: Path, **steps: dict) -> CheckpointManager:
    """steps: step_N = what is saved there."""
    found = Unbuilt(folder / "checkpoint")
    for name, state in steps.items():
        dcp.save(state, checkpoint_id=folder / "checkpoint" / name.replace("_", "-"), no_dist=True)
    return found


def loaders(ranks: int) -> dict:
    return {f"dataloader.dp_rank_{rank}": b"position" for rank in range(ranks)}


def check(found: CheckpointManager, *, ranks: int = 1, load_step: int = -1, exclude: tuple[str, ...] = ()) -> None:
    job_config = job()
    job_config.checkpoint.load_step, job_config.checkpoint.exclude_from_loading = load_step, list(exclude)
    check_resumable(found, job_config, SimpleNamespace(dp_replicate=1, dp_shard=ranks))


def test_a_finished_run_does_not_go_on_but_its_earlier_steps_do(tmp_path: Path) -> None:
    found = manager(tmp_path, step_2=FULL | loaders(1), step_4=MODEL)
    with pytest.raises(ValueError, match=r"step-4 holds the model alone.*checkpoint\.load_step.*last_save_model_only"):
        check(found)
    check(found, load_step=2)


@pytest.mark.parametrize(("saved", "ranks"), [(1, 2), (4, 2)])
def test_another_number_of_data_parallel_ranks_needs_the_data_anew(tmp_path: Path, saved: int, ranks: int) -> None:
    found = manager(tmp_path, step_2=FULL | loaders(saved))
    with pytest.raises(ValueError, match=rf"for {saved} data-parallel ranks, and this run has {ranks}: .*'dataloader'"):
        check(found, ranks=ranks)
    check(found, ranks=ranks, exclude=("dataloader",))
    check(found, ranks=saved)


def test_nothing_to_say_without_a_checkpoint_or_about_a_seed(tmp_path: Path) -> None:
    check(manager(tmp_path / "none"))
    check(manager(tmp_path / "seed", step_0=MODEL))
