"""Which steps are measured, what of a step, over all ranks; and nothing at all when telemetry is off."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.utils.tensorboard import SummaryWriter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from converters.config import FP8Config, FP8GroupedExpertsConfig
from converters.fp8_grouped_experts import convert
from converters.telemetry import _claims, release
from converters.telemetry_config import FP8TelemetryConfig
from recipes.finite import GradientWatch
from recipes.reporting import ReportingMetricsProcessor
from recipes.runs import read_run
from recipes.telemetry import Telemetry
from recipes.telemetry_report import MeasuringMetricsProcessor, build_metrics_processor
from recipes.telemetry_tags import parse
from tests.converters.models import llama4, materialized
from tests.helpers import DEVICE, distributed

VOCABULARY = 128


def fp8_llama(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = llama4(n_layers=2)
    convert(model, FP8GroupedExpertsConfig(backend="reference", **options))
    return materialized(model)


def micro_batch(model: nn.Module, seed: int, rows: int = 2) -> None:
    torch.manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, 16), device=DEVICE)
    out = model(tokens)
    out.backward(torch.randn_like(out))


class Trainer:
    """Steps in torchtitan's order, with `watch` and `telemetry` where the metrics processor has them."""

    def __init__(self, model: nn.Module, every: int, **options: object) -> None:
        self.model = model
        self.watch = GradientWatch([model])
        self.telemetry = Telemetry([model], every, owns_plain=True, **options)
        self.watch.before_clipping = self.telemetry.before_clipping
        self.watch.install()

    def step(self, step: int, micro_batches: int = 1) -> tuple[dict[str, float] | None, float]:
        """The figures and the gradient norm."""
        self.model.zero_grad()
        for i in range(micro_batches):
            micro_batch(self.model, 100 * step + i)
        norm = dist_utils.clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
        for module in self.model.modules():  # as the optimizer's hook of torchtitan
            if hasattr(module, "tokens_per_expert"):
                module.tokens_per_expert.zero_()
        figures = self.telemetry.end_step(step, self.watch.latest)
        self.watch.end_step(step, look_now=False)
        return figures, float(norm)

    def close(self) -> None:
        self.watch.remove()
        self.telemetry.remove()


@pytest.fixture
def trainer():
    made = []

    def build(model: nn.Module, every: int, **options: object) -> Trainer:
        made.append(Trainer(model, every, **options))
        return made[-1]

    yield build
    for each in reversed(made):  # each has put its clipping around that of the one before
        each.close()


def test_measured_steps_and_their_figures(trainer):
    training = trainer(fp8_llama(), 4)
    results = {step: training.step(step) for step in range(1, 9)}
    assert [step for step, (figures, _) in results.items() if figures is not None] == [1, 2, 4, 8]
    for figures, norm in (results[1], results[8]):
        modules = {found[0] for tag in figures if (found := parse(tag))}
        assert modules == {"layers.0.moe.experts", "layers.1.moe.experts"}
        assert sum(v**2 for t, v in figures.items() if t.startswith("fp8/grad_norm/")) ** 0.5 == pytest.approx(norm)
        sqnrs = [v for t, v in figures.items() if t.endswith("sqnr_db")]
        assert len(sqnrs) == 2 * 12
        assert 26 < min(sqnrs) < max(sqnrs) < 40
        for layer in ("fp8/layers.0.moe", "fp8/layers.1.moe"):
            shares = [figures[f"{layer}/load/{e}"] for e in range(4)]
            assert sum(shares) == pytest.approx(1)
            assert figures[f"{layer}/load_max_over_mean"] == pytest.approx(4 * max(shares))
            assert figures[f"{layer}/empty_experts"] == shares.count(0)


def test_a_step_is_its_first_micro_batch_and_the_loads_of_all(trainer, monkeypatch):
    training = trainer(fp8_llama(), 1)
    counted = {}
    monkeypatch.setattr("recipes.telemetry.operand_figures", lambda r: {"rows": r[6] / 64})
    monkeypatch.setattr("recipes.telemetry.load_figures", lambda c, t: counted.update(rows=sum(c)) or {})
    figures, _ = training.step(1, micro_batches=3)
    top_k, tokens = 2, 2 * 16
    assert figures["fp8/layers.1.moe.experts/x/rows"] == top_k * tokens
    assert counted["rows"] == 3 * top_k * tokens


def test_validation_and_made_up_values_are_not_measured(trainer):
    model = fp8_llama()
    training = trainer(model, 1)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.int64, device=DEVICE))
    model.train()
    model.rehearses = True  # as parallel/pipeline.py
    micro_batch(model, 0, rows=1)
    model.rehearses = False
    assert not training.telemetry._open
    assert training.step(1)[0]["fp8/layers.1.moe.experts/x/amax"] > 0


def test_a_resumed_run_measures_its_first_step_only_if_it_is_due(trainer):
    assert trainer(fp8_llama(), 4).step(12)[0] is not None
    other = trainer(fp8_llama(), 4)
    assert other.step(13)[0] is None
    assert other.step(14)[0] is None
    assert not other.telemetry._open  # nor is anything collected


def test_no_telemetry_leaves_no_trace(trainer):
    release()
    claims = len(_claims)
    with_it = fp8_llama()
    training = trainer(with_it, 100)
    plain = fp8_llama()
    for step in (1, 2, 3):
        training.step(step)
    training.close()
    assert len(_claims) == claims
    assert not with_it._forward_pre_hooks
    plain.zero_grad()
    with_it.zero_grad()
    for model in (plain, with_it):
        micro_batch(model, 7)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), with_it.parameters(), strict=True))


