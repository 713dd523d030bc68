"""bench_e2e's command line: what cannot be measured is refused before anything runs."""

import sys
from pathlib import Path

import pytest
import torch

from recipes import bench_e2e
from recipes.bench_e2e import main


@pytest.mark.parametrize(
    ("gpus", "args", "message"),
    [
        (0, [], "timed on GPUs, and there is none: on a CPU there is `python -m recipes.bench`"),
        (0, ["--ngpu", "0"], "--ngpu: 0 is no number of GPUs: give a whole number, 1 or more"),
        (2, ["--ngpu", "99"], "--ngpu 99: this machine has 2: give 2 or less"),
        (1, ["--timeout", "0"], "--timeout: 0 is no number of seconds"),
        (1, ["--recipe", "recipes/lama4"], "there is no recipes/lama4_bf16.toml: give the stem of two twins"),
        (1, ["--layouts", "fsdpp"], "--layouts fsdpp: choose of single, fsdp, fsdp_ep"),
        (1, ["--layouts", ""], "--layouts: '' lacks a name: give one or more"),
        (1, ["--layouts", "fsdp , x"], "--layouts x: choose of"),
        (1, ["--out", "recipes"], "--out: recipes is a folder"),
        (1, ["--recipe", "recipes/llama4_fp8"], "there is no recipes/llama4_fp8_bf16.toml"),
        (1, ["--recipe", "recipes/llama4_fp8.toml:"], "lacks a flavor behind its colon"),
        (1, ["--recipe", "recipes/llama4:nope"], "bf16.toml: llama4 has no flavor 'nope': choose one of debugmodel,"),
        (1, ["--recipe", "recipes/llama4"] * 2, "recipes/llama4 and recipes/llama4 would both run in the folders of"),
        (
            1,
            ["--recipe", "recipes/llama4:debug", "--recipe", "recipes/mixtral_fp8.toml:debug"],
            "recipes/llama4:debug and recipes/mixtral:debug would both run in the folders of debug",
        ),
        (1, ["--layouts", "single,single"], "--layouts: single is there twice"),
        (1, ["--layouts", "fsdp"], "--layouts fsdp with --ngpu 1: it is a layout of several GPUs: give --ngpu 2 or"),
        (1, ["--layouts", "single,fsdp_ep"], "--layouts fsdp_ep with --ngpu 1: it is a layout of several GPUs"),
        (2, ["--layouts", "single"], "--layouts single with --ngpu 2: it is a layout of one GPU: give --ngpu 1"),
        *[
            (
                1,
                ["--", *extra.split()],
                f"{extra.split()[0].partition('=')[0]} after --: the measurement sets it itself",
            )
            for extra in (
                "--training.steps 5",
                "--metrics.log-freq=7",
                "--metrics.no-enable-tensorboard",
                "--profiling.no_enable_profiling",
                "--profiling.profiler_active=2",
                "--job.dump_folder=x",
                "--job.config-file x.toml",
                "--model.flavor=debug",
                "--model.converters=fp8.dense",
                "--fp8.grouped-experts.ep-fp8-dispatch=on",
            )
        ],
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(
    gpus: int, args: list[str], message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["bench_e2e", *args])
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_twins_file_name_and_a_free_argument_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(bench_e2e, "measure", lambda job, timeout: ran.append(job) or {"name": job.name, "error": "x"})
    monkeypatch.setattr(bench_e2e, "show", lambda results: None)
    monkeypatch.chdir(Path(__file__).parents[2])
    extra = ["--training.seq_len=64", "--parallelism.expert_parallel_degree", "2"]
    main(["--recipe", "recipes/llama4_fp8.toml:300m", "--out", str(tmp_path / "e.json"), "--", *extra])
    assert {job.recipe for job in ran} == {"recipes/llama4:300m"}
    assert [job.layout for job in ran] == ["fsdp"] * 4 + ["fsdp_ep"] * 4
    assert all(list(job.command[-3:]) == extra for job in ran)
