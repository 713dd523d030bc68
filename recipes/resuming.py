"""Can this run go on from the checkpoint that it finds in its folder?  Said before torch fails on a missing key.

torchtitan 0.2.2 saves the model alone after the last step (`checkpoint.last_save_model_only`), and the data's position
for each data-parallel rank. So a finished run cannot go on, and no run with another number of those ranks.
"""

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


def check_resumable(checkpointer: CheckpointManager, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Reads the names in the checkpoint that torchtitan is about to load; nothing to say without one.

    Raises:
        ValueError: it holds the model alone, or positions of another number of data-parallel ranks.
    """
    config = job_config.checkpoint
    if not checkpointer.enable or not Path(checkpointer.folder).is_dir():
        return
    step = checkpointer._find_load_step() if config.load_step == -1 else config.load_step
    path = Path(checkpointer._create_checkpoint_id(step))
    if step < 1 or not (path / ".metadata").is_file():
        return
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    if not any(name.startswith(("optimizer.", "train_state")) for name in names):
        raise ValueError(
            f"{path} holds the model alone, as torchtitan saves it after a run's last step: this run cannot go on from "
            "it. Take an earlier one with checkpoint.load_step, train in another job.dump_folder from these weights "
            "with checkpoint.initial_load_path, or save with checkpoint.last_save_model_only = false."
        )
    saved = sum(name.startswith("dataloader.dp_rank_") for name in names)
    ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    if saved and saved != ranks and "dataloader" not in config.exclude_from_loading:
        raise ValueError(
            f"{path} has the data's position for {saved} data-parallel ranks, and this run has {ranks}: keep their "
            "number, or begin with the data anew by checkpoint.exclude_from_loading = ['dataloader']."
        )
