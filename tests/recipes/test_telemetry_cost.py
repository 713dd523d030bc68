"""What a measured step costs the host: operators, waits for the device, events of TensorBoard."""

from collections import Counter

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.metrics import BaseLogger, LoggerContainer, TensorBoardLogger

from converters.config import FP8DenseConfig, FP8GroupedExpertsConfig
from converters.fp8_dense import convert_dense
from converters.fp8_grouped_experts import convert
from recipes.recording import RecordingLogger
from recipes.runs import read_run
from tests.converters.models import llama4, materialized
from tests.recipes.test_telemetry import Trainer

# Of Python, and of operators that look at values: on a GPU each waits for all that was started before.
WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
WAITING_OPERATORS = {
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
}


def experts_in_fp8(layers: int) -> nn.Module:
    model = llama4(n_layers=layers)
    convert(model, FP8GroupedExpertsConfig(backend="reference"))
    return materialized(model)


def linears_in_fp8(layers: int) -> nn.Module:
    model = llama4(n_layers=layers, moe_every=2)
    convert_dense(model, FP8DenseConfig(backend="reference", fqns=["layers.*.attention.wo"]))
    return materialized(model)


def operators(training: Trainer, step: int) -> Counter:
    """How often each is called from Python in a step; what an operator calls itself is not counted."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        training.step(step)
    called = [e for e in seen.events() if e.name.startswith("aten::")]
    return Counter(e.name for e in called if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::"))


def added(model: nn.Module) -> int:
    """Operators that a measured step has more than another."""
    training = Trainer(model, 4)
    training.step(3)
    measured, other = operators(training, 4), operators(training, 5)
    training.close()
    return measured.total() - other.total()


@pytest.mark.parametrize(
    ("build", "by_module", "by_step"), [(experts_in_fp8, 375, 170), (linears_in_fp8, 160, 170)], ids=["mlp", "linear"]
)
def test_operators_of_a_measured_step(build, by_module, by_step):
    """Where the host bounds a step they are its cost: before they were summed up once a step 900 an MLP."""
    one, three = added(build(1)), added(build(3))
    assert 0 < (three - one) / 2 <= by_module
    assert one - (three - one) / 2 <= by_step


def test_a_measured_step_waits_for_the_device_once(monkeypatch):
    waits = Counter()

    def counted(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            waits[name] += 1
            return original(self, *args, **kwargs)

        return method

    training = Trainer(experts_in_fp8(2), 4)
    for step in (1, 2, 3):  # in the first one ranks agree on what there is to measure
        training.step(step)
    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    found = []
    for step in (4, 5):
        waits.clear()
        called = operators(training, step)
        found.append((waits.copy(), sum(called[name] for name in WAITING_OPERATORS)))
    training.close()
    (measured, inside), (other, inside_other) = found
    assert measured - other == Counter(tolist=1)
    assert inside == inside_other


def test_scalars_of_a_step_are_one_event(tmp_path):
    given = []

    class Other(BaseLogger):
        def log(self, metrics, step):
            given.append((metrics, step))

    inner = LoggerContainer()
    inner.add_logger(TensorBoardLogger(str(tmp_path / "tb")))
    inner.add_logger(Other())
    logger = RecordingLogger(inner)
    scalars = {f"fp8/layers.{n}.moe.experts/x/amax": n / 3 for n in range(50)}
    logger.log_at_once(scalars, 7)
    logger.close()
    (file,) = (tmp_path / "tb").iterdir()
    assert [len(event.summary.value) for event in EventFileLoader(str(file)).Load() if event.step == 7] == [50]
    run = read_run(tmp_path)
    assert all(run.series(tag) == {7: pytest.approx(value)} for tag, value in scalars.items())
    assert given == [(scalars, 7)]
