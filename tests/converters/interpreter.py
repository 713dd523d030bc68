"""Checks that run in Triton's interpreter: a script of functions `check_...`, in a process of its own.

The interpreter is switched on by TRITON_INTERPRET=1 when triton is imported, for all kernels of the process, so these
checks cannot share one with other tests. A script ends with `run_checks(globals())`, a test reads it with `run_script`.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from packaging.version import Version

ROOT = Path(__file__).parents[2]

needs_interpreter = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7"), reason="the interpreter of triton 3.6 takes no tensor as a loop bound"
)


def run_checks(script: dict[str, Any]) -> None:
    """Runs every check of a script's globals; prints one JSON object, check -> "" or what is wrong."""
    found = {}
    for name, check in [(k[6:], v) for k, v in script.items() if k.startswith("check_")]:
        torch.manual_seed(0)
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


def check_names(script: Path) -> list[str]:
    """Of the checks in a script, without running it."""
    return [line[10:-11] for line in script.read_text().splitlines() if line.startswith("def check_")]


def run_script(script: Path) -> dict[str, str]:
    """What `run_checks` printed in a process with the interpreter."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(script)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])
