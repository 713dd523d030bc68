"""fp8 ... accumulate: which GEMMs of a GPU are told to promote their sums."""

from typing import Any

import pytest
import torch

from converters.backends import hopper


@pytest.mark.parametrize(
    ("accumulate", "rows", "wgrad"),
    [("fast", False, False), ("precise_wgrad", False, True), ("precise", True, True)],
)
def test_each_gemm_is_told(monkeypatch: pytest.MonkeyPatch, accumulate: str, rows: bool, wgrad: bool) -> None:
    told = {}
    for name in ("gemm_rows", "gemm_wgrad"):

        def record(*args: Any, name: str = name) -> None:
            told[name] = args[-1]

        monkeypatch.setattr(hopper.grouped, name, record)
    t = torch.zeros(0)
    groups = hopper.Groups(offs=t, M=0, spans=t, tiles=t, chunks=t)
    operand = hopper.WgradOperand(q=t, scale=t)
    hopper.gemm_rows(t, t, t, t, groups, torch.float32, accumulate)
    hopper.gemm_wgrad(operand, operand, groups, torch.float32, accumulate)
    assert told == {"gemm_rows": rows, "gemm_wgrad": wgrad}
