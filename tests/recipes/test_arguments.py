"""What the commands refuse on their command lines: in one sentence, before anything is read, trained or written."""

import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from recipes import bench_e2e, compare, compare_outputs, convert_hf, diagnose, make_tokenizer, parity, sqnr
from recipes.arguments import out_file, out_folder
from recipes.issue1152 import __main__ as issue1152
from recipes.issue1152.arms import reason
from recipes.runs import TAGS

SQNR = ("recipes/mixtral_fp8.toml",)
REFUSED = [
    (compare.main, ("a", "b", "--smooth", "x"), "x steps cannot be averaged: give a whole number, 1 or more"),
    (compare.main, ("a", "b", "--max-loss-gap", "x"), "x is no limit: give a finite number, 0 or more"),
    (compare.main, ("a", "b", "--watch", "-1"), "-1 is no pause: give a number of seconds above 0"),
    (compare.main, ("a", "b", "--html", "{folder}"), "{folder} is a folder: give the name of a file in it"),
    (compare.main, ("a", "b", "--png", "{file}/x.png"), "{file}/x.png cannot be made, since {file} is a file"),
    (compare.main, ("a", "b", "--out", "{file}"), "{file} is a file: give a folder"),
    (
        compare.main,
        ("a", "b", "--out", "{folder}/x/y"),
        "there is no folder {folder}/x for y: make it, or mend its name",
    ),
    (compare.main, ("a", "b", "--html", "{folder}/x/y.html"), "there is no folder {folder}/x for y.html: make it, or"),
    (compare.main, ("a", "b", "--png", "{folder}/x/y.png"), "there is no folder {folder}/x for y.png: make it, or"),
    (diagnose.main, ("a", "--top", "0"), "0 is no number of modules: give a whole number, 1 or more"),
    (parity.main, ("--jobs", "0"), "0 is no number of runs: give a whole number, 1 or more"),
    (parity.main, ("--budget", "nan"), "nan is no budget: give a number of seconds above 0"),
    (parity.main, ("--out", "{folder}"), "{folder} is a folder"),
    (parity.main, ("--out", "{folder}/x/y.json"), "there is no folder {folder}/x for y.json: make it, or mend"),
    (parity.main, ("--folder", "{folder}/x/y"), "there is no folder {folder}/x for y: make it, or mend"),
    (bench_e2e.main, ("--out", "{folder}/x/y.json"), "there is no folder {folder}/x for y.json: make it, or mend"),
    (sqnr.main, (*SQNR, "--floor", "nan"), "nan is no floor: give a finite number of dB"),
    (sqnr.main, (*SQNR, "--rows", "0"), "0 is no number of rows: give a whole number, 1 or more"),
    (sqnr.main, (*SQNR, "--warmup", "-1"), "-1 is no number of steps: give a whole number, 0 or more"),
    (sqnr.main, (*SQNR, "--out", "{folder}"), "{folder} is a folder"),
    (sqnr.main, (*SQNR, "--out", "{folder}/x/y.json"), "there is no folder {folder}/x for y.json: make it, or mend"),
    (issue1152.main, ("--steps", "0"), "0 is no number of steps: give a whole number, 1 or more"),
    (issue1152.main, ("--jobs", "0"), "0 is no number of arms: give a whole number, 1 or more"),
    (issue1152.main, ("--arms", ""), "'' lacks a name: give one or more, with a comma between two"),
    (sqnr.main, (*SQNR, "--converters", "a,"), "'a,' lacks a name: give one or more, with a comma between two"),
    (issue1152.main, ("--lr", "nan"), "nan is no learning rate: give a number above 0"),
    (issue1152.main, ("--out", "{file}"), "{file} is a file: give a folder"),
    (issue1152.main, ("--out", "{folder}/x/y"), "there is no folder {folder}/x for y: make it, or mend"),
    (make_tokenizer.main, ("--out", "{file}"), "{file} is a file: give a folder"),
    (make_tokenizer.main, ("--out", "{folder}", "--vocab-size", "99"), "99 cannot hold 256 bytes and 2 special tokens"),
    (
        convert_hf.main,
        ("from-hf", "x", "{folder}/x/y"),
        "there is no folder {folder}/x for y: make it, or mend its name",
    ),
    (
        convert_hf.main,
        ("to-hf", "x", "y", "--max-shard-gb", "0"),
        "0 is no size of a file: give a number of GB",
    ),
]


@pytest.mark.parametrize(("main", "arguments", "message"), REFUSED)
def test_a_wrong_argument_is_refused_with_its_value_and_a_remedy(main, arguments, message, tmp_path, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="2"):
        main([text.format(folder=tmp_path, file=file) for text in arguments])
    assert message.format(folder=tmp_path, file=file) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_what_lies_in_outputs_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("outputs/a/b/c", str(tmp_path / "outputs" / "a" / "b"), "new"):
        assert out_file(text) == out_folder(text) == Path(text)
    assert not list(tmp_path.iterdir())


def test_a_table_that_is_not_there_is_not_put_into_a_readme(tmp_path, capsys) -> None:
    assert issue1152.main(["--readme", str(tmp_path)]) == 2
    assert "has no table.json and table.md: give the folder that a call has written." in capsys.readouterr().err


def test_paths_are_printed_as_they_are(tmp_path: Path, monkeypatch, capsys) -> None:
    """A folder may be named like a colour of the terminal."""
    monkeypatch.setattr("recipes.compare_outputs.plot_report", lambda report, path: path.touch())
    bf16, fp8 = tmp_path / "bf16", tmp_path / "fp8 [bold] x"
    for home in (bf16, fp8):
        writer = SummaryWriter(str(home / "tb" / "a"))
        for step in range(1, 41):
            writer.add_scalar(TAGS["loss"], 10 - 0.1 * step, step)
        writer.close()
    assert compare.main([str(bf16), str(fp8)]) == 0
    assert f"Numbers: {fp8}/compare.json" in capsys.readouterr().out
    assert json.loads((fp8 / "compare.json").read_text())["exit_code"] == 0
    assert diagnose.main([str(fp8)]) == 2
    assert f"{fp8} has no telemetry." in capsys.readouterr().out


def test_a_file_that_could_not_be_written_leaves_no_draft(tmp_path: Path, monkeypatch) -> None:
    def half(path: Path) -> None:
        path.touch()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        compare_outputs._write(tmp_path / "compare.png", half)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "[rank0]: ValueError: Invalid learning rate: -1.0\n compare   python -m recipes.compare\n",
            "learning rate",
        ),
        ("╭─ Unrecognized options ─╮\n│ Unrecognized options: --debug.sed=2 │\n╰───╯\n", "--debug.sed=2"),
        ("step: 1\nKilled\n\n", "Killed"),
        ("", "its log is empty"),
    ],
)
def test_a_failed_arm_says_why(log: str, expected: str) -> None:
    assert expected in reason(log)
