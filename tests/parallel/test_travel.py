"""What crosses the wires, counted in bytes, and how often a step quantizes and reduces; rows that travel oddly."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.moe.moe import GroupedExperts

from converters import weight_cache
from converters.backends import reference
from converters.config import FP8GroupedExpertsConfig
from converters.expert_weight import FP8ExpertWeight
from converters.fp8_grouped_experts import convert
from converters.gathered_weight import FP8GatheredWeight
from converters.kept_memory import kept_memory
from parallel.expert_parallel import from_experts, plan, to_experts
from tests.parallel.checks import checks_of, expect_no_error, run_on_two_ranks
from tests.parallel.matrix import build
from tests.parallel.rows import BATCH, SEQ_LEN, Row
from tests.parallel.traffic import Traffic

D, H, LAYERS, TOP_K = 64, 96, 2, 2  # of the model in rows.py
WIRES = {"fsdp_fp8_all_gather": "on", "ep_fp8_dispatch": "on"}
NO_WIRES = {"fsdp_fp8_all_gather": "off", "ep_fp8_dispatch": "off"}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def sharded_experts(E: int, gather: str, dim: int = 0, **fsdp: Any) -> GroupedExperts:
    """FP8 experts alone in an FSDP2 group of two ranks, sharded along tensor dim `dim`."""
    torch.manual_seed(0)
    experts = GroupedExperts(D, H, E, use_grouped_mm=True)
    for w in experts.parameters():
        nn.init.normal_(w, std=0.05)
    convert(experts, FP8GroupedExpertsConfig(backend="reference", fsdp_fp8_all_gather=gather))
    return fully_shard(experts, shard_placement_fn=lambda p: Shard(dim), **fsdp)


def one_pass(experts: GroupedExperts, dtype: torch.dtype = torch.float32) -> Tensor:
    E = experts.num_experts
    x = torch.randn(8 * E, D, dtype=dtype).requires_grad_()
    out = experts(x, torch.full((E,), 8))
    out.backward(torch.randn_like(out))
    return out.detach()


def check_gathered_bytes_are_half_of_bf16(folder: Path) -> None:
    for dim in (0, 1):
        sent = {}
        for gather in ("off", "on"):
            experts = sharded_experts(4, gather, dim, mp_policy=BF16, reshard_after_forward=True)
            one_pass(experts, torch.bfloat16)
            with Traffic() as traffic:
                one_pass(experts, torch.bfloat16)
            sent[gather] = [size for _, size in traffic.sent["allgather_base"]]
        mine = 3 * 4 * D * H // 2  # elements of this rank's shards
        assert sent == {"off": [2 * mine] * 2, "on": [mine] * 2}, f"dim {dim}"  # in forward and in backward


def check_what_is_gathered_is_the_quantized_whole(folder: Path) -> None:
    """4 and 3 experts, 3 of which leave the second rank a padded shard."""
    for E, dim in ((4, 0), (4, 1), (3, 0)):
        experts = sharded_experts(E, "on", dim)
        with torch.no_grad():
            experts.w1._local_tensor._data[0] *= 64  # no two experts, and no two shards of one, with one scale
        whole = {n: p.full_tensor() for n, p in experts.state_dict().items()}
        experts.unshard()
        pairs = (("w1", "w3"), ("w2",))
        for names, expected in ((ns, reference.quantize_weight([whole[n] for n in ns])) for ns in pairs):
            q = torch.cat([getattr(experts, n)._data.view(torch.uint8) for n in names], dim=1)
            assert all(isinstance(getattr(experts, n), FP8GatheredWeight) for n in names)
            assert torch.equal(q, expected.q.view(torch.uint8)), f"{E} experts, dim {dim}, {names}"
            assert all(torch.equal(getattr(experts, n)._scale, expected.scale.flatten()) for n in names)
        experts.reshard()


def check_offloaded_weights_travel_too(folder: Path) -> None:
    """Without pinned memory, which needs an accelerator."""
    outs = []
    for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        experts = sharded_experts(4, "on", **offload)
        torch.manual_seed(1)
        outs.append(one_pass(experts))
    assert torch.equal(*outs)


def trained(row: Row, folder: Path) -> Any:
    trainer = build(row, folder / "seed" / "checkpoint" / "step-0", folder / "run")
    trainer.steps(1)
    return trainer


def check_rows_cross_in_fp8_with_their_scales(folder: Path) -> None:
    """Forward of dispatch and backward of combine: D bytes and a float32 scale, padded to 16. The rest in BF16."""
    row = Row(shard=2, ep=2).but(training__mixed_precision_param="bfloat16")
    there = TOP_K * SEQ_LEN * BATCH // 2  # rows from here, wherever their experts are
    sent = {}
    rows = {"off": row.with_fp8(**NO_WIRES), "on": row.with_fp8(**WIRES), "fused": row.with_fused(**WIRES)}
    for name, with_experts in rows.items():
        trainer = trained(with_experts, folder)
        with Traffic() as traffic:
            trainer.steps(1)
        sent[name] = [call for call in traffic.sent["all_to_all_single"] if call[0] is not torch.int64]
    calls = 4 * LAYERS
    assert [dtype for dtype, _ in sent["off"]] == [torch.bfloat16] * calls
    in_fp8 = [size for dtype, size in sent["on"] if dtype is torch.uint8]
    assert in_fp8 == [there * (D + 4 + 12)] * (calls // 2)
    assert sum(dtype is torch.bfloat16 for dtype, _ in sent["on"]) == calls // 2
    # The fused token path sends the same; a token may go elsewhere, since its weighted x was rounded once, not twice.
    assert [dtype for dtype, _ in sent["fused"]] == [dtype for dtype, _ in sent["on"]]
    assert [size for dtype, size in sent["fused"] if dtype is torch.uint8] == in_fp8
    # 80 of 128 bytes at D = 64; 5136 of 10240 at Llama4 Scout's 5120.
    assert sum(in_fp8) == sum(size for _, size in sent["off"] if size == there * D * 2) * 80 // 128


@contextmanager
def counted(module: Any, *names: str) -> Iterator[Counter]:
    """How often these functions of `module` are called."""
    calls: Counter = Counter()

    def counting(name: str, function: Callable) -> Callable:
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return count

    with mock.patch.multiple(module, **{name: counting(name, getattr(module, name)) for name in names}):
        yield calls


def check_a_step_quantizes_each_shard_once_and_reduces_once(folder: Path) -> None:
    """4 micro-batches, each gathered in forward and in backward; one MAX for the weights of all layers."""
    trainer = trained(Row(shard=2).with_fp8(**WIRES).but(training__local_batch_size=1), folder)
    with counted(reference, "cast_slices", "amax_slices") as calls, Traffic() as traffic:
        trainer.steps(2)
    assert calls == {"cast_slices": 2 * 3 * LAYERS, "amax_slices": 2 * 3 * LAYERS}
    # Besides, torchtitan sums the tokens of each expert for its routing bias.
    maxima = LAYERS * 2 * 4 * 4  # float32, for W13 and W2 of 4 experts
    assert Counter(size for _, size in traffic.sent["allreduce"])[maxima] == 2
    assert len(traffic.sent["allreduce"]) == 4


def check_a_shard_that_is_used_once_is_given_up_in_backward(folder: Path) -> None:
    """Before gradients are clipped none is left, after the optimizer step all are; steps of several micro-batches keep
    them. Each is quantized once a step all the same.
    """
    clip = dist_utils.clip_grad_norm_
    for once, row in {True: Row(shard=2), False: Row(shard=2).but(training__local_batch_size=1)}.items():
        trainer = trained(row.with_fp8(**WIRES).with_dense(), folder)
        local = [p._local_tensor for p in trainer.model_parts[0].parameters() if isinstance(p, DTensor)]
        weights = [w for w in local if isinstance(w, FP8ExpertWeight)]
        kept = []

        def count_and_clip(*args: Any, **kwargs: Any) -> Any:
            kept.append(sum(w.payload is not None for w in weights))  # noqa: B023
            return clip(*args, **kwargs)

        with (
            mock.patch.object(dist_utils, "clip_grad_norm_", count_and_clip),
            counted(reference, "cast_slices") as calls,
        ):
            trainer.steps(2)
        assert kept == [0 if once else len(weights)] * 2
        assert all(w.payload is not None for w in weights)
        assert calls == {"cast_slices": 2 * len(weights)}
        assert len(weights) > 3 * LAYERS


def check_weights_that_are_not_sharded_are_quantized_once_a_step(folder: Path) -> None:
    trainer = trained(Row(replicate=2).with_fp8().but(training__local_batch_size=1), folder)
    with counted(weight_cache, "quantize") as calls:
        trainer.steps(2)
    assert calls == {"quantize": 2 * 2 * LAYERS}


def check_what_the_start_table_says_is_kept_is_kept(folder: Path) -> None:
    """Bytes on this rank, after a step: shards that are gathered in FP8, and what the cache has of whole weights."""
    often = {"training__local_batch_size": 1}  # several micro-batches: what is cached stays
    rows = {
        "fsdp": Row(shard=2).with_fp8(**WIRES).with_dense(),
        "fsdp in bf16": Row(shard=2).with_fp8(**NO_WIRES).with_dense(fsdp_fp8_all_gather="off"),
        "ep": Row(shard=2, ep=2).with_fp8(**WIRES).but(**often),
        "tp": Row(tp=2).with_fp8().with_dense().but(**often),
        "ddp": Row(replicate=2).with_fp8().with_dense().but(**often),
        "ddp, used once": Row(replicate=2).with_fp8().with_dense(),
    }
    for name, row in rows.items():
        weight_cache.clear()
        trainer = build(row, folder / "seed" / "checkpoint" / "step-0", folder / "run")
        said = sum(kept.between for kept in kept_memory(trainer.model_parts).values())
        trainer.steps(1)
        local = [getattr(p, "_local_tensor", p) for part in trainer.model_parts for p in part.parameters()]
        payloads = [p.payload for p in local if getattr(p, "payload", None) is not None]
        shards = sum(p.q.numel() for p in payloads)
        scales = {p.scale.data_ptr(): p.scale.numel() * 4 for p in payloads}
        assert said == shards + sum(scales.values()) + weight_cache.cached_bytes(), name
        assert (said > 0) == (name != "fsdp in bf16"), name


def check_selective_recomputation_keeps_the_experts_products(folder: Path) -> None:
    """y13, out, dh and dx of each layer, once, where the experts' rows come from other ranks."""
    row = Row(shard=2, ep=2)
    for name, with_experts in {"rows": row.with_fp8(**WIRES), "fused": row.with_fused(**WIRES)}.items():
        selective = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
        trainer = trained(with_experts.but(**selective), folder)
        with counted(reference, "gemm_rows") as calls:
            trainer.steps(1)
        assert calls == {"gemm_rows": 4 * LAYERS}, name


