"""Delayed scaling and checkpoints of runs that had none: they load, and its state begins as in a new run.

The other way round nothing is to be done: torch's distributed checkpoint reads what a model asks for. Only histories of
another length are refused, and here in one sentence.
"""

import functools
import logging
import re
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import CheckpointManager

logger = logging.getLogger(__name__)
_STATE = re.compile(r"(.*\.)?delayed\.(fwd|bwd)\.(amax_history|multiplier)")


def is_state(name: str) -> bool:
    """Whether an entry of a state dict is delayed scaling's."""
    return _STATE.fullmatch(name) is not None


def loadable(state_dict: dict[str, Any], checkpoint: str) -> dict[str, Any]:
    """What of `state_dict` the checkpoint (a folder) can fill: all of it but states of delayed scaling that it lacks.

    Raises:
        ValueError: it has a history of another length.
    """
    asked = [name for name in state_dict if is_state(name)]
    if not asked:
        return state_dict
    there = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    missing = {name for name in asked if name not in there}
    for name in asked:
        if name not in missing and there[name].size != state_dict[name].shape:
            raise ValueError(
                f"{name} is {list(there[name].size)} in {checkpoint} and {list(state_dict[name].shape)} in this run: "
                "set [fp8.delayed] amax_history_len to the first number, and take the same [fp8] sections."
            )
    if missing:
        logger.warning(
            "%s has no state of delayed scaling for %d of %d entries: those operands start as in a new run.",
            checkpoint,
            len(missing),
            len(asked),
        )
    return {name: value for name, value in state_dict.items() if name not in missing}


def let_checkpoints_lack_state() -> None:
    """Teaches torchtitan's CheckpointManager to load such checkpoints. Idempotent."""
    load = CheckpointManager.dcp_load
    if hasattr(load, "lets_state_lack"):
        return

    @functools.wraps(load)
    def dcp_load(self: CheckpointManager, state_dict: dict, checkpoint_id: str, from_hf: bool, **options: Any) -> None:
        if not from_hf:  # an adapter leaves these entries out
            state_dict = loadable(state_dict, checkpoint_id)
        load(self, state_dict, checkpoint_id=checkpoint_id, from_hf=from_hf, **options)

    dcp_load.lets_state_lack = True
    CheckpointManager.dcp_load = dcp_load
