"""Readers: a path in, the texts of its documents out, one at a time and in a stable order.

A path is a file, a folder (searched to any depth, hidden names left out) or a glob (`**` crosses folders). Nothing is
imported, executed or downloaded, and every user error is a ValueError that names the file.
"""

import ast
import glob
import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
from torchtitan.tools.logging import logger

# Left out of python_docs. The first line is not documentation; the second is packaged apart from the standard library
# by Debian and others, so with it the data, and with them a loss, would depend on who built the interpreter.
NOT_DOCUMENTED = frozenset(
    {"site-packages", "dist-packages", "pydoc_data", "encodings", "test", "tests", "__pycache__"}
)
NOT_EVERYWHERE = frozenset({"idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "distutils"})

# python_docs is cut into documents of about this length. Whole pages have up to 80,000 characters, several steps of a
# small batch, and the loss of llama4_bf16.toml then jumped by 0.4 from one step to the next with the topic.
PIECE_CHARS = 2000

# python_packages: a file above this length is a generated table, and files are taken until there are so many characters
# (25 million tokens of assets/tokenizer, whose token is 2.5 characters of Python).
PACKAGE_FILE_CHARS = 256 << 10
PACKAGES_CHARS = 64 << 20

# A JSON line longer than a block is refused by pyarrow, whose default block is 1 MiB.
JSON_BLOCK_BYTES = 64 << 20


def find_files(path: str, suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """The files at `path`, sorted; in a folder only those whose name ends in one of `suffixes`.

    Raises ValueError where nothing is found.
    """
    if not path:
        raise ValueError(
            "This dataset needs a path: set training.dataset_path (and validation.dataset_path for the "
            "validation split) to a file, a folder or a glob."
        )
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        below = (p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts))
        files = [p for p in below if p.name.endswith(suffixes) and p.is_file()]
    elif glob.has_magic(path):
        files = [p for p in map(Path, glob.glob(str(root), recursive=True)) if p.is_file()]
    else:
        raise ValueError(f"{path!r} does not exist (from {Path.cwd()}): give a file, a folder or a glob.")
    if not files:
        wanted = "" if suffixes == ("",) else f" ending in {' or '.join(suffixes)}"
        raise ValueError(f"{path!r} matches no file{wanted} (from {Path.cwd()}).")
    return sorted(files)


def read_text_files(path: str, text_column: str) -> Iterator[str]:
    """One document a file, in UTF-8. Files that are not text are left out, and their number is logged."""
    skipped = 0
    for file in find_files(path):
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            skipped += 1
        else:
            yield text
    if skipped:
        logger.warning(f"{path}: left out {skipped} files that are not UTF-8 text")


def read_jsonl(path: str, text_column: str) -> Iterator[str]:
    """One document a line, under the key `text_column`; other keys may hold anything. `.gz`, `.bz2`, `.zst` too."""
    parse = pa.json.ParseOptions(
        explicit_schema=pa.schema([(text_column, pa.large_string())]), unexpected_field_behavior="ignore"
    )
    suffixes = tuple(s + c for s in (".jsonl", ".json") for c in ("", ".gz", ".bz2", ".zst"))
    for file in find_files(path, suffixes):
        try:
            with pa.input_stream(str(file), compression="detect") as stream:
                table = pa.json.read_json(stream, pa.json.ReadOptions(block_size=JSON_BLOCK_BYTES), parse)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file} is not JSON lines with a text under {text_column!r}: {error}") from error
        column = table[text_column]
        if column.null_count == len(column):
            raise ValueError(_missing_column(file, text_column, _first_keys(file)))
        yield from _texts(file, column)


def read_parquet(path: str, text_column: str) -> Iterator[str]:
    """One document a row, in the column `text_column`; other columns are not read."""
    for file in find_files(path, (".parquet",)):
        try:
            parquet = pa.parquet.ParquetFile(file)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file} is not a parquet file: {error}") from error
        with parquet:
            if text_column not in parquet.schema_arrow.names:
                raise ValueError(_missing_column(file, text_column, parquet.schema_arrow.names))
            kind = parquet.schema_arrow.field(text_column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"{file}: column {text_column!r} holds {kind}: set data.text_column to a text column.")
            for batch in parquet.iter_batches(columns=[text_column]):
                yield from _texts(file, batch.column(0))


