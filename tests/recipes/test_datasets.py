"""Datasets: splits, readers, and one clear sentence for each mistake."""

import gzip
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from recipes import documents
from recipes.datasets import load_split, split_of
from recipes.documents import find_files, read_jsonl, read_parquet, read_python_docs, read_text_files
from recipes.job_config import DataConfig

STDLIB = sysconfig.get_path("stdlib")
SPLITS = ("train", "validation", "test")
DOCUMENTS = [f"Document {i}: " + "ninety-nine bottles of beer on the wall, " * (1 + i % 5) for i in range(200)]


def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(path: Path, texts: list, column: str = "text") -> Path:
    pa.parquet.write_table(pa.table({"id": range(len(texts)), column: texts}), path)
    return path


def write_text_files(path: Path, texts: list) -> Path:
    path.mkdir()
    for i, text in enumerate(texts):
        (path / f"{i:04}.txt").write_text(text)
    return path


WRITERS: dict[str, Callable[[Path, list], Path]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "text_files": write_text_files,
}


def split(path: Path | str, name: str = "jsonl", split: str = "train", ranks: int = 1, **config: object) -> list[str]:
    return load_split(str(path), name=name, split=split, config=DataConfig(**config), ranks=ranks)["text"][:]


# Splits


def test_split_depends_on_the_text_alone() -> None:
    """Hand-computed: blake2b-64 of "a" is 0x40f89e395b66422f, which is 0.2538 of 2**64."""
    assert split_of("a", DataConfig(test_fraction=0.26)) == "test"
    assert split_of("a", DataConfig(test_fraction=0.25, validation_fraction=0.01)) == "validation"
    assert split_of("a", DataConfig(test_fraction=0.25, validation_fraction=0.0)) == "train"


def test_splits_have_their_share() -> None:
    config = DataConfig(validation_fraction=0.2, test_fraction=0.1)
    found = [split_of(f"text {i}", config) for i in range(10_000)]
    # Three standard deviations of a binomial share of 10,000 are 1.2 % here.
    assert found.count("validation") / 10_000 == pytest.approx(0.2, abs=0.012)
    assert found.count("test") / 10_000 == pytest.approx(0.1, abs=0.009)


@pytest.mark.parametrize("name", WRITERS)
def test_splits_are_disjoint_and_complete(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "data", DOCUMENTS)
    parts = {s: split(path, name, s, validation_fraction=0.1, test_fraction=0.1) for s in SPLITS}
    assert sorted(text for part in parts.values() for text in part) == sorted(DOCUMENTS)
    assert all(parts.values())


def test_order_is_shuffled_by_the_seed_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)
    assert split(path) == split(path) != split(path, shuffle_seed=1)
    assert split(path) != [text for text in DOCUMENTS if text in set(split(path))]


@pytest.mark.parametrize("held_out", ["validation", "test"])
def test_held_out_documents_keep_their_order_whatever_the_seed(held_out: str, tmp_path: Path) -> None:
    """A run validates on the first batches: seeds would be compared on different texts."""
    path = write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)
    assert split(path, split=held_out) == split(path, split=held_out, shuffle_seed=1)


def test_pieces_of_a_document_stay_in_its_split(tmp_path: Path) -> None:
    pages = ["\n\n".join(f"paragraph {i} of page {page}" for i in range(page % 7)) or "short" for page in range(100)]
    path = write_jsonl(tmp_path / "data.jsonl", pages)
    for held in SPLITS:
        whole, cut = split(path, split=held), split(path, split=held, piece_chars=50)
        assert len(cut) > len(whole)
        assert max(len(piece) for piece in cut) < 50 + len("paragraph 6 of page 100")
        cuts = "".join(whole).replace("\n\n", "")
        assert sorted("".join(cut).replace("\n\n", "")) == sorted(cuts)
        assert all(any(piece in page for page in whole) for piece in cut)


# Readers


@pytest.fixture(scope="module")
def python_docs() -> list[str]:
    before = set(sys.modules)
    documents = list(read_python_docs(STDLIB, "text"))
    assert set(sys.modules) == before, "read, not imported: antigravity opens a browser, this prints a poem"
    return documents


def test_python_docs_are_topics_and_docstrings(python_docs: list[str]) -> None:
    assert len(python_docs) > 700
    assert sum(map(len, python_docs)) > 1_500_000
    assert any(text.startswith('The "assert" statement') for text in python_docs)
    assert any(text.startswith("module heapq\nHeap queue algorithm") for text in python_docs)
    assert any("def heapq.heapify(x)\nTransform list into a heap" in text for text in python_docs)
    assert any("class argparse.ArgumentParser(_AttributeHolder, _ActionsContainer)\n" in t for t in python_docs)
    assert not any(text.startswith("module idlelib") for text in python_docs)


def test_python_docs_fill_every_split(python_docs: list[str]) -> None:
    counts = Counter(split_of(text, DataConfig()) for text in python_docs)
    assert min(counts[s] for s in SPLITS) >= 8  # for 8 data-parallel ranks


def test_python_docs_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not the folder of a CPython standard library: .*topics\.py"):
        list(read_python_docs(str(tmp_path), "text"))


