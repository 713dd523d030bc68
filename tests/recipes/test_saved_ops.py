"""Selective recomputation by torchtitan's policy, with our operators: FP8 products run once, and bits are the same.

Where rows go to their experts in FP8: tests/parallel/test_travel.py.
"""

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama4.infra import parallelize

from converters.config import FP8GroupedExpertsConfig
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from converters.token_path import switch_token_path
from recipes import register  # noqa: F401  (importing fills torchtitan's list)
from tests.converters.models import llama4, materialized
from tests.helpers import DEVICE

PRODUCTS = ("expert_mlp", "routed_mlp", "grouped_mm", "ruled_mlp", "ruled_mm", "dense_linear")
LAYERS = 2


class Ran(TorchDispatchMode):
    """Counts the products that are computed: what selective recomputation has kept does not come by."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if op.namespace == "titan_moe_fp8" and (name := op._opname) in PRODUCTS:
            self.calls[name] += 1
        return op(*args, **(kwargs or {}))


def one_pass(model: nn.Module) -> tuple[dict[str, Tensor], Counter[str]]:
    """Output and gradients, and the products of one forward and backward."""
    torch.manual_seed(1)
    with Ran() as ran:
        out = model(torch.randint(128, (2, 32), device=DEVICE))
        out.backward(torch.randn_like(out))
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    return {"out": out.detach(), **grads}, ran.calls


@pytest.mark.parametrize(
    ("experts", "fused", "dense", "expected"),
    [
        ({}, "off", None, {"expert_mlp": LAYERS}),
        ({}, "on", None, {"routed_mlp": LAYERS}),
        ({"recipe": "tensorwise"}, "off", None, {"ruled_mlp": LAYERS}),
        ({"experts": "sequential"}, "off", None, {"expert_mlp": 4 * LAYERS}),
        ({}, "on", {}, {"routed_mlp": LAYERS, "expert_mlp": LAYERS, "dense_linear": 2 * LAYERS}),
        ({}, "on", {"recipe": "tensorwise"}, {"routed_mlp": LAYERS, "ruled_mm": 7 * LAYERS}),
    ],
    ids=["experts", "token_path", "ruled", "sequential", "dense", "dense_ruled"],
)
@pytest.mark.parametrize("before", [True, False], ids=["score_before", "score_after"])
def test_products_run_once_and_gradients_are_the_same_bits(
    before: bool, experts: dict, fused: str, dense: dict | None, expected: dict
) -> None:
    torch.manual_seed(0)
    plain = materialized(llama4(n_layers=LAYERS, score_before_experts=before))
    fuse = functools.partial(switch_token_path, fused=fused)
    convert(plain, FP8GroupedExpertsConfig(**experts), fuse=fuse)
    if dense is not None:
        convert_dense(plain, FP8DenseConfig(**dense))
    selective = copy.deepcopy(plain)
    how = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    apply_ac(selective, how, op_sac_save_list=parallelize._op_sac_save_list)
    (wanted, once), (actual, calls) = one_pass(plain), one_pass(selective)
    assert once == expected
    assert calls == once
    assert wanted.keys() == actual.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], actual[name])] == []