def check_memory_is_flat(folder: Path) -> None:
    """Live tensors at each tenth of 50 steps of EP 2 with recomputation (tt#1467)."""
    row = Row(shard=2, ep=2).with_fp8(**WIRES).but(activation_checkpoint__mode="full")
    trainer = trained(row, folder)
    seen = set()
    for _ in range(5):
        trainer.steps(10)
        gc.collect()
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in live_tensors()}
        seen.add((len(storages), sum(storages.values()), weight_cache.cached_bytes()))
    assert min(seen)[0] > 100, f"too few tensors found: {seen}"
    assert len(seen) == 1, f"number and bytes of live storages, bytes of cached weights: {seen}"


def live_tensors() -> list[Tensor]:
    # type(), not isinstance: that imports lazy modules that the collector knows.
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and o.device.type == "cpu"]
    return [
        inner for t in found for inner in [getattr(t, "_data", getattr(t, "_local_tensor", t))] if type(inner) is Tensor
    ]


def check_rows_go_to_their_experts_and_back(folder: Path) -> None:
    """Two ranks, two experts each; a row is (rank it comes from, expert it goes to)."""
    rank, both = dist.get_rank(), dist.group.WORLD
    cases = {
        "uneven": ([1, 0, 2, 1], [0, 3, 1, 0]),
        "one sends nothing": ([1, 2, 0, 1], [0, 0, 0, 0]),
        "all to one rank": ([2, 1, 0, 0], [1, 0, 0, 0]),
        "all to one expert": ([0, 0, 0, 3], [0, 0, 0, 2]),
        "nobody sends": ([0, 0, 0, 0], [0, 0, 0, 0]),
    }
    for name, counts in cases.items():
        mine = [(rank, e) for e, n in enumerate(counts[rank]) for _ in range(n)]
        rows = torch.tensor(mine, dtype=torch.float32).reshape(-1, 2)
        dispatch = plan(torch.tensor(counts[rank]), both)
        here = range(2 * rank, 2 * rank + 2)
        expected = [[r, e] for e in here for r in (0, 1) for _ in range(counts[r][e])]  # expert-major, then by rank
        arrived, scales = to_experts([rows.to(torch.float8_e4m3fn), rows[:, 0] + 10], dispatch)
        assert arrived.float().tolist() == expected, name
        assert scales.tolist() == [r + 10.0 for r, _ in expected], name
        assert dispatch.offs.tolist() == [sum(e <= last for _, e in expected) for last in here], name
        assert torch.equal(from_experts(arrived.float(), dispatch), rows), name


CHECKS = checks_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_two_ranks(__name__, "four_experts", tmp_path_factory.mktemp("travel"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, results: Path) -> None:
    expect_no_error(name, results, ranks=2)
