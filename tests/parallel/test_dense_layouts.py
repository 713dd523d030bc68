"""Dense layers in FP8, beside FP8 experts, train in every layout as one process does (see test_parity_matrix.py).

Numbers reached on a CPU, torch 2.13: 2e-7 in data parallelism and in pipelines; with context or tensor parallelism 2e-6
in the first step and 2e-3 after five (under tensor parallelism a rank's part of a weight has a scale of its own).
"""

import json
from pathlib import Path

import pytest

from tests.helpers import distributed
from tests.parallel.layouts import COMPILE, NO_WIRES, RECOMPUTE, WIRES, pipeline
from tests.parallel.matrix import Curve, train_rows
from tests.parallel.rows import Row
from tests.parallel.test_parity_matrix import FP8_FIRST_STEP, distance

STEPS, FP8 = 3, 4e-3
OFF, ON = {"fsdp_fp8_all_gather": "off"}, {"fsdp_fp8_all_gather": "on"}
DENSE, MIXTRAL = {"model": "dense_first", "steps": STEPS}, {"model": "mixtral", "steps": STEPS}


def plain_wires(row: Row) -> Row:
    return row.with_fp8(**NO_WIRES).with_dense(**OFF)


def fp8_wires(row: Row) -> Row:
    return row.with_fp8(**WIRES).with_dense(**ON)


ONE = plain_wires(Row(**DENSE))
ROWS: dict[str, Row] = {
    "one_dense_first/experts": Row(**DENSE).with_fp8(**NO_WIRES),
    "one_dense_first/fp8": ONE,
    "one_mixtral/fp8": plain_wires(Row(**MIXTRAL)),
    "one/accumulated": ONE.but(training__local_batch_size=2),
    "one/compiled": ONE.but(**COMPILE),
    "one/recomputed_full": ONE.but(**RECOMPUTE["full"]),
    "one/recomputed_selective_op": ONE.but(**RECOMPUTE["selective_op"]),
    "fsdp2/fp8": plain_wires(Row(shard=2, **DENSE)),
    "fsdp2/wires": fp8_wires(Row(shard=2, **DENSE)),
    "fsdp2/compiled": fp8_wires(Row(shard=2, **DENSE)).but(**COMPILE, **RECOMPUTE["selective_op"]),
    "fsdp2/accumulated": fp8_wires(Row(shard=2, **DENSE)).but(training__local_batch_size=1),
    "fsdp2_ep2/wires": fp8_wires(Row(shard=2, ep=2, **DENSE)),
    "fsdp2_mixtral/wires": fp8_wires(Row(shard=2, **MIXTRAL)),
    "ddp2/fp8": plain_wires(Row(replicate=2, **DENSE)),
    "cp2/wires": fp8_wires(Row(cp=2, **DENSE)),
    "pp2/fp8": plain_wires(pipeline("1F1B", **DENSE)),
    "tp2/fp8": plain_wires(Row(tp=2, **DENSE)),
    "tp2/compiled": plain_wires(Row(tp=2, **DENSE)).but(**COMPILE),
    "tp2_ep2_etp1/fp8": plain_wires(Row(tp=2, ep=2, **DENSE)),
}
# Scales are powers of two that all ranks agree on; recomputation quantizes the same rows with the same weights.
SAME_BITS = {
    "fsdp2/wires": "fsdp2/fp8",
    "one/recomputed_full": "one_dense_first/fp8",
    "one/recomputed_selective_op": "one_dense_first/fp8",
}


@distributed(1, timeout_s=180)
def one_process(folder: str) -> None:
    train_rows(ROWS, 1, Path(folder))


@distributed(2, timeout_s=240)
def two_processes(folder: str) -> None:
    train_rows(ROWS, 2, Path(folder))


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    folder = tmp_path_factory.mktemp("dense")
    one_process(str(folder))
    two_processes(str(folder))
    return dict(map(json.loads, (folder / "curves.jsonl").read_text().splitlines()))


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("one_")])
def test_a_layout_equals_one_process(name: str, curves: dict) -> None:
    """Case 33 among them: gradients accumulated over micro-batches equal those of one batch."""
    actual, expected = curves[name], curves[f"one_{ROWS[name].model}/fp8"]
    assert distance(actual[:1], expected[:1]) <= FP8_FIRST_STEP
    assert distance(actual, expected) <= FP8


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_arithmetic_gives_the_same_bits(name: str, curves: dict) -> None:
    assert curves[name] == curves[SAME_BITS[name]]


def test_dense_layers_are_in_fp8(curves: dict) -> None:
    """They move the loss by far more than a layout may, and training moves it down."""
    experts, fp8 = curves["one_dense_first/experts"], curves["one_dense_first/fp8"]
    assert distance(fp8[:1], experts[:1]) > 20 * FP8_FIRST_STEP
    assert fp8[-1][0] < fp8[0][0] - 0.01
