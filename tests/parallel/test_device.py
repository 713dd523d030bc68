"""Each row of the table in parallel/device.py, in processes of its own: it changes torch and torchtitan."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["early", "late"])
def facts(request: pytest.FixtureRequest) -> dict:
    """What a process finds, where torchtitan was imported after prepare_device, or before: it copies names by value."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parallel.device_facts", request.param]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_device_type_is_cpu_in_every_module_that_copied_it(facts: dict) -> None:
    assert facts["returned"] == ["cpu", "cpu"]
    assert facts["device_types"] == ["cpu"]
    assert facts["copies"] >= 3
    assert facts["name"].startswith("CPU (")


def test_a_second_call_changes_nothing(facts: dict) -> None:
    assert facts["idempotent"]


def test_nothing_changes_where_there_is_an_accelerator(facts: dict) -> None:
    assert facts["accelerator"] == {"returned": "cuda", "untouched": True}


def test_memory_statistics_are_those_of_the_process(facts: dict) -> None:
    memory = facts["memory"]
    assert memory["resident"] > 0.1  # GiB; torch alone takes more
    assert memory["resident"] + 0.9 * memory["block"] < memory["after"] < memory["capacity"]
    assert memory["percent"] == pytest.approx(100 * memory["after"] / memory["capacity"])
    assert memory["retries"] == 0


def test_no_lspci_and_no_invented_peak(facts: dict) -> None:
    """Had a process been started, there would be no facts; an infinite peak shows as an MFU of 0."""
    assert facts["peak_flops"] == math.inf


def test_only_the_capability_of_grouped_gemms_is_granted(facts: dict) -> None:
    assert facts["capabilities"] == [False, True, False]


def test_histc_counts_integers_and_leaves_the_rest_alone(facts: dict) -> None:
    assert facts["histc"] == {
        "int64": [2, 1, 0, 3, 0],
        "dtype": "torch.int64",
        "empty": [0, 0],
        "floats_as_before": True,
        "defaults_as_before": True,
    }


def test_permute_indices_are_those_of_the_triton_kernel(facts: dict) -> None:
    """Rows 0-3 and 6 go to expert 0, rows 4-5 and 7-9 to expert 1; -1 is padding; 4 rows of the 20 are over."""
    indices, sizes, offsets = facts["permutation"]
    assert indices == [0, 1, 2, 3, 6, -1, -1, -1, 4, 5, 7, 8, 9, -1, -1, -1, -1, -1, -1, -1]
    assert sizes == [8, 8]
    assert offsets[-2:] == [8, 16]


def test_the_moe_layer_runs_on_grouped_mm(facts: dict) -> None:
    assert facts["moe"] == {"grouped_mm": True, "finite": True}


def test_every_rank_uses_the_one_cpu_and_barriers_take_device_ids(facts: dict) -> None:
    assert facts["local_rank"] == "0"
    assert facts["tensor_device"] == "cpu"
    assert facts["barrier"]