def test_python_packages_are_their_sources_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"p{i}/sub/m{i}.py": f"x = {i}\n" * 20 for i in range(40)}
    files |= {
        "p0/copy.py": files["p1/sub/m1.py"],
        "p0/__pycache__/c.py": "no",
        "p0/empty.py": "\n",
        "p0/data.txt": "no",
    }
    files |= {"p2/table.py": "1, " * (documents.PACKAGE_FILE_CHARS // 3 + 1)}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "p0" / "latin.py").write_bytes("# é".encode("latin-1"))
    found = list(documents.read_python_packages(str(tmp_path), "text"))
    assert sorted(found) == sorted(f"x = {i}\n" * 20 for i in range(40))
    monkeypatch.setattr(documents, "PACKAGES_CHARS", 1000)
    some = list(documents.read_python_packages(str(tmp_path), "text"))
    assert some == found[: len(some)], "a part of it is its beginning"
    assert 1000 <= sum(map(len, some)) < 1000 + 120
    assert some != sorted(some), "and one of many packages"
    with pytest.raises(ValueError, match="is not a folder of installed packages"):
        list(documents.read_python_packages(str(tmp_path / "nowhere"), "text"))


def test_jsonl_ignores_other_keys_of_any_type(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [{"text": "a", "meta": {"x": 1}}, {"meta": [2], "text": "b"}, {"text": "c\nd", "meta": None}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert list(read_jsonl(str(file), "text")) == ["a", "b", "c\nd"]


def test_jsonl_reads_gzip_folders_and_long_lines(tmp_path: Path) -> None:
    long = "x" * 3_000_000  # pyarrow refuses a line longer than its block, 1 MiB by default
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": long}).encode()))
    write_jsonl(tmp_path / "a.jsonl", ["first"])
    (tmp_path / "readme.md").write_text("not data")
    assert list(read_jsonl(str(tmp_path), "text")) == ["first", long]


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["kept", None, ""])
    assert list(read_jsonl(str(file), "text")) == ["kept", ""]
    assert split(file, validation_fraction=0, test_fraction=0) == ["kept"]
    assert list(read_parquet(str(write_parquet(tmp_path / "a.parquet", ["kept", None])), "text")) == ["kept"]


def test_text_files_skip_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_bytes(b"\xef\xbb\xbfprint('\xc3\xa9')\r\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "zeros.bin").write_bytes(b"plain\0")
    assert list(read_text_files(str(tmp_path), "text")) == ["first", "print('é')\r\n"]
    assert list(read_text_files(str(tmp_path / "**" / "*.py"), "text")) == ["print('é')\r\n"]
    assert list(read_text_files(str(tmp_path / "a.txt"), "text")) == ["first"]


# Mistakes


@pytest.mark.parametrize("name", ["jsonl", "text_files", "parquet"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"needs a path: set training\.dataset_path \(and validation\.dataset_path"),
        ("missing/data", r"'.*missing/data' does not exist \(from .*\): give a file, a folder or a glob"),
        ("*.nothing", r"nothing' matches no file"),
        ("empty", r"empty' matches no file"),
    ],
)
def test_wrong_path(name: str, path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        split(str(tmp_path / path) if path else path, name)


def test_folder_without_the_right_files_says_what_it_wants(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"matches no file ending in \.parquet"):
        find_files(str(tmp_path), (".parquet",))


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_missing_column_names_those_found(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "data", DOCUMENTS)
    with pytest.raises(ValueError, match=r"data has no column 'body', it has 'id', 'text': set data\.text_column"):
        split(path, name, text_column="body")


def test_column_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'id' holds int64: set data\.text_column to a text column"):
        split(write_parquet(tmp_path / "a.parquet", DOCUMENTS), "parquet", text_column="id")
    with pytest.raises(ValueError, match=r"a\.jsonl is not JSON lines with a text under 'id'"):
        split(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "jsonl", text_column="id")


@pytest.mark.parametrize(("name", "kind"), [("jsonl", "JSON lines"), ("parquet", "a parquet file")])
def test_file_of_another_kind(name: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("no such format {")
    with pytest.raises(ValueError, match=f"data is not {kind}"):
        split(file, name)


def test_empty_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a single document"])
    with pytest.raises(ValueError, match=r"validation split of jsonl at .* is empty: 1 documents, validation_fraction"):
        split(path, "jsonl", "validation")


def test_fewer_documents_than_ranks(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"train split .* has 3 documents for 4 data-parallel ranks"):
        split(path, ranks=4, validation_fraction=0, test_fraction=0)
    assert len(split(path, ranks=3, validation_fraction=0, test_fraction=0)) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"text_column": ""}, "text_column = '' must be the name of a column"),
        ({"test_fraction": -0.1}, r"test_fraction = -0\.1 must be a share of the documents"),
        ({"validation_fraction": 1}, "validation_fraction = 1 must be a share"),
        ({"validation_fraction": True}, "validation_fraction = True must be a share"),
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave nothing to train on"),
        ({"shuffle_seed": -1}, "shuffle_seed = -1 must be a whole number"),
        ({"piece_chars": 1.5}, r"piece_chars = 1\.5 must be a whole number"),
    ],
)
def test_wrong_config(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**wrong)
