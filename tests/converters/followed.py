"""A backend whose every result is held against the reference's from the same inputs.

The end of an MLP in FP8 says little: where a twin rounds another way, a value goes to the next FP8 number, 2**-4 of it
away, and two right ones agree to 40 dB. Step by step they agree by bits, or to what the tensor core keeps of a sum.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from converters import expert_mlp, grouped_mm, mlp_gradients, scaling, weight_cache
from converters.backends import get_backend, reference
from converters.backends.reference import QuantizedWeight
from tests.converters.gpu_checks import (
    BF16,
    dswiglu_undecided,
    operand_rows,
    same,
    same_operand,
    swiglu_undecided,
)
from tests.helpers import sqnr_db

# Of a GEMM into float32; into bfloat16: 45. 3 dB below gpu_checks.PRODUCTS, since groups may be tiny. precise_wgrad is
# "fast" for the GEMMs of rows, and "precise" for that of the weight gradient.
FLOOR_DB = {"fast": 57, "precise_wgrad": 67, "precise": 67}


class Followed:
    """The functions of backends/hopper.py. steps: how often each has been compared."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.steps = backend, Counter()
        self.groups, self.groups_of, self.WgradOperand = backend.groups, backend.groups_of, backend.WgradOperand

    def seen(self, step: str, right: bool, what: object = "bits") -> None:
        self.steps[step] += 1
        assert right, f"{step}: {what}"

    def product(self, step: str, found: Tensor, expected: Tensor, accumulate: str) -> Tensor:
        floor, db = 45 if found.dtype == BF16 else FLOOR_DB[accumulate], sqnr_db(expected, found)
        self.seen(step, db > floor, f"{db:.1f} dB from the reference, {floor} wanted")
        return found

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.backend.quantize_rows(x)
        self.seen("quantize_rows", all(map(same, found, reference.quantize_rows(x))))
        return found

    def swiglu_rows(self, y13: Tensor) -> tuple[Tensor, Tensor]:
        found = self.backend.swiglu_rows(y13)
        swiglu_undecided(found, y13)
        self.seen("swiglu_rows", True)
        return found

    def dswiglu_rows(self, dh: Tensor, y13: Tensor) -> tuple[Tensor, Tensor]:
        before = dh.clone()  # q may be written over it
        found = self.backend.dswiglu_rows(dh, y13)
        dswiglu_undecided(found, before, y13)
        self.seen("dswiglu_rows", True)
        return found

    def quantize_weight(self, weights: list[Tensor], **options: Any) -> QuantizedWeight:
        found, expected = self.backend.quantize_weight(weights, **options), reference.quantize_weight(weights)
        wanted = [options.get("forward", True), options.get("backward", True)]
        pairs = [(found.scale, expected.scale)]
        pairs += [p for p, w in zip(((found.q, expected.q), (found.q_t, expected.q_t)), wanted, strict=True) if w]
        self.seen("quantize_weight", all(same(a, b) for a, b in pairs))
        return found

    def wgrad_operand(self, q: Tensor, scale: Tensor, groups: Any) -> Any:
        found, theirs = self.backend.wgrad_operand(q, scale, groups), reference.groups(groups.offs, len(q))
        self.seen("wgrad_operand", same_operand(found, reference.wgrad_operand(q, scale, theirs), groups))
        return found

    def wgrad_operand_hp(self, x: Tensor, groups: Any) -> Any:
        found, theirs = self.backend.wgrad_operand_hp(x, groups), reference.groups(groups.offs, len(x))
        self.seen("wgrad_operand_hp", same_operand(found, reference.wgrad_operand_hp(x, theirs), groups))
        return found

    def gemm_rows(
        self, q: Tensor, s: Tensor, w: Tensor, w_scale: Tensor, groups: Any, dtype: torch.dtype, accumulate: str
    ) -> Tensor:
        found = self.backend.gemm_rows(q, s, w, w_scale, groups, dtype, accumulate)
        expected = reference.gemm_rows(q, s, w, w_scale, reference.groups(groups.offs, len(q)), dtype)
        of_rows = accumulate if accumulate == "precise" else "fast"
        return self.product("gemm_rows", found, expected, of_rows)

    def gemm_wgrad(self, a: Any, b: Any, groups: Any, dtype: torch.dtype, accumulate: str) -> Tensor:
        found, (left, right) = (
            self.backend.gemm_wgrad(a, b, groups, dtype, accumulate),
            (operand_rows(t, groups) for t in (a, b)),
        )
        theirs = reference.groups(groups.offs, len(left.q))
        return self.product("gemm_wgrad", found, reference.gemm_wgrad(left, right, theirs, dtype), accumulate)

    def gemm_wgrad_hp(self, a: Tensor, b: Tensor, groups: Any, dtype: torch.dtype) -> Tensor:
        found = self.backend.gemm_wgrad_hp(a, b, groups, dtype)
        theirs = reference.groups(groups.offs, len(a))
        return self.product("gemm_wgrad_hp", found, reference.gemm_wgrad_hp(a, b, theirs, dtype), "precise")


@contextmanager
def following(backend: Any) -> Iterator[Counter]:
    """Whoever computes an MLP or a grouped product gets `backend`, by name or as it is, `Followed`. Gives its steps."""
    followed = Followed(get_backend(backend) if isinstance(backend, str) else backend)
    with pytest.MonkeyPatch.context() as patch:
        for module in (expert_mlp, grouped_mm, mlp_gradients, scaling, weight_cache):
            patch.setattr(module, "get_backend", lambda name: followed)
        yield followed.steps
