"""Is an exception a mistake of the user's, and which of several ranks says so?

What the user can put right, this repository raises as a ValueError or TypeError: one sentence of value, rule and
remedy, which a traceback above it only hides. Anything else is a bug and keeps its traceback: other exceptions, what
others raise (torch's ValueErrors, a plug-in's), what Python raises in lines of ours that have no `raise` (`int("a")`,
`zip(strict=True)`), and what a layer raises while it computes.
"""

import dis
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

OURS = ("recipes.", "converters.", "parallel.")
COMPUTES = ("torch.nn.modules.module", "torch.autograd.graph")  # between the trainer's lines and a layer's
RAISE = dis.opmap["RAISE_VARARGS"]
PATIENCE = timedelta(seconds=20)  # ranks that start on two busy cores are seconds apart


def sentence_of(error: BaseException) -> str | None:
    """What a user error says; None for any other exception."""
    modules, last, entry = [""], None, error.__traceback__
    while entry is not None:
        modules.append(entry.tb_frame.f_globals.get("__name__", ""))
        last, entry = entry, entry.tb_next
    if not isinstance(error, ValueError | TypeError) or not modules[-1].startswith(OURS):
        return None
    if last.tb_frame.f_code.co_code[last.tb_lasti] != RAISE or any(name in COMPUTES for name in modules):
        return None
    return str(error) or None


def tell_torchrun(sentence: str) -> None:
    """torchrun's summary quotes it in place of the traceback that torchtitan's trainer has left there for it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": shown}}))


def speaks(sentence: str) -> bool:
    """Whether this rank says it: rank 0 does, any other unless rank 0 says the same within PATIENCE.

    They meet in torchrun's store, which outlives them. Ranks of another launcher all speak.
    """
    env = os.environ
    if env["WORLD_SIZE"] == "1" or env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    attempt, said = env.get("TORCHELASTIC_RESTART_COUNT", "0"), hashlib.sha256(sentence.encode()).hexdigest()
    try:
        store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=PATIENCE)
        if env["RANK"] == "0":
            store.set(f"titan_moe_fp8/said/{attempt}/{said}", "")
        else:
            store.wait([f"titan_moe_fp8/said/{attempt}/{said}"], PATIENCE)
    except dist.DistError:  # rank 0 has not said it, or nobody is there to ask
        return True
    return env["RANK"] == "0"
