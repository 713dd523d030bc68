"""The beginning of torchtitan's train_step on batches that are copied while the host goes on."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils.pin_memory import pin_memory
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.train import Trainer as TorchTitanTrainer

from recipes.batches import Batch, HostTensor, host_batches
from recipes.trainer import Trainer

CUDA = torch.device("cuda:0")


def batches(count: int = 3) -> list[Batch]:
    """Batches of tokens [2, 16], their labels, of which some do not count, and something that is no tensor."""
    out = []
    for _ in range(count):
        labels = torch.randint(0, 50, (2, 16))
        labels[:, :3] = IGNORE_INDEX
        out.append(({"input": torch.randint(0, 50, (2, 16)), "positions": torch.arange(16), "name": "a"}, labels))
    return out


class Begun(Exception):
    """The forward pass would come now."""


def begin_step(stream: Iterator[Batch], device: torch.device, accumulate: int = 1) -> list[dict[str, Any]]:
    """What torchtitan's own train_step hands to each forward pass."""
    seen = []

    def forward_backward_step(**given: Any) -> Tensor:
        seen.append(given)
        if len(seen) == accumulate:
            raise Begun("forward")
        return torch.zeros(())

    trainer = SimpleNamespace(
        optimizers=SimpleNamespace(zero_grad=lambda: None),
        lr_schedulers=SimpleNamespace(schedulers=[SimpleNamespace(get_last_lr=lambda: [0.1])]),
        parallel_dims=SimpleNamespace(dp_enabled=False),
        gradient_accumulation_steps=accumulate,
        device=device,
        forward_backward_step=forward_backward_step,
    )
    with pytest.raises(Begun, match="forward"):
        TorchTitanTrainer.train_step(trainer, stream)
    return seen


def check(seen: list[dict[str, Any]], given: list[Batch]) -> None:
    """Everything arrived as it was, as plain tensors: torch.compile must see no subclass."""
    assert len(seen) == len(given)
    for step, (inputs, labels) in zip(seen, given, strict=True):
        assert step["input_dict"].keys() == inputs.keys()
        assert step["input_dict"]["name"] == "a"
        pairs = [(step["input_dict"][key], inputs[key]) for key in ("input", "positions")]
        for got, wanted in (*pairs, (step["labels"], labels)):
            assert type(got) is Tensor
            assert torch.equal(got.cpu(), wanted)
        count = step["global_valid_tokens"]
        assert type(count) is Tensor
        assert count.item() == 2 * 13 * len(given)


class FakeGPU(TorchFunctionMode):
    """Pinned memory and copies to a GPU, on a machine without one; `copies`: (what, was it pinned, non_blocking)."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        self.copies: list[tuple[tuple[int, ...], bool, bool]] = []

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], HostTensor) and func is Tensor.to:
            with self:  # the subclass comes first
                return args[0].__torch_function__(func, types, args, kwargs)
        if func is Tensor.pin_memory:
            assert type(args[0]) is Tensor
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is Tensor.to and CUDA in args:
            is_pinned = any(args[0] is tensor for tensor in self.pinned)
            self.copies.append((tuple(args[0].shape), is_pinned, kwargs.get("non_blocking", False)))
            return args[0].clone()
        return func(*args, **kwargs)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_nothing_that_a_step_begins_with_is_waited_for(accumulate: int) -> None:
    given = batches(accumulate)
    with FakeGPU() as gpu:
        check(begin_step(host_batches(iter(given)), CUDA, accumulate), given)
    each = [((2, 16), True, True), ((16,), True, True), ((2, 16), True, True)]
    assert gpu.copies == [((), True, True), *each * accumulate]


def test_torchtitans_own_batches_are_waited_for() -> None:
    """When this fails, torchtitan copies in another way, and recipes/batches.py may go."""
    with FakeGPU() as gpu:
        begin_step(iter(batches()), CUDA)
    assert gpu.copies == [((), False, False), ((2, 16), False, False), ((16,), False, False), ((2, 16), False, False)]


def test_other_casts_are_as_ever() -> None:
    labels = torch.arange(4).as_subclass(HostTensor)
    assert labels.to(torch.float32).dtype == torch.float32
    assert labels.to("cpu") is labels
    assert labels.to("meta", torch.int32).device.type == "meta"
    with FakeGPU() as gpu:
        labels.to(CUDA, torch.float32)
    assert gpu.copies == [((4,), True, True)]


@pytest.mark.parametrize(("device", "kind"), [("cpu", Tensor), ("cuda:0", HostTensor)])
def test_the_trainer_changes_batches_for_a_gpu_alone(device: str, kind: type) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.device, trainer.ntokens_seen = torch.device(device), 0
    trainer.metrics_processor = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    given = batches(1)
    inputs, labels = next(trainer.batch_generator(given))
    assert {type(t) for t in (inputs["input"], labels)} == {kind}
    assert labels.data_ptr() == given[0][1].data_ptr()
    assert trainer.ntokens_seen == trainer.metrics_processor.ntokens_since_last_log == 32


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("pinned", [False, True])
def test_a_step_begins_while_the_gpu_is_busy(pinned: bool) -> None:
    """With what the loader gives, pinned or not; from the second time on, when the pinned blocks exist."""
    for sync in ("default", "error"):
        given = batches(2)
        stream = [pin_memory(batch) for batch in given] if pinned else given
        torch.cuda.set_sync_debug_mode(sync)
        try:
            torch.cuda._sleep(1_000_000_000)  # half a second
            seen = begin_step(host_batches(iter(stream)), CUDA, accumulate=2)
            ahead = not torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(seen, given)
    assert ahead


@pytest.mark.gpu(capability=(8, 0))
def test_pinned_memory_is_kept_until_the_copy_is_done() -> None:
    """Many batches are copied, and dropped, before the GPU does the first copy."""
    given = [torch.full((1 << 16,), i) for i in range(64)]
    torch.cuda._sleep(100_000_000)
    copies = [tensor.as_subclass(HostTensor).to(CUDA) for tensor in given]
    for tensor in given:
        tensor.fill_(-1)
    assert [copy.unique().tolist() for copy in copies] == [[i] for i in range(64)]
