"""Prints what each scale rule keeps: `python -m converters.rules`, on any device, in seconds.

normal    SwiGLU experts on normal inputs, weights of std 0.02: SQNR in dB of output and gradients against float64
spread    one GEMM's input gradient where tokens differ by a log-normal factor (sigma 2.5), as gradients do: the median
          of the tokens' SQNR, and the share of tokens of which FP8 keeps nothing
"""

import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.expert_mlp import expert_mlp
from converters.grouped_mm import grouped_mm
from converters.numerics import Numerics
from converters.rules.state import DelayedState

SIZES, D, H = (700, 300, 620, 428), 256, 512
ROWS = (("tokenwise", "auto"), ("rowwise", "auto"), ("blockwise", "auto"))
ROWS += tuple((recipe, fmt) for recipe in ("tensorwise", "delayed") for fmt in ("e5m2", "e4m3"))


def _db(exact: Tensor, actual: Tensor, dim: int | None = None) -> Tensor:
    noise = torch.linalg.vector_norm(exact - actual.double(), dim=dim)
    return 20 * torch.log10(torch.linalg.vector_norm(exact, dim=dim) / noise)


def _exact_mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    groups = x.split(SIZES)
    parts = [torch.nn.functional.silu(r @ w1[e].t()) * (r @ w3[e].t()) @ w2[e].t() for e, r in enumerate(groups)]
    return torch.cat(parts)


def _state(n: Numerics, gemms: int, device: str) -> DelayedState | None:
    if n.recipe != "delayed":
        return None
    return DelayedState(gemms, len(SIZES), n.gradients, DelayedConfig(warm_start=True)).to(device)


def normal(n: Numerics, device: str) -> list[float]:
    """SQNR of output, dx and dw1."""
    randn = torch.Generator().manual_seed(0)
    shapes = ((sum(SIZES), D), (len(SIZES), H, D), (len(SIZES), D, H), (len(SIZES), H, D))
    values = [torch.randn(s, generator=randn) * (0.02 if len(s) == 3 else 1) for s in shapes]
    g = torch.randn(shapes[0], generator=randn).to(device)
    leaves = [v.to(device).requires_grad_() for v in values]
    wide = [v.to(device).double().requires_grad_() for v in values]
    offs = torch.tensor(SIZES, device=device).cumsum(0).int()
    results = []
    for out, inputs, dtype in (
        (_exact_mlp(*wide), wide, torch.float64),
        (expert_mlp(*leaves, offs, n, _state(n, 2, device)), leaves, torch.float32),
    ):
        results.append([out.detach(), *torch.autograd.grad(out, inputs[:2], g.to(dtype))])
    return [_db(a, b).item() for a, b in zip(*results, strict=True)]


def spread(n: Numerics, device: str) -> tuple[float, float]:
    """Median SQNR of a token's dx, and the share of tokens without one."""
    randn = torch.Generator().manual_seed(1)
    g = torch.randn(sum(SIZES), H, generator=randn) * torch.randn(sum(SIZES), 1, generator=randn).mul(2.5).exp()
    g, w = g.to(device), (torch.randn(len(SIZES), H, D, generator=randn) * 0.02).to(device)
    x = torch.randn(sum(SIZES), D, generator=randn).to(device).requires_grad_()
    offs = torch.tensor(SIZES, device=device).cumsum(0).int()
    y = grouped_mm(x, w.transpose(1, 2), offs, n, _state(n, 1, device))
    (dx,) = torch.autograd.grad(y, [x], g)
    exact = torch.cat([r @ w[e].double() for e, r in enumerate(g.double().split(SIZES))])
    lost = (dx == 0).all(1)
    return _db(exact, dx, dim=1).median().item(), lost.double().mean().item()


def main() -> None:
    """The table, as Markdown."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| rule, gradients | out | dx | dw1 | dx of a token, spread | tokens lost |")
    print("| --- | --: | --: | --: | --: | --: |")
    for recipe, fmt in ROWS:
        n = Numerics(recipe=recipe, backend="emulated", grad_dtype=fmt)
        out, dx, dw = normal(n, device)
        median, lost = spread(n, device)
        print(
            f"| `{recipe}`, {n.gradients.upper()} | {out:.1f} dB | {dx:.1f} dB | {dw:.1f} dB | {median:.1f} dB "
            f"| {100 * lost:.1f} % |"
        )


if __name__ == "__main__":
    main()
