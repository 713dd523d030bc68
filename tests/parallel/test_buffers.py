"""What a forward writes into a module's buffers is undone, and a backward that is still to come finds its own."""

import pytest
import torch
from torch import Tensor, nn

from parallel.buffers import buffers_kept


class Counting(nn.Module):
    """As torchtitan's MoE: counts what it sees, beside a buffer that it multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(x)
        return x * self.factor


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_was_counted_before_stays_and_nothing_is_added(compiled: bool) -> None:
    torch.compiler.reset()
    module = Counting()
    call = torch.compile(module, backend="aot_eager") if compiled else module
    x, seen = torch.ones(3), module.seen
    call(x)
    with torch.no_grad(), buffers_kept([module]):
        call(x)
        assert module.seen.tolist() == [2.0] * 3
    assert module.seen is seen
    assert seen.tolist() == [1.0] * 3


def test_after_an_error_too() -> None:
    module = Counting()
    module(torch.ones(3))
    with pytest.raises(ZeroDivisionError, match="by zero"), buffers_kept([module]):
        module(torch.ones(3) * (1 / (module(torch.ones(3)).numel() - 3)))
    assert module.seen.tolist() == [1.0] * 3


def test_a_buffer_that_nothing_wrote_is_left_to_its_backward() -> None:
    module, x = Counting(), torch.ones(3, requires_grad=True)
    with buffers_kept([module]):
        out = module(x)
    out.backward(torch.ones(3))
    assert x.grad.tolist() == [2.0] * 3
