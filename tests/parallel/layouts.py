"""The rows of the parity matrix by name, `LAYOUT/VARIANT`, and which of them must agree to the bit."""

import re
from typing import Any

from parallel.pipeline import splits_backward
from tests.parallel.rows import MODELS, Row


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
    "ddp2_mixtral": Row(replicate=2, model="mixtral"),
    "fsdp2_ep2_mixtral": Row(shard=2, ep=2, model="mixtral"),
    "tp2_mixtral": Row(tp=2, model="mixtral"),
    "tp2_ep2_etp1_mixtral": Row(tp=2, ep=2, model="mixtral"),
    "cp2_mixtral": Row(cp=2, model="mixtral"),
    "pp2_mixtral": pipeline("1F1B", model="mixtral"),
    "tp2_fsdp2_ep2_etp2_mixtral": Row(tp=2, shard=2, ep=2, etp=2, model="mixtral"),
}
if not splits_backward():
    LAYOUTS = {name: row for name, row in LAYOUTS.items() if not re.search("zero_bubble|zbv|dual_pipe", name)}
NO_WIRES = {"fsdp_fp8_all_gather": "off", "ep_fp8_dispatch": "off"}
GATHER = {"fsdp_fp8_all_gather": "on", "ep_fp8_dispatch": "off"}
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
# Traced through AOT autograd, and not compiled further: that takes a C++ compiler and time, and changes the arithmetic.
COMPILE = {"compile__enable": True, "compile__components": ["model", "loss"], "compile__backend": "aot_eager"}
COMPILED = ("fsdp2_ep2", "tp2", "tp2_ep2_etp1", "tp2_mixtral", "pp2_1f1b")
FUSED = {  # layouts in which tokens go to the experts and rows exist in FP8 only
    **{name: LAYOUTS[name].with_fused(**NO_WIRES) for name in ("fsdp2", "cp2_mixtral", "pp2_1f1b")},
    **{
        name: LAYOUTS[name].with_fused(**WIRES)
        for name in (
            *("fsdp2_ep2", "tp2_ep2_etp1", "fsdp2_ep2_mixtral", "tp2_ep2_etp1_mixtral"),
            *("hsdp_ep2", "tp2_fsdp2_ep4_etp1", "pp2_fsdp2_ep2", "fsdp4_ep2_two"),
        )
    },
}
UNCLIPPED = {"training__max_norm": 1e9}  # clipping scales by a norm, which a layout may sum in another order
ROWS: dict[str, Row] = {
    **{f"one_{model}/high": Row(model=model) for model in MODELS},
    **{f"one_{model}/fp8": Row(model=model).with_fp8() for model in MODELS},
    "one/untrained": ONE.but(optimizer__lr=0.0),
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
    "fsdp4_ep2/gather": LAYOUTS["fsdp4_ep2"].with_fp8(**GATHER),
    "fsdp4_ep2_two/gather": LAYOUTS["fsdp4_ep2_two"].with_fp8(**GATHER),
    "fsdp2/unclipped": Row(shard=2).with_fp8(**WIRES).but(**UNCLIPPED),
    "fsdp2/foreach": Row(shard=2).with_fp8(**WIRES).but(optimizer__implementation="foreach"),
    "fsdp2/for-loop": Row(shard=2).with_fp8(**WIRES).but(optimizer__implementation="for-loop"),
    "fsdp2/step_in_backward": Row(shard=2).with_fp8(**WIRES).but(**UNCLIPPED, optimizer__early_step_in_backward=True),
    **{f"one/recomputed_{name}": ONE.but(**how) for name, how in RECOMPUTE.items()},
    **{f"fsdp2_ep2/recomputed_{name}": SHARDED.but(**how) for name, how in RECOMPUTE.items()},
    **{name: row for layout in LAYOUTS for name, row in variants(layout).items()},
    **{f"{name}/compiled_high": LAYOUTS[name].but(**COMPILE) for name in COMPILED},
    **{f"one_{model}/fused": Row(model=model).with_fused() for model in ("four_experts", "mixtral")},
    **{f"{name}/fused": row for name, row in FUSED.items()},
    "fsdp2_ep2/fused_recomputed": FUSED["fsdp2_ep2"].but(**RECOMPUTE["selective_op"]),
    "fsdp2_ep2/fused_compiled": FUSED["fsdp2_ep2"].but(**COMPILE, **RECOMPUTE["full"]),
    # Case 25, as far as a CPU goes: FP8, EP 2, selective recomputation, compile.
    **{
        f"{name}/compiled": LAYOUTS[name].with_fp8(**WIRES).but(**COMPILE, **RECOMPUTE["selective_op"])
        for name in COMPILED
    },
}

FP8_ROWS = ("fp8", "wires", "compiled", "accumulated", "foreach", "for-loop", "fused", "fused_compiled")

# Pairs with the same arithmetic in the same order, so the same bits, and why.
SAME_BITS = {
    # Scales are powers of two that all ranks agree on: a shard quantized before the gather is the part of the gathered
    # weight quantized after it.
    **{f"{name}/wires": f"{name}/fp8" for name, row in LAYOUTS.items() if row.ep == 1 and f"{name}/wires" in ROWS},
    "fsdp4_ep2/gather": "fsdp4_ep2/fp8",
    "fsdp4_ep2_two/gather": "fsdp4_ep2_two/fp8",
    # Recomputation quantizes the same rows with the same weights.
    **{f"one/recomputed_{name}": "one_four_experts/fp8" for name in RECOMPUTE},
    **{f"fsdp2_ep2/recomputed_{name}": "fsdp2_ep2/wires" for name in RECOMPUTE},
    "fsdp2_ep2/fused_recomputed": "fsdp2_ep2/fused",
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
