"""How fast is the FP8 expert MLP?  python -m recipes.bench [--cases scout,small] [--shape M,D,H,E] [--parts]

Forward and backward of one expert MLP through autograd, gradients of x and of all weights: torchtitan's expert function
in BF16 (compiled), torchao's FP8 path, ours with weights that have just changed (cold: a step of one micro-batch, they
are quantized again and not kept) and ours with the same weights as before (warm: a further micro-batch). All run in
turn, A B C D A B C D, in one process, and medians are compared: a GPU's clock depends on its power and temperature, so
only neighbours in time compare. Whole training steps: --e2e, with the arguments of recipes.bench_e2e.

--parts adds what each part of ours takes: one sum with the weights' quantization, as cold, and one without, as warm.

--sizes measures instead many small and middle sizes, without torchao, and the time of the GPU alone (bench_sizes.py).
It is for a GPU, as --cases is: both are refused without one.

Without a GPU: the reference backend and BF16 that is not compiled, on a tiny shape. That checks the tool, not speed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from converters import weight_cache
from converters.capability import resolve
from converters.config import FP8GroupedExpertsConfig, Numerics
from converters.numerics import Accumulate, Wgrad
from recipes import bench_e2e
from recipes.arguments import SECONDS, count, listed, one_of, out_file
from recipes.bench_cases import (
    CASES,
    TINY,
    Case,
    Inputs,
    Variant,
    bf16,
    forget_weights,
    make_inputs,
    ours,
    parse_shape,
    steps,
)
from recipes.bench_cases import torchao as torchao_variant
from recipes.bench_parts import parts
from recipes.bench_sizes import measure_sizes, sizes
from recipes.bench_tables import show, show_parts, show_sizes
from recipes.timing import device_ms, elapsed_ms, environment, in_turn, medians

GRADIENTS = ("out", "dx", "dw13", "dw2")


def results(variant: Variant, g: Tensor) -> dict[str, Tensor]:
    """out, dx, dw1, dw3 and dw2 of one step."""
    out = variant.step(g).detach()
    x, w1, w2, w3 = (leaf.grad for leaf in variant.leaves)
    return {"out": out, "dx": x, "dw1": w1, "dw3": w3, "dw2": w2}


def sqnr_db(reference: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """20 * log10(|reference| / |reference - found|) of output and gradients; dw13 is dw1 and dw3 together."""

    def norms(name: str) -> tuple[float, float]:
        signal = noise = 0.0
        for a, b in zip(reference[name], found[name], strict=True):  # by row or expert: no float32 copy of the whole
            signal += a.float().square().sum(dtype=torch.float64)
            noise += (a.float() - b.float()).square().sum(dtype=torch.float64)
        return float(signal), float(noise)

    pairs = {name: norms(name) for name in ("dw1", "dw3", "dw2")}
    pairs["dw13"] = tuple(a + b for a, b in zip(pairs["dw1"], pairs["dw3"], strict=True))
    for name in ("out", "dx"):
        a, b = reference[name].float(), found[name].float()
        pairs[name] = float(a.square().sum(dtype=torch.float64)), float((a - b).square().sum(dtype=torch.float64))
    db = {
        n: 10 * torch.log10(torch.tensor(s / max(e, 1e-300), dtype=torch.float64)).item() for n, (s, e) in pairs.items()
    }
    return {name: round(db[name], 2) for name in GRADIENTS}


def peak_bytes(variant: Variant, g: Tensor) -> int | None:
    """What one step allocates at its peak, over inputs and weights; ours includes quantized weights. None without a
    GPU, where nobody counts it.
    """
    if not g.is_cuda:
        return None
    forget_weights()
    variant.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    variant.step(g)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, i: Inputs, numerics: Numerics, rounds: int, seconds: float) -> dict[str, Any]:
    """One entry of `cases`: times in ms, memory in bytes, SQNR against BF16 in dB. torchao's are None if it fails, and
    peaks without a GPU.
    """
    row: dict[str, Any] = {"case": case.name, "M": case.M, "D": case.D, "H": case.H, "E": case.E}
    base, warm, cold = bf16(i), ours(i, numerics, cold=False), ours(i, numerics, cold=True)
    variants = [base, cold, warm]
    reference = results(base, i.g)
    row["bf16_peak_bytes"] = peak_bytes(base, i.g)
    base.clear()
    row["sqnr_db"] = sqnr_db(reference, results(warm, i.g))
    row["fp8_warm_peak_bytes"] = peak_bytes(warm, i.g)
    row["fp8_cache_bytes"] = weight_cache.cached_bytes()
    row["fp8_peak_bytes"] = peak_bytes(cold, i.g)
    warm.clear()
    row["torchao_ms"] = row["torchao_sqnr_db"] = None
    try:
        upstream = torchao_variant(i)
        row["torchao_sqnr_db"] = sqnr_db(reference, results(upstream, i.g))
        upstream.clear()
        variants.insert(1, upstream)
    except Exception as error:
        row["torchao_error"] = f"{type(error).__name__}: {error}"[:200]
    del reference
    times = in_turn(steps(variants, i.g), rounds, lambda run: elapsed_ms(run, seconds, i.x.is_cuda))
    row |= medians(times)
    row["rounds_ms"] = {name: [round(t, 4) for t in all_times] for name, all_times in times.items()}
    return row


def _measure_all(
    cases: list[Case], device: torch.device, numerics: Numerics, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for case in cases:
        forget_weights()
        inputs = make_inputs(case, device, args.seed)
        row = measure(case, inputs, numerics, args.rounds, args.seconds)
        yield row | ({"parts": parts(case, inputs, numerics)} if args.parts else {})
        del inputs  # before the next ones are made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(c.name for c in CASES)
    parser.add_argument(
        "--cases",
        type=listed,
        default=None,
        help=f"comma separated, of {names}; for a GPU; default: all; without a GPU one tiny shape",
    )
    parser.add_argument("--shape", action="append", default=[], help="M,D,H,E of one more case; may be repeated")
    parser.add_argument("--parts", action="store_true", help="also the time of each part of ours")
    parser.add_argument("--sizes", action="store_true", help="on a GPU many sizes, for the table of what is too small")
    parser.add_argument("--rounds", type=count("is no number of rounds"), default=5, help="turns of all variants")
    parser.add_argument("--seconds", type=SECONDS, default=0.2, help="of each variant in each round; not with --sizes")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and group sizes")
    parser.add_argument("--wgrad", type=one_of(Wgrad), default="fp8", help="see fp8.grouped_experts.wgrad")
    parser.add_argument(
        "--accumulate", type=one_of(Accumulate), default="fast", help="see fp8.grouped_experts.accumulate"
    )
    parser.add_argument("--e2e", action="store_true", help="whole training steps: the arguments of recipes.bench_e2e")
    parser.add_argument("--out", "--json", type=out_file, default=None, help="also write the results to this JSON file")
    return parser


def chosen(args: argparse.Namespace, cuda: bool) -> list[Case]:
    """The cases that the command line asks for.

    Raises:
        ValueError: a name that is none, a bad shape, shapes for a GPU without one, or --sizes with other shapes.
    """
    if args.sizes:
        if args.cases or args.shape or args.parts:
            raise ValueError("--sizes has sizes of its own: leave --cases, --shape and --parts out.")
        if not cuda:
            raise ValueError("--sizes is for a GPU, and there is none: leave it out to run the tiny shape of a CPU.")
        return sizes()
    known = {c.name: c for c in CASES}
    names = args.cases or ([*known] if cuda and not args.shape else [])
    if unknown := [n for n in names if n not in known]:
        raise ValueError(f"--cases {', '.join(unknown)}: choose of {', '.join(known)}, or give --shape M,D,H,E.")
    cases = [known[n] for n in names] + [parse_shape(s) for s in args.shape]
    return cases or [TINY]


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None); returns the exit code, 2 for bad arguments."""
    command = sys.argv[1:] if argv is None else argv
    if "--e2e" in command:
        return bench_e2e.main([a for a in command if a != "--e2e"])
    args = _parser().parse_args(command)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        cases = chosen(args, device.type == "cuda")
        if args.cases and device.type != "cuda":
            raise ValueError("--cases are for a GPU, and there is none: leave them out to run the tiny shape of a CPU.")
        numerics = resolve(FP8GroupedExpertsConfig(wgrad=args.wgrad, accumulate=args.accumulate))
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    command = ["python -m recipes.bench", *command]
    data: dict[str, Any] = {"environment": environment(device, numerics, command), "cases": []}
    if args.sizes:
        rows = measure_sizes(cases, device, numerics, args.seed, args.rounds, device_ms)
    else:
        rows = _measure_all(cases, device, numerics, args)
    for row in rows:
        if "parts" in row:
            show_parts(row, data["environment"], console)
        data["cases"].append(row)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(data, indent=1) + "\n")
    (show_sizes if args.sizes else show)(data, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
