"""How fast are dense layers in FP8?  python -m recipes.bench_dense [--sizes] [--out FILE]

Forward and backward of shared expert, wq + wk + wv and wo of Llama4 Scout with 16,384 tokens: torch.compile of BF16, of
torchao's Float8Linear (rowwise), and this project's ops with weights that have just changed (cold) or not (warm). They
run in turn, A B C D A B C D, in one process; medians are compared. Weights are BF16.

--sizes measures instead the layers of many sizes, without torchao, and the time of the GPU alone: launched one by one,
a small layer takes the host longer, which says nothing of a training step, where the host is ahead. Its file is what
`[fp8.dense] below_break_even` reads: assets/results/dense_h200.json (converters/dense_break_even.py). It is for a GPU,
and refused without one.

Without a GPU: the reference backend and BF16 that is not compiled, on tiny shapes, no torchao. That checks the tool,
not the speed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchtitan.models.moe.moe import FeedForward

from converters import weight_cache
from converters.capability import resolve
from converters.dense_config import FP8DenseConfig
from converters.fp8_dense import convert_dense
from converters.numerics import Accumulate
from parallel.wrapped_weight import plain
from recipes.arguments import SECONDS, count, one_of, out_file
from recipes.timing import device_ms, elapsed_ms, environment, in_turn, machine, medians

MS = {"bf16": "BF16", "torchao": "torchao rowwise", "cold": "ours, cold", "warm": "ours, warm"}  # name -> heading


@dataclass(frozen=True)
class Case:
    """One layer or MLP with T tokens. N: outputs of each layer on the same input; of an MLP its hidden dim."""

    name: str
    T: int
    K: int
    N: tuple[int, ...]
    kind: str = "linear"


SCOUT = [
    Case("shared expert", 16384, 5120, (8192,), "mlp"),
    Case("wq, wk, wv", 16384, 5120, (5120, 1024, 1024)),
    Case("wo", 16384, 5120, (5120,)),
]
LINEAR = [(1024, 1024), (2048, 2048), (4096, 4096), (5120, 7168), (8192, 8192)]
MLPS = [(1024, 2048), (2048, 4096), (5120, 8192)]
TOKENS = (1024, 4096, 16384)
SIZES = [Case(f"{K} x {N}", T, K, (N,)) for T in TOKENS for K, N in LINEAR]
SIZES += [Case(f"MLP {K} x {N}", T, K, (N,), "mlp") for T in TOKENS for K, N in MLPS]
TINY = [Case("MLP", 64, 64, (96,), "mlp"), Case("wq, wk, wv", 64, 64, (64, 32, 32)), Case("wo", 64, 64, (64,))]


class Projections(nn.Module):
    """wq, wk and wv, or wo, on one input."""

    def __init__(self, K: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        names = ("wq", "wk", "wv") if len(sizes) == 3 else ("wo",)
        self.layers = names
        for name, N in zip(names, sizes, strict=True):
            setattr(self, name, nn.Linear(K, N, bias=False))

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [T, K] -> [T, N] of each layer."""
        return [getattr(self, name)(x) for name in self.layers]


class MLP(nn.Module):
    """torchtitan's FeedForward, with a list of one output."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.feed_forward = FeedForward(D, H)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [T, D] -> [T, D]."""
        return [self.feed_forward(x)]


