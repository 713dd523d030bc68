"""What FSDP2 gathers of linear layers in FP8, and how often a step reduces and quantizes, on two ranks."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from converters.backends import reference
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.gathered_weight import FP8GatheredWeight
from tests.parallel.checks import checks_of, expect_no_error, run_on_two_ranks
from tests.parallel.matrix import build
from tests.parallel.rows import Row
from tests.parallel.test_travel import WIRES, counted
from tests.parallel.traffic import Traffic

D, NS = 32, {"wq": 48, "wk": 17, "wv": 1}  # uneven shards, and one rank without any of wv
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, N in NS.items():
            setattr(self, name, nn.Linear(D, N, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wq(x), self.wk(x), self.wv(x)], dim=-1)


def sharded(gather: str, **fsdp: object) -> Attention:
    torch.manual_seed(0)
    model = Attention()
    with torch.no_grad():
        model.wk.weight[16] *= 8  # the maximum of all three lies in the last rank's shard of one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("converters.dense_selection.ALIGNMENT", 1)
        convert_dense(model, FP8DenseConfig(backend="reference", fsdp_fp8_all_gather=gather))
    return fully_shard(model, **fsdp)


def one_pass(model: Attention, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(8, D, dtype=dtype).requires_grad_()
    out = model(x)
    out.backward(torch.randn_like(out))
    grads = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    return [out.detach(), x.grad, *grads]


def check_gathered_bytes_are_half_of_bf16(folder: Path) -> None:
    sent = {}
    for gather in ("off", "on"):
        model = sharded(gather, mp_policy=BF16)
        one_pass(model, torch.bfloat16)
        with Traffic() as traffic:
            one_pass(model, torch.bfloat16)
        sent[gather] = [size for _, size in traffic.sent["allgather_base"]][:1]
    mine = D * (24 + 9 + 1)  # elements, padded to equal shards
    assert sent == {"off": [2 * mine], "on": [mine]}


def check_what_is_gathered_is_the_quantized_whole(folder: Path) -> None:
    model = sharded("on")
    whole = [getattr(model, name).weight.full_tensor().detach()[None] for name in NS]
    expected = reference.quantize_weight(whole)
    model.unshard()
    weights = [getattr(model, name).weight for name in NS]
    assert all(isinstance(w, FP8GatheredWeight) for w in weights)
    assert torch.equal(torch.cat([w._data.view(torch.uint8) for w in weights]), expected.q[0].view(torch.uint8))
    assert all(torch.equal(w._scale, expected.scale) for w in weights)
    model.reshard()


def check_gathered_in_fp8_or_not_the_bits_are_the_same(folder: Path) -> None:
    wanted = one_pass(sharded("off"))
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for model in (sharded("on"), sharded("on", **offload), sharded("on", reshard_after_forward=False)):
        assert all(map(torch.equal, one_pass(model), wanted))


def check_a_step_reduces_once_for_experts_and_dense_layers(folder: Path) -> None:
    """Each shard is quantized once a step, though both converters ask: 2 x 4 for attention, 3 + 3 for the FFNs, and
    the experts of one layer.
    """
    row = Row(shard=2, model="dense_first").with_fp8(**WIRES).with_dense(fsdp_fp8_all_gather="on")
    trainer = build(row.but(training__local_batch_size=1), folder / "seed" / "checkpoint" / "step-0", folder / "run")
    trainer.steps(1)
    with counted(reference, "cast_slices", "amax_slices") as calls, Traffic() as traffic:
        trainer.steps(2)
    weights = 2 * 4 + 3 + 3 + 3
    assert calls == {"cast_slices": 2 * weights, "amax_slices": 2 * weights}
    maxima = 4 * (2 * 4 + 2 * 2 + 2 * 2)  # float32: W13 and W2 of 4 experts; of a linear GEMM one: 2 a layer and FFN
    sizes = Counter(size for _, size in traffic.sent["allreduce"])
    assert sizes[maxima] == 2, sizes


CHECKS = checks_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_two_ranks(__name__, "dense_first", tmp_path_factory.mktemp("dense_travel"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str, results: Path) -> None:
    expect_no_error(name, results, ranks=2)
