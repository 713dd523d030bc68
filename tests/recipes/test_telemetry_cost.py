"""What a measured step costs the host: events of TensorBoard."""

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torchtitan.components.metrics import BaseLogger, LoggerContainer, TensorBoardLogger

from recipes.recording import RecordingLogger
from recipes.runs import read_run


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
