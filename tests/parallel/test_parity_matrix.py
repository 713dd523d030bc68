"""Every layout trains as one process does: five steps from one seed checkpoint, on the same global batches.

Three runs of each layout. `high`: no converter, float32 all through (torchtitan's loop over experts; its grouped GEMM
rounds to BF16). `fp8`: FP8 experts, both wires in high precision. `wires`: FP8 all-gather and FP8 dispatch on top.
Numbers reached on a CPU, torch 2.13: `high` 2e-7; `fp8` 6e-4, and in the first step 9e-6 (tensor parallelism: with the
scale of half a weight something else is subnormal).

`high` differs from one process in the order of sums only. So does `fp8`, but where a sum lands across a rounding
boundary of FP8, or a token across the router's, a value moves by a step of FP8, and training amplifies it. Before the
first update nothing has been amplified.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers import distributed
from tests.parallel.matrix import Curve, make_seed_checkpoint, train
from tests.parallel.rows import MODELS, Row

HIGH, FP8, FP8_FIRST_STEP = 1e-5, 1e-3, 2e-5


def pipeline(schedule: str, micro_batch: int = 2, **row: Any) -> Row:
    return Row(pp=2, **row).but(
        parallelism__pipeline_parallel_schedule=schedule,
        parallelism__pipeline_parallel_microbatch_size=micro_batch,
        # torchtitan overlaps stages on CUDA streams, with or without expert parallelism: not on a CPU.
        parallelism__pipeline_parallel_expert_parallel_overlap=False,
    )


LAYOUTS = {
    "fsdp2": Row(shard=2),
    "fsdp2_ep2": Row(shard=2, ep=2),
    "ddp2": Row(replicate=2),
    "tp2": Row(tp=2),
    "tp2_ep2_etp1": Row(tp=2, ep=2),
    "cp2": Row(cp=2),
    "cp2_ep2": Row(cp=2, ep=2),
    "pp2_1f1b": pipeline("1F1B"),
    "pp2_interleaved": pipeline("Interleaved1F1B"),
    "pp2_zero_bubble": pipeline("InterleavedZeroBubble"),
    "pp2_zbv": pipeline("ZBVZeroBubble"),
    "pp2_dual_pipe": pipeline("DualPipeV", micro_batch=1),
    "fsdp4_ep2": Row(shard=4, ep=2),
    "ep4": Row(shard=4, ep=4),
    "hsdp": Row(replicate=2, shard=2),
    "hsdp_ep2": Row(replicate=2, shard=2, ep=2),
    "tp2_fsdp2": Row(tp=2, shard=2),
    "tp2_fsdp2_ep2_etp1": Row(tp=2, shard=2, ep=2),
    "tp2_fsdp2_ep2_etp2": Row(tp=2, shard=2, ep=2, etp=2),
    "tp2_fsdp2_ep4_etp1": Row(tp=2, shard=2, ep=4),
    "cp2_fsdp2_ep4": Row(cp=2, shard=2, ep=4),
    "pp2_tp2": pipeline("1F1B", tp=2),
    "pp2_fsdp2_ep2": pipeline("1F1B", shard=2, ep=2),
    "pp2_fsdp2_ep2_zero_bubble": pipeline("InterleavedZeroBubble", shard=2, ep=2),
    "fsdp2_three": Row(shard=2, model="three_experts"),
    "fsdp4_three": Row(shard=4, model="three_experts"),
    "fsdp4_ep2_two": Row(shard=4, ep=2, model="two_experts"),
    "fsdp2_ep2_dense_first": Row(shard=2, ep=2, model="dense_first"),
    "pp2_dense_first": pipeline("1F1B", model="dense_first"),
}
NO_WIRES = {"fsdp_fp8_all_gather": "off", "ep_fp8_dispatch": "off"}
WIRES = {"fsdp_fp8_all_gather": "on", "ep_fp8_dispatch": "on"}


def variants(layout: str) -> dict[str, Row]:
    row = LAYOUTS[layout]
    rows = {f"{layout}/high": row, f"{layout}/fp8": row.with_fp8(**NO_WIRES)}
    if row.shard * row.cp * row.ep > 1:
        rows[f"{layout}/wires"] = row.with_fp8(**WIRES)
    return rows


ONE = Row().with_fp8()
ACCUMULATED = ONE.but(training__local_batch_size=2)
SHARDED = Row(shard=2, ep=2).with_fp8(**WIRES)
RECOMPUTE = {
    "full": {"activation_checkpoint__mode": "full"},
    "selective_op": {
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    },
    "selective_layer": {
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "1",
    },
}
UNCLIPPED = {"training__max_norm": 1e9}  # clipping scales by a norm, which a layout may sum in another order
ROWS: dict[str, Row] = {
    **{f"one_{model}/high": Row(model=model) for model in MODELS},
    **{f"one_{model}/fp8": Row(model=model).with_fp8() for model in MODELS},
    "one/accumulated": ACCUMULATED,
    "one/accumulated_uncached": ACCUMULATED.with_fp8(cache=False),
    "one/accumulated_unclipped": ACCUMULATED.but(**UNCLIPPED),
    "pp2_1f1b/unclipped": LAYOUTS["pp2_1f1b"].with_fp8().but(**UNCLIPPED),
    "fsdp2/accumulated": Row(shard=2).with_fp8(**WIRES).but(training__local_batch_size=1),
    "ddp2/accumulated_high": Row(replicate=2).but(training__local_batch_size=1),
    "fsdp2_ep2/always_resharded": SHARDED.but(parallelism__fsdp_reshard_after_forward="always"),
    "fsdp2_ep2/never_resharded": SHARDED.but(parallelism__fsdp_reshard_after_forward="never"),
    "fsdp2/high_unclipped": Row(shard=2).but(**UNCLIPPED),
    "ddp2/high_unclipped": Row(replicate=2).but(**UNCLIPPED),
    "fsdp2/unclipped": Row(shard=2).with_fp8(**WIRES).but(**UNCLIPPED),
    "fsdp2/foreach": Row(shard=2).with_fp8(**WIRES).but(optimizer__implementation="foreach"),
    "fsdp2/for-loop": Row(shard=2).with_fp8(**WIRES).but(optimizer__implementation="for-loop"),
    "fsdp2/step_in_backward": Row(shard=2).with_fp8(**WIRES).but(**UNCLIPPED, optimizer__early_step_in_backward=True),
    **{f"one/recomputed_{name}": ONE.but(**how) for name, how in RECOMPUTE.items()},
    **{f"fsdp2_ep2/recomputed_{name}": SHARDED.but(**how) for name, how in RECOMPUTE.items()},
    **{name: row for layout in LAYOUTS for name, row in variants(layout).items()},
}

FP8_ROWS = ("fp8", "wires", "accumulated", "foreach", "for-loop")

# Pairs with the same arithmetic in the same order, so the same bits, and why.
SAME_BITS = {
    # Scales are powers of two that all ranks agree on: a shard quantized before the gather is the part of the gathered
    # weight quantized after it. A row has one scale, so it is the same bytes before or after the all-to-all.
    **{f"{name}/wires": f"{name}/fp8" for name in LAYOUTS if f"{name}/wires" in ROWS},
    # Recomputation quantizes the same rows with the same weights.
    **{f"one/recomputed_{name}": "one_four_experts/fp8" for name in RECOMPUTE},
    **{f"fsdp2_ep2/recomputed_{name}": "fsdp2_ep2/wires" for name in RECOMPUTE},
    "fsdp2_ep2/always_resharded": "fsdp2_ep2/wires",
    "fsdp2_ep2/never_resharded": "fsdp2_ep2/wires",
    # What the cache keeps is what would be computed again (TransformerEngine#1047: a stale scale beside fresh data).
    "one/accumulated_uncached": "one/accumulated",
}
# Losses only: the gradients are the same, and their norms are summed in another order.
SAME_LOSSES = {
    # A pipeline accumulates the micro-batches' gradients in their order; 1 / tokens is a power of two.
    "pp2_1f1b/unclipped": "one/accumulated_unclipped",
    # Two ranks' gradients have one sum, and DDP's division by two is exact.
    "ddp2/high_unclipped": "fsdp2/high_unclipped",
    # Each parameter's step as soon as its gradient is there; then no gradient is left to take a norm of.
    "fsdp2/step_in_backward": "fsdp2/unclipped",
}


def run_rows(world_size: int, folder: str) -> None:
    """Trains the rows of this size and appends their curves, or what went wrong, to one file."""
    where = Path(folder)
    if world_size == 1:
        for model in MODELS:
            make_seed_checkpoint(model, where / model)
    for name, row in ROWS.items():
        if row.world_size == world_size:
            curve = train(row, where / row.model / "checkpoint" / "step-0", where / "run")
            if dist.get_rank() == 0:
                with (where / "curves.jsonl").open("a") as f:
                    f.write(json.dumps([name, curve]) + "\n")


@distributed(1, timeout_s=240)
def one_process(folder: str) -> None:
    run_rows(1, folder)


@distributed(2, timeout_s=300)
def two_processes(folder: str) -> None:
    run_rows(2, folder)


@distributed(4, timeout_s=420)
def four_processes(folder: str) -> None:
    run_rows(4, folder)


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve | str]:
    """The curve of each row. Processes start once a size; a row that fails takes the rest of its size with it."""
    folder = tmp_path_factory.mktemp("matrix")
    found: dict[str, Curve | str] = {}
    for size, run in {1: one_process, 2: two_processes, 4: four_processes}.items():
        error = "no curve"
        try:
            run(str(folder))
        except AssertionError as e:
            error = str(e)
        found |= {name: error for name, row in ROWS.items() if row.world_size == size}
        found |= dict(map(json.loads, (folder / "curves.jsonl").read_text().splitlines()))
    return found


def curve_of(curves: dict[str, Curve | str], name: str) -> Curve:
    curve = curves[name]
    if isinstance(curve, str):
        pytest.fail(f"{name} did not run:\n{curve}", pytrace=False)
    return curve


def one_process_of(name: str, precision: str) -> str:
    return f"one_{ROWS[name].model}/{precision}"


def distance(actual: Curve, expected: Curve) -> float:
    """The largest relative difference of a loss or a gradient norm."""
    steps = [(x, y) for a, b in zip(actual, expected, strict=True) for x, y in zip(a, b, strict=True)]
    return max(abs(x - y) / abs(y) for x, y in steps)


@pytest.mark.parametrize("name", [n for n in ROWS if n.endswith("high")])
def test_high_precision_equals_one_process(name: str, curves: dict) -> None:
    assert distance(curve_of(curves, name), curve_of(curves, one_process_of(name, "high"))) <= HIGH


@pytest.mark.parametrize(
    "name", [n for n in ROWS if n.endswith(("/fp8", "/wires", "/accumulated", "/foreach", "/for-loop"))]
)
def test_fp8_equals_one_process(name: str, curves: dict) -> None:
    actual, expected = curve_of(curves, name), curve_of(curves, one_process_of(name, "fp8"))
    assert distance(actual[:1], expected[:1]) <= FP8_FIRST_STEP
    assert distance(actual, expected) <= FP8


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_arithmetic_gives_the_same_bits(name: str, curves: dict) -> None:
    assert curve_of(curves, name) == curve_of(curves, SAME_BITS[name])


@pytest.mark.parametrize("name", SAME_LOSSES)
def test_same_gradients_give_the_same_losses(name: str, curves: dict) -> None:
    losses = [[loss for loss, _ in curve_of(curves, n)] for n in (name, SAME_LOSSES[name])]
    assert losses[0] == losses[1]


def test_the_matrix_tells_precisions_and_steps_apart(curves: dict) -> None:
    """FP8 moves every step by far more than a layout may, the loss falls, and clipping is at work (norm above 1)."""
    high, fp8 = (curve_of(curves, f"one_four_experts/{p}") for p in ("high", "fp8"))
    assert all(distance([a], [b]) > 10 * HIGH for a, b in zip(fp8, high, strict=True))
    assert fp8[-1][0] < fp8[0][0] - 0.5
    assert all(norm > 1.1 for _, norm in fp8)