def test_a_bf16_model_has_loads_and_norms(trainer):
    model = materialized(llama4(n_layers=2, use_grouped_mm=False))
    figures, norm = trainer(model, 1).step(1)
    assert not [t for t in figures if parse(t)]
    assert {t.split("/")[1] for t in figures} == {"grad_norm", "layers.0.moe", "layers.1.moe"}
    assert sum(v**2 for t, v in figures.items() if t.startswith("fp8/grad_norm/")) ** 0.5 == pytest.approx(norm)


def test_a_nan_is_seen_in_the_figures(trainer):
    model = fp8_llama()
    with torch.no_grad():
        model.tok_embeddings.weight[:64] = math.nan
    figures, norm = trainer(model, 1).step(1)
    assert math.isnan(norm)
    assert figures["fp8/layers.0.moe.experts/x/non_finite"] > 0
    assert math.isinf(figures["fp8/layers.0.moe.experts/x/amax"])
    assert math.isnan(figures["fp8/layers.0.moe.experts/x/sqnr_db"])
    assert math.isnan(figures["fp8/grad_norm/experts"])


def one_step_of_two(rank: int, sharded: bool) -> dict[str, float]:
    model = fp8_llama(fsdp_fp8_all_gather="on" if sharded else "off")
    if sharded:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        for block in model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    training = Trainer(model, 1)
    training.model.zero_grad()
    for seed in (rank,) if sharded else (0, 1):
        micro_batch(model, seed)
    dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
    figures = training.telemetry.end_step(1, training.watch.latest)
    training.close()
    return figures


@distributed(2)
def test_two_ranks_add_up():
    rank = dist.get_rank()
    figures = one_step_of_two(rank, sharded=True)
    both: list[dict] = [{}, {}]
    dist.all_gather_object(both, figures)
    assert both[0] == both[1]
    dist.destroy_process_group()
    alone = one_step_of_two(rank, sharded=False)  # two micro-batches, of which the first counts
    for tag, value in alone.items():
        if "/load" in tag or "empty" in tag:
            assert figures[tag] == value, tag
        elif "/grad_norm/" in tag:
            assert 2 * figures[tag] == pytest.approx(value, rel=0.02), tag  # FSDP2 averages
    assert figures["fp8/layers.1.moe.experts/x/amax"] >= alone["fp8/layers.1.moe.experts/x/amax"]
    assert figures["fp8/layers.1.moe.experts.w2/w/amax"] == alone["fp8/layers.1.moe.experts/w2/amax"]
    assert figures["fp8/layers.1.moe.experts.w2/w/sqnr_db"] == pytest.approx(31.5, abs=0.3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def processor(tmp_path, monkeypatch, every: int, twin: str = "") -> ReportingMetricsProcessor:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    config = JobConfig()
    config.fp8 = FP8Config(telemetry=FP8TelemetryConfig(every=every, twin=twin))
    config.job.dump_folder = str(tmp_path / "run")
    config.metrics.enable_tensorboard, config.metrics.log_freq, config.training.steps = True, 2, 4
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    return build_metrics_processor(config, dims)


def test_the_processor_measures_logs_and_prints(tmp_path, monkeypatch, capsys):
    writer = SummaryWriter(str(tmp_path / "twin" / "tb"))
    for e, share in enumerate((0.4, 0.3, 0.2, 0.1)):
        writer.add_scalar(f"fp8/layers.1.moe/load/{e}", share, 3)
    writer.close()
    run = processor(tmp_path, monkeypatch, 3, twin=str(tmp_path / "twin"))
    assert isinstance(run, MeasuringMetricsProcessor)
    model = fp8_llama()
    run.num_flops_per_token, run.model_parts = 1000, [model]
    for step in range(1, 5):
        model.zero_grad()
        micro_batch(model, step)
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        run.should_log(step)
    run.close()
    seen = read_run(tmp_path / "run")
    assert list(seen.series("fp8/layers.0.moe.experts/dy13/flushed")) == [1, 2, 3]  # 3 is no step that logs
    assert list(seen.series("fp8/layers.1.moe/twin_agreement")) == [3]
    out = " ".join(capsys.readouterr().out.split())
    assert "FP8 telemetry of 3 steps, 1 to 3" in out
    assert "gradient norms at step 3, before clipping: " in out
    assert f"python -m recipes.diagnose {tmp_path / 'run'}" in out


def test_off_is_the_processor_of_before(tmp_path, monkeypatch):
    run = processor(tmp_path, monkeypatch, 0)
    assert type(run) is ReportingMetricsProcessor
    run.close()


def test_a_twin_without_loads_is_refused(tmp_path, monkeypatch):
    writer = SummaryWriter(str(tmp_path / "twin" / "tb"))
    writer.add_scalar("grad_norm", 1.0, 1)
    writer.close()
    with pytest.raises(
        ValueError, match=r"has recorded no loads of its experts: train it with --fp8.telemetry.every 3"
    ):
        processor(tmp_path, monkeypatch, 3, twin=str(tmp_path / "twin"))
    with pytest.raises(ValueError, match=r"\[fp8.telemetry\] twin: .*nowhere is not a folder"):
        processor(tmp_path, monkeypatch, 3, twin=str(tmp_path / "nowhere"))
