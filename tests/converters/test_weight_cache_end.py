"""What is quantized from a weight goes with the weight: at once, in any thread, and never before it."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from converters import weight_cache
from converters.config import FP8GroupedExpertsConfig, Numerics
from converters.dense_config import FP8DenseConfig
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from converters.grouped_mm import grouped_mm
from parallel.wrapped_weight import plain
from tests.converters.models import llama4, materialized
from tests.helpers import DEVICE, make_experts

ROWS = make_experts((8, 8), 16, 16)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    weight_cache.clear()
    yield
    weight_cache.clear()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(FP8ExpertWeight(w.clone(), Numerics())) for w in (ROWS.w1, ROWS.w2, ROWS.w3)]


def mlp(weights: list[nn.Parameter]) -> Tensor:
    return expert_mlp(ROWS.x, *weights, ROWS.offs, Numerics())


def keys() -> set[tuple]:
    return set(weight_cache._entries)


def test_a_model_takes_its_entries_along() -> None:
    model = llama4(n_layers=2)
    convert(model, FP8GroupedExpertsConfig(backend="reference"))
    convert_dense(model, FP8DenseConfig(backend="reference"))
    model = materialized(model)
    out = model(torch.randint(128, (2, 32), device=DEVICE))
    out.backward(torch.randn_like(out))
    assert weight_cache.cached_bytes() > 0
    del model, out
    gc.collect()
    assert weight_cache.cached_bytes() == 0


WAYS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "data_assigned": lambda w: setattr(w[1], "data", w[1].data.clone()),
    "swapped": lambda w: torch.utils.swap_tensors(
        w[1], nn.Parameter(FP8ExpertWeight(plain(w[1]).detach().clone(), Numerics()))
    ),
    "replaced": lambda w: w.__setitem__(1, w[0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_weight_ends_its_own_entry_and_no_other(way: str) -> None:
    weights = parameters()
    mlp(weights)
    before = keys()
    assert len(before) == 2
    WAYS[way](weights)
    gc.collect()
    assert len(keys()) == 1
    assert keys() < before


def test_whatever_holds_the_storage_keeps_the_entry() -> None:
    """Also where no Python object of a tensor or a storage is left, as in a graph of autograd's."""
    holders = {
        "view": lambda w: w[0, :3],
        "storage": lambda w: w.untyped_storage(),
        "graph": lambda w: (w[0] * torch.ones(16, requires_grad=True)).norm(),
    }
    for name, hold in holders.items():
        w = ROWS.w1.clone()
        grouped_mm(ROWS.x, w.mT, ROWS.offs, Numerics())
        held = hold(w)
        del w
        gc.collect()
        assert len(keys()) == 1, name
        del held
        assert not keys(), name


def test_many_uses_of_living_weights_find_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, made, quantize = parameters(), [], weight_cache.quantize
    monkeypatch.setattr(weight_cache, "quantize", lambda *a, **k: made.append(1) or quantize(*a, **k))
    for _ in range(3):
        mlp(weights).backward(ROWS.upstream)
        mlp(parameters())
        gc.collect()
    assert len(made) == 2 + 3 * 2
    assert len(keys()) == 2


def test_weights_that_go_while_others_are_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run within the cache, which holds its lock then."""
    gone, quantize = [parameters() for _ in range(2)], weight_cache.quantize
    for weights in gone:
        mlp(weights)
    del weights

    def collecting(*args: object, **kwargs: object) -> object:
        gone.clear()
        return quantize(*args, **kwargs)

    alive = parameters()
    monkeypatch.setattr(weight_cache, "quantize", collecting)
    mlp(alive)
    assert len(keys()) == 2


def test_a_failed_quantization_leaves_no_dead_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, quantize = [parameters()], weight_cache.quantize
    mlp(gone[0])

    def failing(*args: object, **kwargs: object) -> None:
        gone.clear()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(weight_cache, "quantize", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        mlp(parameters())
    assert not keys()
    monkeypatch.setattr(weight_cache, "quantize", quantize)
    mlp(parameters())


def test_a_new_weight_in_the_place_of_a_dead_one_is_left_alone() -> None:
    """A key that is named late, when somebody else lives there."""
    weights = parameters()
    mlp(weights)
    weight_cache._dead.extend(keys())
    weight_cache._drop_dead()
    assert len(keys()) == 2


def test_threads_that_make_and_lose_weights() -> None:
    alive = parameters()
    expected, wrong = mlp(alive).detach(), []

    def run() -> None:
        for _ in range(30):
            if not torch.equal(mlp(parameters()), expected) or not torch.equal(mlp(alive), expected):
                wrong.append(1)
            weight_cache.cached_bytes()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert len(keys()) == 2
    assert not weight_cache._dead


AT_EXIT = """
import torch
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.numerics import Numerics
weights = [FP8ExpertWeight(torch.randn(2, 16, 16), Numerics()) for _ in range(3)]
loop = [weights]
loop.append(loop)
for ws in (weights, [FP8ExpertWeight(torch.randn(2, 16, 16), Numerics()) for _ in range(3)]):
    expert_mlp(torch.randn(4, 16), *ws, torch.tensor([2, 4]), Numerics())
torch.held = ws
"""


def test_nothing_is_said_when_the_interpreter_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert not any(word in ended.stderr for word in ("Exception ignored", "Traceback")), ended.stderr
