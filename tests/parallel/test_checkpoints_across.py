"""Checkpoints of FP8 runs: resumed, in other layouts, in BF16 runs, in torchtitan without us, and all of it backwards.

Two ranks with FSDP2 and EP 2 train six steps in FP8, and save after the third. What is loaded from there must be the
same bits; what goes on from there, the same curve.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from converters.expert_weight import FP8ExpertWeight
from tests.helpers import distributed
from tests.parallel.checks import checks_of, expect_no_error, run_checks
from tests.parallel.matrix import Curve, RowTrainer, build, make_seed_checkpoint
from tests.parallel.rows import Row

ROOT = Path(__file__).parents[2]
WIRES = {"fsdp_fp8_all_gather": "on", "ep_fp8_dispatch": "on"}
SAVED = Row(shard=2, ep=2).with_fp8(**WIRES)
SAVES = {"checkpoint__enable": True, "checkpoint__interval": 1}
FULL = {"checkpoint__initial_load_model_only": False}


def at(folder: Path, name: str, step: int = 3) -> Path:
    return folder / name / "checkpoint" / f"step-{step}"


def weights(trainer: RowTrainer) -> dict[str, Tensor]:
    """Everything a checkpoint has of the model, whole, on every rank (of its pipeline stage)."""
    state = trainer.checkpointer.states["model"].state_dict()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in state.items()}


def expect_weights(actual: dict[str, Tensor], expected: dict[str, Tensor], all_of_them: bool = True) -> None:
    assert actual.keys() == expected.keys() if all_of_them else actual.keys() <= expected.keys()
    different = [name for name, t in actual.items() if not torch.equal(t, expected[name])]
    assert not different, different


def unbroken(row: Row, folder: Path, name: str) -> Curve:
    """Six steps, saved after the third."""
    trainer = build(row.but(**SAVES), at(folder, "seed", 0), folder / name)
    trainer.steps(3)
    trainer.checkpointer.save(trainer.step)
    saved = weights(trainer)
    trainer.steps(3)
    trainer.close()
    if dist.get_rank() == 0:
        torch.save(saved, folder / f"{name}.pt")
        (folder / f"{name}.json").write_text(json.dumps(trainer.curve))
    return trainer.curve


def resumed(row: Row, folder: Path, name: str) -> Curve:
    """A new trainer on the same folder: the steps after the saved one."""
    trainer = build(row.but(**SAVES), at(folder, "seed", 0), folder / name)
    assert trainer.step == 3
    trainer.steps(3)
    trainer.close()
    return trainer.curve


def loaded(row: Row, folder: Path, checkpoint: Path) -> RowTrainer:
    trainer = build(row.but(**FULL), checkpoint, folder / "elsewhere")
    assert trainer.step > 0
    return trainer


def two_a_unbroken_run_and_its_resumption_are_the_same(folder: Path) -> None:
    """Case 29, bit for bit: weights, optimizer, routing bias, learning rate, position in the data."""
    assert unbroken(SAVED, folder, "saved")[3:] == resumed(SAVED, folder, "saved")


def two_a2_a_checkpoint_replaces_weights_that_were_in_use(folder: Path) -> None:
    """What was quantized from the weights before the load serves no step after it."""
    trainer = build(SAVED.but(**SAVES), at(folder, "seed", 0), folder / "saved")
    trainer.steps(2)
    trainer.checkpointer.load(step=3)
    assert trainer.step == 3
    trainer.steps(1)
    assert list(trainer.curve[2]) == json.loads((folder / "saved.json").read_text())[3]


def two_b_with_gradient_accumulation_and_without_ep(folder: Path) -> None:
    row = Row(shard=2).with_fp8(**WIRES).but(training__local_batch_size=1)
    assert unbroken(row, folder, "accumulated")[3:] == resumed(row, folder, "accumulated")


def two_c_texts_go_on_where_they_stopped(folder: Path) -> None:
    """The recipes' own loader under gradient accumulation: documents, sharded over the ranks, packed."""
    file = folder / "documents.jsonl"
    lines = [json.dumps({"text": f"Document {i}: " + f"{i} bottles of beer, " * (5 + i % 7)}) + "\n" for i in range(60)]
    if dist.get_rank() == 0:
        file.write_text("".join(lines))
    dist.barrier()
    row = SAVED.but(training__dataset="jsonl", training__dataset_path=str(file), training__local_batch_size=2)
    curve = unbroken(row, folder, "texts")
    assert len({loss for loss, _ in curve}) == 6
    assert curve[3:] == resumed(row, folder, "texts")


def two_d_saved_while_training_goes_on(folder: Path) -> None:
    """async: the weights move on while a thread writes; what is written is the third step's."""
    row = SAVED.but(checkpoint__async_mode="async")
    curve = unbroken(row, folder, "async")
    assert curve[3:] == resumed(row, folder, "async")
    expect_weights(torch.load(folder / "async.pt"), torch.load(folder / "saved.pt"))


def two_e_a_checkpoint_is_plain(folder: Path) -> None:
    """Tensors and numbers only; nothing that names our classes, which weights_only would refuse (ao#4782, tt#4240)."""
    entries = FileSystemReader(at(folder, "saved")).read_metadata().state_dict_metadata
    experts = [f"layers.{layer}.moe.experts.{w}" for layer in (0, 1) for w in ("w1", "w2", "w3")]
    states = [f"optimizer.state.{name}.{moment}" for name in experts for moment in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(entries[name], TensorStorageMetadata) for name in experts + states)
    for file in at(folder, "saved").iterdir():
        content = file.read_bytes()
        assert not [w for w in (b"converters", b"FP8ExpertWeight", b"WrappedWeight") if w in content], file.name


