"""What recipes.bench measures: shapes, inputs, and the ways to run one expert MLP forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.moe.moe import _run_experts_grouped_mm

from converters import weight_cache
from converters.config import Numerics
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight

ALIGNMENT = 16  # rows: torchao's FP8 path and BF16's weight gradient take no other group sizes; ours does


@dataclass(frozen=True)
class Case:
    """One expert MLP: M routed rows, model dim D, expert hidden H, E local experts."""

    name: str
    M: int
    D: int
    H: int
    E: int

    @property
    def flops(self) -> int:
        """Of forward and backward: nine GEMMs of 2 * M * D * H."""
        return 18 * self.M * self.D * self.H


CASES = [
    Case("scout", 16384, 5120, 8192, 16),
    Case("scout-long", 65536, 5120, 8192, 16),
    Case("mixtral", 16384, 4096, 14336, 8),
    Case("mixtral-long", 65536, 4096, 14336, 8),
    Case("maverick/4", 8192, 5120, 8192, 32),
    Case("scout-ep8", 16384, 5120, 8192, 2),
    Case("small", 2048, 5120, 8192, 16),
]
TINY = Case("tiny", 128, 64, 96, 4)  # for a machine without a GPU


def parse_shape(text: str) -> Case:
    """A case from "M,D,H,E".

    Raises:
        ValueError: not four positive numbers, or M, D or H no multiple of 16.
    """
    try:
        M, D, H, E = (int(v) for v in text.split(","))
    except ValueError:
        raise ValueError(f"--shape {text!r} must be four whole numbers M,D,H,E, e.g. 16384,5120,8192,16.") from None
    if min(M, D, H, E) < 1:
        raise ValueError(f"--shape {text!r}: M, D, H and E must be positive.")
    rows, dims = "BF16's weight gradient and torchao take groups of whole 16 rows only", "FP8 GEMMs take no other dims"
    for name, value, why in (("M", M, rows), ("D", D, dims), ("H", H, dims)):
        if rest := value % ALIGNMENT:
            near = [str(n) for n in (value - rest, value - rest + ALIGNMENT) if n]
            raise ValueError(
                f"--shape {text!r}: {name} = {value} is no multiple of 16, but {why}: give {' or '.join(near)}."
            )
    return Case(text, M, D, H, E)


def group_ends(case: Case, seed: int) -> Tensor:
    """int32 [E], ends of uneven groups that fill M rows: half shared equally, half at random, in whole 16 rows."""
    share = torch.rand(case.E, generator=torch.Generator().manual_seed(seed))
    sizes = 0.5 * case.M / case.E + 0.5 * case.M * share / share.sum()
    ends = (sizes.cumsum(0) / ALIGNMENT).round().to(torch.int32) * ALIGNMENT
    ends[-1] = case.M
    return ends.clamp_(max=case.M)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one case: x and the upstream gradient g [M, D], w1 and w3 [E, H, D], w2 [E, D, H], offs [E]."""

    x: Tensor
    g: Tensor
    w1: Tensor
    w2: Tensor
    w3: Tensor
    offs: Tensor


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """BF16 tensors of normal numbers, weights of std 0.02."""
    torch.manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    M, D, H, E = case.M, case.D, case.H, case.E
    w1, w3, w2 = (randn(*s).mul_(0.02) for s in ((E, H, D), (E, H, D), (E, D, H)))
    return Inputs(x=randn(M, D), g=randn(M, D), w1=w1, w2=w2, w3=w3, offs=group_ends(case, seed).to(device))


@dataclass(frozen=True)
class Variant:
    """One way to run the MLP. leaves: x, w1, w2, w3 that collect gradients. prepare: what comes before each step."""

    name: str
    leaves: tuple[Tensor, ...]
    forward: Callable[..., Tensor]
    prepare: Callable[[], None]

    def step(self, g: Tensor) -> Tensor:
        """Forward and backward with fresh gradients; returns the output."""
        self.clear()
        self.prepare()
        out = self.forward(*self.leaves)
        out.backward(g)
        return out

    def clear(self) -> None:
        """Drops the gradients."""
        for leaf in self.leaves:
            leaf.grad = None


def steps(variants: list[Variant], g: Tensor) -> dict[str, Callable[[], None]]:
    """What is timed of each, by name: a step that leaves no gradients, so that only one variant's take memory."""

    def run(v: Variant) -> None:
        v.step(g)
        v.clear()

    return {v.name: partial(run, v) for v in variants}


def _leaves(i: Inputs, numerics: Numerics | None = None) -> tuple[Tensor, ...]:
    wrap = (lambda w: w) if numerics is None else (lambda w: FP8ExpertWeight(w, numerics))
    weights = (wrap(w.detach()).requires_grad_() for w in (i.w1, i.w2, i.w3))
    return (i.x.detach().requires_grad_(), *weights)


def expert_function(cuda: bool, dynamic: bool | None = False) -> Callable[..., Tensor]:
    """torchtitan's own expert function, compiled where there is a GPU; whatever was compiled before is forgotten."""
    if not cuda:
        return _run_experts_grouped_mm
    torch.compiler.reset()
    return torch.compile(_run_experts_grouped_mm, fullgraph=True, dynamic=dynamic)


def bf16(i: Inputs, run: Callable[..., Tensor] | None = None) -> Variant:
    """torchtitan's own expert function in BF16. run: it, compiled before, for other rows and experts too."""
    counts, leaves = torch.diff(i.offs, prepend=i.offs.new_zeros(1)), _leaves(i)
    if run is None:
        run = expert_function(i.x.is_cuda)
    else:
        for tensor in (counts, *leaves):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return Variant("bf16", leaves, lambda x, w1, w2, w3: run(w1, w2, w3, x, counts), lambda: None)


def torchao(i: Inputs) -> Variant:
    """torchao's rowwise FP8 grouped GEMM, three times."""
    # looked up here: a prototype, which another torchao may have moved, must not keep the rest from being measured
    scaled_mm = import_module("torchao.prototype.moe_training")._to_fp8_rowwise_then_scaled_grouped_mm

    def mm(a: Tensor, w: Tensor) -> Tensor:
        return scaled_mm(a, w.transpose(-2, -1), i.offs, pad_token_groups_for_grouped_mm=False)

    def run(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return mm(F.silu(mm(x, w1)) * mm(x, w3), w2)

    return Variant("torchao", _leaves(i), run, lambda: None)


def change_weights(i: Inputs) -> None:
    """What is quantized of the weights is out of date from now on, as after an optimizer step."""
    for w in (i.w1, i.w2, i.w3):
        torch.autograd.graph.increment_version(w)


def ours(i: Inputs, numerics: Numerics, cold: bool) -> Variant:
    """This project's MLP. cold: the weights have changed since the last step, as after an optimizer's; used once."""
    numerics = replace(numerics, cache=True, used_once=cold)
    leaves = _leaves(i, numerics)

    def run(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return expert_mlp(x, w1, w2, w3, i.offs, numerics)

    return Variant("cold" if cold else "warm", leaves, run, partial(change_weights, i) if cold else (lambda: None))


def forget_weights() -> None:
    """Drops every quantized weight."""
    weight_cache.clear()
