"""python -m recipes.diagnose RUN: why does this FP8 run differ from BF16, and what to do about it?

Reads the telemetry that a run has recorded under `fp8/` ([fp8.telemetry] every = N), also while it is trained, and
says what it finds, worst modules first, with the lines to put into the recipe. The thresholds stand in
diagnose_rules.py, each with where it comes from.

Exit code: 0 healthy, 1 something was found, 2 the run has no telemetry, or is none.
"""

import argparse
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from recipes.arguments import count
from recipes.diagnose_remedies import Remedy, skip
from recipes.diagnose_rules import Finding, findings
from recipes.diagnose_view import View, natural, section_of
from recipes.folded_names import collapse
from recipes.runs import RunError, read_run

FILE_WIDTH = 120


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None) and returns the exit code."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    try:
        view = View(read_run(args.run))
    except (RunError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    if not view.steps:
        console.print(
            f"{escape(args.run)} has no telemetry. Train with --fp8.telemetry.every 100, or in the recipe:\n\n"
            "    \\[fp8.telemetry]\n    every = 100\n",
            soft_wrap=True,
        )
        return 2
    found = findings(view)
    wrong, notes = [f for f in found if not f.note], [f for f in found if f.note]
    console.print(_title(view), style="bold", markup=False)
    if not wrong:
        console.print(healthy(view), markup=False)
    print_findings(wrong, view, console, args.top)
    print_findings(notes, view, console, args.top)
    return 1 if wrong else 0


def print_findings(found: list[Finding], view: View, console: Console, top: int) -> None:
    """One block a kind of finding: what, in which modules, worst first, and the remedies; `top` lines of each."""
    for kind in dict.fromkeys(f.kind for f in found):
        alike = [f for f in found if f.kind == kind]
        modules = sorted({f.module for f in alike}, key=natural)
        style = "yellow" if alike[0].note else "bold red"
        console.print(f"\n[{style}]{kind}[/]: {', '.join(collapse(modules))}")
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column(style="bold", overflow="fold", max_width=44)
        table.add_column(overflow="fold")
        for f in alike[:top]:
            table.add_row(f.module, escape(f.what))
        console.print(table)
        if len(alike) > top:
            console.print(f" and {len(alike) - top} more, less damaged: --top {len(alike)}")
        _print_remedies([*_remedies(alike), *_leave_out(alike, view, modules)], console)


def _remedies(alike: list[Finding]) -> list[Remedy]:
    """Those of the worst module of each converter: their options are apart."""
    worst: dict[str, Finding] = {}
    for finding in alike:
        worst.setdefault(section_of(finding.module), finding)
    return list(dict.fromkeys(remedy for finding in worst.values() for remedy in finding.remedies))


def _leave_out(alike: list[Finding], view: View, modules: list[str]) -> list[Remedy]:
    """The last resort, for all modules of each converter in question."""
    if alike[0].note or not modules or modules[0] not in view.modules:
        return []
    by_section = {s: [m for m in modules if section_of(m) == s] for s in dict.fromkeys(map(section_of, modules))}
    lines = {section: skip(view, named) for section, named in by_section.items()}
    return [Remedy("or leave these modules in BF16", section, line) for section, line in lines.items() if line]


def _print_remedies(remedies: list[Remedy], console: Console) -> None:
    for remedy in remedies:
        lines = f": \\[{remedy.section}] {escape(remedy.toml)}" if remedy.toml else ""
        console.print(f"  [green]->[/] {escape(remedy.why)}{lines}", soft_wrap=True)


def _title(view: View) -> str:
    steps, modules = view.steps, len(view.owners)
    recipe = ((view.run.info or {}).get("recipe")) or view.run.label
    measured = f"steps measured, {steps[0]} to {steps[-1]}" if steps[1:] else f"step measured, {steps[0]}"
    return f"{recipe}: {modules} modules in FP8, {len(steps)} {measured}"


def healthy(view: View) -> str:
    """What to say of a run without a finding."""
    if not view.modules:
        return "Healthy: nothing is in FP8 here; gradient norms and loads of the experts are what there is to see."
    lost = {}
    for module, key in view.figures:
        if sqnr := view.settled(module, key, "sqnr_db"):
            lost[module, key] = min(sqnr.values()) - view.expected_db(module, key)
    if not lost:
        return "Nothing to judge yet: in every measured step the delayed scales were still the 1 that they start from."
    (module, key), worst = min(lost.items(), key=lambda item: item[1])
    flushed = max((v for figures in view.figures.values() for v in figures.get("flushed", {}).values()), default=0.0)
    return (
        f"Healthy: every operand and GEMM has the SQNR that its format leaves (lowest: {key} of {module}, "
        f"{worst:+.1f} dB), and at most {100 * flushed:.2g} % of an operand are flushed to zero."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the run's job.dump_folder")
    top = "modules shown of each finding (default: 5)"
    parser.add_argument("--top", type=count("is no number of modules"), default=5, help=top)
    return parser


if __name__ == "__main__":
    sys.exit(main())
