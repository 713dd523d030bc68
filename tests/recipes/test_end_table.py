"""Commands at the end of a run."""

import pytest
from rich.console import Console

from recipes.end_table import RunSummary, end_table
from recipes.telemetry_table import TelemetrySummary, telemetry_table


@pytest.mark.parametrize("converters", [(), ("fp8.grouped_experts",)])
def test_commands_can_be_copied_whatever_the_folder_is_called(converters, capsys):
    numbers = dict.fromkeys(("loss", "val_loss", "test_loss", "non_finite_step", "tokens_per_second"))
    folder = {"folder": "out/a [bold] run", "tensorboard": "out/a [bold] run/tb"}
    done = {"steps_done": 1, "steps_planned": 1, "peak_memory_gib": None, "mfu": "n/a", "converters": converters}
    Console(width=120).print(end_table(RunSummary(**numbers, **done, **folder)))
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    pair = "BF16_RUN 'out/a [bold] run'" if converters else "'out/a [bold] run' FP8_RUN"
    assert {"run out/a [bold] run", "curves tensorboard --logdir 'out/a [bold] run/tb'"} <= set(rows)
    assert f"compare python -m recipes.compare {pair}" in rows


def test_a_table_of_one_step_has_a_command_that_can_be_copied(capsys):
    seen = TelemetrySummary()
    seen.add(1, {})
    Console(width=120).print(telemetry_table(seen, "out/a [bold] run"))
    assert "why, and what to do: python -m recipes.diagnose 'out/a [bold] run'" in capsys.readouterr().out
