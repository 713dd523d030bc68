"""Writes the measured tables of README.md from assets/results/*.json:  python -m recipes.readme_tables

A table stands between `<!-- table:NAME -->` and `<!-- end:NAME -->`. A test holds the README to the files, so that no
number there can be anything but a committed measurement.
"""

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "assets" / "results"


def _table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---" if i == 0 else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def _conditions(environment: dict) -> str:
    versions = environment.get("versions", {})
    named = ", ".join(f"{k} {versions[k]}" for k in ("torch", "triton", "torchao") if k in versions)
    return f"{environment['gpu']}, {environment['date']}, {named}: `{environment['command']}`"


def bench(data: dict) -> str:
    """The expert MLP: one row a case."""
    rows = []
    for c in data["cases"]:
        name, best = f"{c['case']} {c['M']} x {c['D']} x {c['H']}, {c['E']} experts", c["bf16_ms"]
        upstream = f"{best / c['torchao_ms']:.2f}x" if c.get("torchao_ms") else "fails"
        speed = [f"{best / c[k]:.2f}x" for k in ("cold_ms", "warm_ms")]
        peak = c["bf16_peak_bytes"]  # None where there was no GPU to measure it
        memory = [f"{c[k] / peak:.3f}x" if peak else "" for k in ("fp8_peak_bytes", "fp8_warm_peak_bytes")]
        rows.append([name, f"{best:.2f} ms", upstream, *map(_bold, speed), *memory])
    head = ["forward + backward", "BF16", "torchao FP8", "ours, cold", "ours, warm", "memory, cold", "memory, warm"]
    return _table(head, rows) + "\n\n" + _conditions(data["environment"])


def _cold_warm(case: dict) -> str:
    return " / ".join(f"{case['bf16_ms'] / case[k]:.2f}x" for k in ("cold_ms", "warm_ms"))


