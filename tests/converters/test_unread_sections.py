"""Keys of `[fp8]` that no converter of the run reads."""

import logging

import pytest

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.delayed_config import DelayedConfig
from converters.dense_config import FP8DenseConfig
from converters.token_config import TokenPathConfig
from converters.unread_sections import check_sections
from tests.converters.test_conversion import job

EXPERTS, DENSE = "fp8.grouped_experts", "fp8.dense"
SECTIONS = {
    "grouped_experts": (FP8GroupedExpertsConfig(recipe="rowwise"), "recipe = 'rowwise'", EXPERTS),
    "dense": (FP8DenseConfig(fqns=["attention"], cache=False), "fqns = ['attention'], cache = False", DENSE),
    "token_path": (TokenPathConfig(fused="off"), "fused = 'off'", EXPERTS),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_without_its_converter_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    section, keys, reader = SECTIONS[name]
    job_config = job(*{EXPERTS, DENSE} - {reader})
    job_config.fp8 = FP8Config(**{name: section})
    with caplog.at_level(logging.WARNING):
        check_sections(job_config)
    (message,) = [r.getMessage() for r in caplog.records]
    assert message.startswith(f"[fp8.{name}] {keys} is read by the converter '{reader}' only, which model.converters")
    job_config.model.converters = [reader]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_sections(job_config)
    assert not caplog.records


@pytest.mark.parametrize("converters", [[], [DENSE]], ids=["none", "dense"])
def test_a_token_path_that_must_be_fused_needs_its_converter(converters: list[str]) -> None:
    job_config = job(*converters)
    job_config.fp8 = FP8Config(token_path=TokenPathConfig(fused="on"))
    with pytest.raises(ValueError, match=r"fused = 'on' is read by the converter 'fp8.grouped_experts' only.*add it"):
        check_sections(job_config)


@pytest.mark.parametrize("reader", [EXPERTS, DENSE])
def test_options_of_delayed_scales_without_delayed_scales_are_named(reader: str, caplog) -> None:
    delayed = DelayedConfig(margin=2)
    experts, dense = FP8GroupedExpertsConfig(recipe="delayed"), FP8DenseConfig(recipe="delayed")
    section = {"grouped_experts": experts} if reader == EXPERTS else {"dense": dense}
    job_config = job(reader)
    for fp8, said in ((FP8Config(delayed=delayed), 1), (FP8Config(delayed=delayed, **section), 0)):
        job_config.fp8 = fp8
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_sections(job_config)
        assert [r.getMessage().startswith("[fp8.delayed] margin = 2 is read with") for r in caplog.records] == [
            True
        ] * said


def test_defaults_are_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    job_config = job()
    job_config.fp8 = FP8Config()
    with caplog.at_level(logging.WARNING):
        check_sections(job_config)
    assert not caplog.records
