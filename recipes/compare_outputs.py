"""The files that a comparison writes: compare.png, compare.json, and where asked for a page and a paper's picture."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recipes.compare_html import page
from recipes.compare_numbers import Comparison, Report
from recipes.compare_plot import plot_column, plot_report
from recipes.run_info import jsonable, versions
from recipes.runs import Run


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The paths of one comparison's files; None is not written."""

    picture: Path
    numbers: Path
    page: Path | None = None
    column: Path | None = None


def write_outputs(report: Report, outputs: Outputs, reload_seconds: float | None = None) -> dict[str, Path]:
    """Writes the files whole or not at all, makes missing folders, and returns name -> path of what was written.

    `reload_seconds`: the page asks the browser to read it again after so long.
    """
    text = json.dumps(jsonable(as_json(report)), indent=2, allow_nan=False, default=str) + "\n"
    _write(outputs.picture, lambda path: plot_report(report, path))
    _write(outputs.numbers, lambda path: path.write_text(text, encoding="utf-8"))
    written = {"Picture": outputs.picture, "Numbers": outputs.numbers}
    if outputs.page:
        html = page(report, reload_seconds)
        _write(outputs.page, lambda path: path.write_text(html, encoding="utf-8"))
        written["Page"] = outputs.page
    if outputs.column:
        _write(outputs.column, lambda path: plot_column(report, path))
        written["Column"] = outputs.column
    return written


def as_json(report: Report) -> dict[str, Any]:
    """The content of compare.json: the first pair at the top level, further ones under `others`.

    A nan or inf becomes null there and is listed under `verdict.failures`.
    """
    first, *others = (_pair_json(comparison) for comparison in report.comparisons)
    return {
        "schema": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **first,
        "others": others,
        "band_runs": [_run_json(run) for run in report.seeds],
        "exit_code": report.code,
        "compared_with": versions(),
    }


def _pair_json(comparison: Comparison) -> dict[str, Any]:
    verdict = {
        "passed": comparison.passed,
        "word": comparison.word,
        "line": comparison.verdict,
        "failures": list(comparison.failures),
        "judgements": [asdict(judgement) for judgement in comparison.judgements],
    }
    norm, load = comparison.norm_ratio, comparison.load
    return {
        "verdict": verdict,
        "limits": asdict(comparison.limits),
        "runs": {"a": _run_json(comparison.a), "b": _run_json(comparison.b)},
        "notes": list(comparison.notes),
        "config_differences": comparison.config_differences,
        "metrics": {name: pair.as_dict() for name, pair in comparison.pairs.items()},
        "grad_norm_ratio": norm and {**asdict(norm), "worst": norm.values[norm.worst], "at": norm.steps[norm.worst]},
        "load_divergence": load and asdict(load),
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {"label": run.label, "folder": run.folder, "event_files": run.event_files, "run": run.info}


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Through a draft beside it: a browser or a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    try:
        write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