def sizes(data: dict) -> str:
    """Experts of many sizes: one row a weight's size, one column a number of rows; 32 experts."""
    cases = [c for c in data["cases"] if c["E"] == 32]
    each = sorted({c["M"] // c["E"] for c in cases})
    table = []
    for D, H in dict.fromkeys((c["D"], c["H"]) for c in cases):
        of = {c["M"] // c["E"]: c for c in cases if (c["D"], c["H"]) == (D, H)}
        table.append([f"{D} x {H}", *(_cold_warm(of[n]) if n in of else "" for n in each)])
    head = ["dim x hidden", *(f"{n:,} rows each" for n in each)]
    return _table(head, table) + "\n\n" + _conditions(data["environment"])


def dense(data: dict) -> str:
    """Dense layers: one row a layer."""
    rows = []
    for c in data["cases"]:
        speed = [f"{c['bf16_ms'] / c[k]:.2f}x" for k in ("torchao_ms", "cold_ms", "warm_ms")]
        rows.append(
            [f"{c['case']}: {c['T']} x {c['K']} x {c['N']}", f"{c['bf16_ms']:.2f} ms", speed[0], *map(_bold, speed[1:])]
        )
    head = ["forward + backward", "BF16", "torchao `Float8Linear`", "ours, cold", "ours, warm"]
    return _table(head, rows) + "\n\n" + _conditions(data["environment"])


def _bold(text: str) -> str:
    return f"**{text}**"


def e2e(data: dict) -> str:
    """Whole steps: one row a run."""
    runs = data["runs"]
    base = {r["layout"]: r["tokens_per_second_per_gpu"] for r in runs if r["precision"] == "bf16"}
    rows = []
    for r in runs:
        speed = r["tokens_per_second_per_gpu"]
        wires = [f"{r.get(k, 0) / 1e9:.2f} GB" for k in ("all_gather_bytes", "all_to_all_bytes")]
        rows.append([r["name"], f"{speed:,}", f"{speed / base[r['layout']]:.2f}x", f"{r['peak_gib']:.1f} GiB", *wires])
    head = ["layout, precision", "tokens/s a GPU", "of BF16", "peak memory", "all-gather a step", "all-to-all a step"]
    return _table(head, rows) + "\n\n" + _conditions(data["environment"])


SPLIT = ("gemm", "quantize", "attention", "optimizer", "other")


def whole_steps(data: dict) -> str:
    """Steps on one GPU and where their time goes: one row a run."""
    base = {r["recipe"]: r for r in data["runs"] if r["precision"] == "bf16"}
    rows = []
    for r in data["runs"]:
        speed, model, twin = (
            r["tokens_per_second_per_gpu"],
            r["recipe"].split(":")[-1].split("/")[-1],
            base[r["recipe"]],
        )
        ratio = f"{speed / twin['tokens_per_second_per_gpu']:.2f}x"
        rest = f"{_without_optimizer(twin) / _without_optimizer(r):.2f}x"
        split = [f"{r['split_ms'].get(k, 0):.0f}" for k in SPLIT]
        memory, loss = f"{r['peak_gib']:.1f} GiB", f"{r['final_loss']:.3f}"
        rows.append([f"{model} {r['precision']}", f"{speed:,}", ratio, rest, memory, *split, loss])
    head = ["model, precision", "tokens/s", "of BF16", "without optimizer", "peak memory", *(f"{k}, ms" for k in SPLIT)]
    return _table([*head, "last loss"], rows) + "\n\n" + _conditions(data["environment"])


def _without_optimizer(run: dict) -> float:
    return sum(run["split_ms"].get(k, 0) for k in SPLIT if k != "optimizer")


def parity(data: dict) -> str:
    """FP8 against BF16: a row for the seeds of a model, then one for each of its FP8 rules."""
    rows = []
    for model in dict.fromkeys(run["model"] for run in data["runs"] if run["recipe"] == "bf16"):
        of = {v["name"].removeprefix(f"{model} "): v for v in data["verdicts"] if v["name"].startswith(f"{model} ")}
        for recipe in ("bf16", *of):
            runs = [run for run in data["runs"] if (run["model"], run["recipe"]) == (model, recipe)]
            rows.append(_parity_row(f"{model} {'BF16' if recipe == 'bf16' else recipe}", runs, of.get(recipe)))
    head = ["run", "seeds", "validation loss", "test loss", "minus BF16 of its seeds", "standard error", "band of BF16"]
    return _table([*head, "gradient norm, worst ratio", "verdict"], rows) + "\n\n" + _conditions(data["environment"])


def _parity_row(name: str, runs: list[dict], held: dict | None) -> list[str]:
    losses = [f"{statistics.mean(run[f'final_{split}_loss'] for run in runs):.4f}" for split in ("val", "test")]
    start = [name, ", ".join(str(run["seed"]) for run in runs), *losses]
    if held is None:  # BF16: its seeds against the first of them
        ratios = [run["grad_norm_ratio"]["ratio"] for run in runs if run["grad_norm_ratio"]]
        norm = f"{max(ratios, key=lambda ratio: abs(math.log(ratio))):.3f}" if ratios else ""
        return [*start, "", "", "", norm, ""]
    band, error = ("" if held[key] is None else f"{held[key]:.4f}" for key in ("band", "standard_error"))
    norm = f"{held['grad_norm_ratio']['ratio']:.3f}" if held["grad_norm_ratio"] else ""
    return [*start, f"{held['gap']:+.4f}", error, band, norm, held["verdict"]]


TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "bench": ("bench_h200.json", bench),
    "sizes": ("experts_h200.json", sizes),
    "dense": ("dense_scout_h200.json", dense),
    "steps": ("e2e_h200.json", whole_steps),
    "e2e": ("e2e_h200x2.json", e2e),
    "parity": ("parity_h200.json", parity),
}


def render(readme: str, results: Path = RESULTS) -> str:
    """`readme` with every table made anew from the result files; one that was never measured stays as it is."""
    for name, (file, make) in TABLES.items():
        if not (results / file).is_file():
            continue
        pattern = re.compile(f"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        if pattern.search(readme):
            text = make(json.loads((results / file).read_text()))
            readme = pattern.sub(lambda m, text=text: f"{m[1]}{text}\n{m[2]}", readme)
    return readme


def main() -> None:
    """See the module's docstring."""
    path = ROOT / "README.md"
    path.write_text(render(path.read_text()))


if __name__ == "__main__":
    main()
