"""torchtitan alone, without this project's converters and recipes: `python stock.py CHECKPOINT FOLDER`.

Loads a full checkpoint, writes its weights to FOLDER/loaded.pt, trains one step, saves FOLDER/checkpoint/step-4.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.device import prepare_device

prepare_device()  # torchtitan needs it on any CPU

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.llama4 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402


class TrainState:
    """Of torchtitan's trainer: the step."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 4, "ntokens_seen": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def model_args() -> TransformerModelArgs:
    """`four_experts` of rows.py in torchtitan's own words."""
    return TransformerModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=96,
        multiple_of=16,
        ffn_dim_multiplier=1.5,
        max_seq_len=32,
        interleave_moe_layer_step=1,
        moe_args=MoEArgs(num_experts=4, top_k=2),
    )


def main(checkpoint: str, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec, config, args = get_train_spec(), JobConfig(), model_args()
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    config.checkpoint.enable, config.checkpoint.initial_load_path = True, checkpoint
    config.checkpoint.initial_load_model_only = False
    config.checkpoint.exclude_from_loading = ["dataloader"]
    config.checkpoint.interval = 4
    model = spec.model_cls(args)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    schedulers = build_lr_schedulers(optimizers, config.lr_scheduler, 10)
    manager = CheckpointManager(
        None, [model], optimizers, schedulers, {"train_state": TrainState()}, config.checkpoint, None, folder
    )
    assert manager.load()
    torch.save(model.state_dict(), Path(folder) / "loaded.pt")
    tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(0))
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizers.step()
    torch.save(model.state_dict(), Path(folder) / "stepped.pt")
    del manager.states["dataloader"]
    manager.save(4)
    ours = [name for name in sys.modules if name.split(".")[0] in ("converters", "recipes")]
    assert not ours, ours


if __name__ == "__main__":
    main(*sys.argv[1:])