def read_python_docs(path: str, text_column: str) -> Iterator[str]:
    """The language reference that CPython carries for `help()`, then the docstrings of every module, in pieces.

    `path` is the folder of a standard library. Sources are parsed, not imported: importing antigravity opens a browser.
    """
    root = Path(path)
    topics = root / "pydoc_data" / "topics.py"
    if not topics.is_file():
        raise ValueError(f"{path!r} is not the folder of a CPython standard library: it has no pydoc_data/topics.py.")
    *_, assignment = (node for node in ast.parse(topics.read_bytes()).body if isinstance(node, ast.Assign))
    for _, text in sorted(ast.literal_eval(assignment.value).items()):
        yield from pieces(text)
    for file in _modules(root):
        parts = file.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield from pieces("\n\n".join(_page(ast.parse(file.read_bytes()), name)))


def read_python_packages(path: str, text_column: str) -> Iterator[str]:
    """The sources of the packages installed in `path`, one document a file, equal files once, PACKAGES_CHARS in all.

    Files come in the order of a hash of their path, so that a part of them is a part of every package.
    """
    root, seen, chars = Path(path), set(), 0
    if not root.is_dir():
        raise ValueError(f"{path!r} is not a folder of installed packages (from {Path.cwd()}): name a site-packages.")
    names = [file.relative_to(root).as_posix() for file in _walk(root, frozenset({"__pycache__"}))]
    for name in sorted(names, key=_digest):
        try:
            text = (root / name).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        digest = _digest(text)
        if not text.strip() or len(text) > PACKAGE_FILE_CHARS or digest in seen:
            continue
        seen.add(digest)
        chars += len(text)
        yield text
        if chars >= PACKAGES_CHARS:
            return


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def pieces(page: str, chars: int = PIECE_CHARS) -> Iterator[str]:
    """The page cut between paragraphs; a piece ends with the paragraph that brings it to `chars` characters."""
    piece = ""
    for paragraph in page.split("\n\n"):
        piece += f"\n\n{paragraph}" if piece else paragraph
        if len(piece) >= chars:
            yield piece
            piece = ""
    if piece:
        yield piece


def _modules(root: Path) -> list[Path]:
    """The documented sources of a standard library, sorted. Skipped folders are not entered: site-packages is large."""
    return sorted(_walk(root, NOT_DOCUMENTED | NOT_EVERYWHERE))


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """The .py files below `root`, in no order; folders named in `skipped` are not entered."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _page(node: ast.AST, name: str) -> Iterator[str]:
    """Header and docstring of `node` and of the documented classes and functions in it, as paragraphs."""
    definition = not isinstance(node, (ast.If, ast.Try))
    if definition and (doc := ast.get_docstring(node)):
        yield f"{_header(node, name)}\n{doc}"  # one newline: a cut never parts them
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _page(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _page(child, name)


def _header(node: ast.AST, name: str) -> str:
    if isinstance(node, ast.Module):
        return f"module {name}"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {name}({bases})" if bases else f"class {name}"
    return f"def {name}({ast.unparse(node.args)})"


def _texts(file: Path, column: pa.Array | pa.ChunkedArray) -> Iterator[str]:
    if column.null_count:
        logger.warning(f"{file}: left out {column.null_count} of {len(column)} rows that have no text")
    yield from (text for text in column.to_pylist() if text is not None)


def _first_keys(file: Path) -> list[str]:
    with pa.input_stream(str(file), compression="detect") as stream:
        for line in stream.read().splitlines():
            if line.strip():
                return list(json.loads(line))
    return []


def _missing_column(file: Path, column: str, found: list[str]) -> str:
    return f"{file} has no column {column!r}, it has {', '.join(map(repr, found))}: set data.text_column."