def make(case: Case, device: torch.device) -> nn.Module:
    """The layers of a case in BF16, weights of std 0.02."""
    torch.manual_seed(0)
    with torch.device(device):
        module = MLP(case.K, *case.N) if case.kind == "mlp" else Projections(case.K, case.N)
    for p in module.parameters():
        nn.init.normal_(p, std=0.02)
    return module.bfloat16()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute a case. before: what comes before each step."""

    module: nn.Module
    run: Callable[[Tensor], list[Tensor]]
    before: Callable[[], None] = lambda: None

    def step(self, x: Tensor, upstreams: list[Tensor]) -> None:
        """Forward and backward with fresh gradients."""
        x.grad = None
        self.module.zero_grad(set_to_none=True)
        self.before()
        torch.autograd.backward(self.run(x), upstreams)


def _compiled(module: nn.Module, device: torch.device) -> Callable[[Tensor], list[Tensor]]:
    return torch.compile(module, fullgraph=True, dynamic=False) if device.type == "cuda" else module


def variants(case: Case, device: torch.device, config: FP8DenseConfig, with_torchao: bool) -> dict[str, Variant]:
    """By name, in the order in which they take turns; all have the same weights."""
    torch.compiler.reset()
    module, ours = make(case, device), make(case, device)
    found = {"bf16": Variant(module=module, run=_compiled(module, device))}
    if with_torchao:
        upstream = make(case, device)
        convert_to_float8_training(upstream, config=Float8LinearConfig.from_recipe_name("rowwise"))
        found["torchao"] = Variant(module=upstream, run=_compiled(upstream, device))
    convert_dense(ours, replace(config, fqns=["*"]))
    weights = [plain(p) for p in ours.parameters()]
    changed = lambda: torch.autograd.graph.increment_version(weights)  # noqa: E731
    return found | {"cold": Variant(module=ours, run=ours, before=changed), "warm": Variant(module=ours, run=ours)}


def measure(
    case: Case,
    device: torch.device,
    config: FP8DenseConfig,
    rounds: int,
    clock: Callable[[Callable[[], None]], float],
    *,
    with_torchao: bool,
) -> dict[str, Any]:
    """One entry of `cases`, times in ms. clock: what measures a call."""
    weight_cache.clear()
    x = torch.randn(case.T, case.K, device=device, dtype=torch.bfloat16, requires_grad=True)
    outputs = (case.K,) if case.kind == "mlp" else case.N
    upstreams = [torch.randn(case.T, N, device=device, dtype=torch.bfloat16) for N in outputs]
    found = variants(case, device, config, with_torchao)
    times = in_turn({name: lambda v=v: v.step(x, upstreams) for name, v in found.items()}, rounds, clock)
    row = {"case": case.name, "kind": case.kind, "T": case.T, "K": case.K, "N": sum(case.N)}
    return row | medians(times)


def table(data: dict[str, Any]) -> Table:
    """One row a case: ms, and how many times as fast as BF16; no column of what was not measured."""
    env = data["environment"]
    kept = ", ".join(f"{name} {env['versions'][name]}" for name in ("torch", "triton", "torchao"))
    out = Table(title=f"forward + backward, {machine(env)}, {env['date']}, {kept}")
    shown = [name for name in MS if any(f"{name}_ms" in row for row in data["cases"])]
    for heading in ("case", "T", "K", "N", *(MS[name] for name in shown)):
        out.add_column(heading, justify="left" if heading == "case" else "right")
    for row in data["cases"]:
        cells = [row["case"], *(f"{row[k]:,}" for k in "TKN")]
        for name in shown:
            ms = row.get(f"{name}_ms")
            cells.append("" if ms is None else f"{ms:.3f} ms  {row['bf16_ms'] / ms:.2f}x")
        out.add_row(*cells)
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (sys.argv when None)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="on a GPU many sizes, for the table of what is too small")
    parser.add_argument("--rounds", type=count("is no number of rounds"), default=5, help="turns of all variants")
    parser.add_argument("--seconds", type=SECONDS, default=0.1, help="of each variant in each round; not with --sizes")
    how = {"type": one_of(Accumulate), "default": FP8DenseConfig.accumulate}
    parser.add_argument("--accumulate", **how, help="see fp8.dense.accumulate")
    parser.add_argument("--out", type=out_file, default=None, help="also write the results to this JSON file")
    command = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(command)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.sizes and device.type != "cuda":
        parser.error("--sizes is for a GPU, and there is none: leave it out to run the tiny shapes of a CPU.")
    cases = (SIZES if args.sizes else SCOUT) if device.type == "cuda" else TINY
    config = FP8DenseConfig(accumulate=args.accumulate)
    numerics = resolve(config)
    command = ["python -m recipes.bench_dense", *command]
    data = {"environment": environment(device, numerics, command), "cases": []}
    clock = device_ms if args.sizes else lambda run: elapsed_ms(run, args.seconds, device.type == "cuda")
    for case in cases:
        with_torchao = not args.sizes and device.type == "cuda"
        data["cases"].append(measure(case, device, config, args.rounds, clock, with_torchao=with_torchao))
    Console(width=None if sys.stdout.isatty() else 150).print(table(data))
    if device.type != "cuda":
        print("Without a GPU: tiny shapes, no torchao, BF16 is not compiled. The times say nothing of a GPU's.")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