def two_f_bf16_opens_fp8_and_fp8_opens_bf16(folder: Path) -> None:
    """Case 30. One step of the BF16 twin from the FP8 checkpoint, saved, opened by FP8 again."""
    expected = torch.load(folder / "saved.pt")
    twin = build(Row(shard=2, ep=2).but(**FULL, **SAVES), at(folder, "saved"), folder / "twin")
    expect_weights(weights(twin), expected)
    twin.steps(1)
    twin.checkpointer.save(twin.step)
    in_bf16 = weights(twin)
    assert not torch.equal(in_bf16["layers.0.moe.experts.w1"], expected["layers.0.moe.experts.w1"])
    back = loaded(SAVED, folder, at(folder, "twin", 4))
    assert type(back.model_parts[0].layers["0"].moe.experts.w1._local_tensor) is FP8ExpertWeight
    expect_weights(weights(back), in_bf16)
    # The loss is what the new weights give, not those that the trainer began with.
    back.steps(1)
    unbroken_curve = json.loads((folder / "saved.json").read_text())
    assert abs(back.curve[0][0] - unbroken_curve[4][0]) < 2e-3 * unbroken_curve[4][0]


def two_g_a_pipeline_saves_what_one_process_can_load(folder: Path) -> None:
    row = Row(pp=2).with_fp8(**WIRES)
    schedule = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    row = row.but(parallelism__pipeline_parallel_microbatch_size=2, **schedule)
    trainer = build(row.but(**FULL, **SAVES), at(folder, "saved"), folder / "pipeline")
    expect_weights(weights(trainer), torch.load(folder / "saved.pt"), all_of_them=False)
    trainer.checkpointer.save(trainer.step)


def four_loads_what_two_saved(folder: Path) -> None:
    """Case 31: EP 2 -> EP 4, FSDP 2 -> FSDP 4, and more; the same weights, then the same loss."""
    expected, curve = torch.load(folder / "saved.pt"), json.loads((folder / "saved.json").read_text())
    rows = {
        "EP 4": Row(shard=4, ep=4),
        "FSDP 4": Row(shard=4),
        "FSDP 2 of EP 2": Row(shard=4, ep=2),
        "HSDP": Row(replicate=2, shard=2, ep=2),
        "TP 2 with EP 2": Row(shard=2, tp=2, ep=2, etp=2),
    }
    for name, row in rows.items():
        trainer = loaded(row.with_fp8(**WIRES), folder, at(folder, "saved"))
        expect_weights(weights(trainer), expected)
        trainer.steps(1)
        for actual, wanted in zip(trainer.curve[0], curve[3], strict=True):
            assert abs(actual - wanted) <= 2e-5 * wanted, (name, trainer.curve[0], curve[3])


def one_loads_what_two_saved(folder: Path) -> None:
    """EP 2 -> EP 1, and stages of a pipeline put together."""
    expected, curve = torch.load(folder / "saved.pt"), json.loads((folder / "saved.json").read_text())
    for name in ("saved", "pipeline"):
        trainer = loaded(Row().with_fp8(), folder, at(folder, name))
        expect_weights(weights(trainer), expected)
        trainer.steps(1)
        for actual, wanted in zip(trainer.curve[0], curve[3], strict=True):
            assert abs(actual - wanted) <= 2e-5 * wanted, (name, trainer.curve[0], curve[3])


def one_opens_what_stock_torchtitan_saved(folder: Path) -> None:
    trainer = loaded(
        Row().with_fp8().but(checkpoint__exclude_from_loading=["dataloader"]), folder, at(folder, "stock", 4)
    )
    assert trainer.step == 4
    expect_weights(weights(trainer), torch.load(folder / "stock" / "stepped.pt"))
    trainer.steps(1)


ON_TWO, ON_FOUR, ON_ONE = (checks_of(globals(), prefix) for prefix in ("two_", "four_", "one_"))


@distributed(1)
def seed(folder: str) -> None:
    make_seed_checkpoint("four_experts", Path(folder) / "seed")


@distributed(2, timeout_s=240)
def run_on_two(folder: str) -> None:
    run_checks(ON_TWO, Path(folder))


@distributed(4, timeout_s=240)
def run_on_four(folder: str) -> None:
    run_checks(ON_FOUR, Path(folder))


@distributed(1)
def run_on_one(folder: str) -> None:
    run_checks(ON_ONE, Path(folder))


def run_stock(folder: Path) -> subprocess.CompletedProcess:
    (folder / "stock").mkdir()
    command = [sys.executable, "-m", "tests.parallel.stock", str(at(folder, "saved")), str(folder / "stock")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    seed(str(folder))
    run_on_two(str(folder))
    (folder / "stock.log").write_text(repr(run_stock(folder)))
    run_on_four(str(folder))
    run_on_one(str(folder))
    return folder


@pytest.mark.parametrize(("name", "ranks"), [(n, r) for r, c in ((2, ON_TWO), (4, ON_FOUR), (1, ON_ONE)) for n in c])
def test_checkpoint(name: str, ranks: int, results: Path) -> None:
    expect_no_error(name, results, ranks)


def test_stock_torchtitan_opens_an_fp8_checkpoint(results: Path) -> None:
    loaded_by_stock = results / "stock" / "loaded.pt"
    assert loaded_by_stock.exists(), (results / "stock.log").read_text()
    expect_weights(torch.load(loaded_by_stock, weights_only=True), torch.load(results / "saved.pt"))
