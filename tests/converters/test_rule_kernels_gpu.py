"""The kernels of the emulated rules on a GPU: the bits of plain torch there, operand by operand and in all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.expert_mlp import expert_mlp
from converters.kernels import fake, fake_groups, finish, swiglu_hp
from converters.numerics import Numerics
from converters.rules import fused, passes, plain
from converters.rules.state import DelayedState
from tests.converters.rule_checks import (
    check_casts,
    check_finish,
    check_odd_shapes,
    check_rows_and_columns,
    check_weights,
    same_bits,
)
from tests.helpers import Experts, make_experts, with_tail

pytestmark = pytest.mark.gpu
RECIPES = ("tokenwise", "rowwise", "tensorwise", "blockwise", "delayed")
NAMES = ("out", "x", "w1", "w2", "w3")
CHECKS = (check_casts, check_rows_and_columns, check_odd_shapes, check_weights, check_finish)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kernels_give_the_bits_of_plain_torch(check: Callable[[], None]) -> None:
    with torch.device("cuda"):
        check()


def test_swiglu_gives_the_bits_of_plain_torch() -> None:
    """Every value of bfloat16 left and right: exp, division and the order of operations are torch's."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    other = codes[torch.randperm(1 << 16, device="cuda")].view(256, 256)
    y13, dh = torch.cat([codes.view(256, 256), other], dim=1), torch.randn(256, 256, device="cuda").bfloat16()
    for left in (y13, torch.randn(512, 1344 * 2, device="cuda") * 4):
        same_bits(fused.swiglu(left), plain.swiglu(left), "swiglu")
    same_bits(fused.dswiglu(dh, y13), plain.dswiglu(dh, y13), "dswiglu")


def passes_of(e: Experts, n: Numerics, dtype: torch.dtype, compiled: bool = False) -> dict[str, Tensor]:
    """Output, gradients and state of two micro-batches, of which the second one's rows are larger."""
    delayed = DelayedState(2, len(e.sizes), n.gradients, DelayedConfig(amax_history_len=4)).cuda()
    state = delayed if n.recipe == "delayed" else None
    run = torch.compile(expert_mlp, fullgraph=True) if compiled else expert_mlp
    made = {}
    for i in range(2):
        leaves = [t.to("cuda", dtype).requires_grad_() for t in ((i + 1) * e.x, e.w1, e.w2, e.w3)]
        out = run(*leaves, e.offs.cuda(), n, state)
        grads = torch.autograd.grad(out, leaves, e.upstream.to("cuda", dtype))
        made |= {f"{name} {i}": t.detach() for name, t in zip(NAMES, (out, *grads), strict=True)}
    return made | {f"state {i}": t.clone() for i, t in enumerate(delayed.tensors())}


@pytest.mark.parametrize("swiglu", ["torch", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_mlp_gives_the_bits_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, recipe: str, fmt: str, dtype: torch.dtype, swiglu: str
) -> None:
    e = with_tail(make_experts((190, 0, 131, 127, 1), D=192, H=336, tail=5), torch.nan)
    if swiglu == "torch":
        monkeypatch.setattr(fused, "swiglu", plain.swiglu)
        monkeypatch.setattr(fused, "dswiglu", plain.dswiglu)
    for wgrad in ("fp8", "fp8_columns", "bf16"):
        n = Numerics(recipe=recipe, backend="emulated", grad_dtype=fmt, wgrad=wgrad)
        ours = passes_of(e, n, dtype)
        with monkeypatch.context() as plainly:
            plainly.setattr(passes, "ops", lambda device: plain)
            theirs = passes_of(e, n, dtype)
        for name, t in theirs.items():
            same_bits(ours[name], t, f"{wgrad} {name}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_a_compiled_graph_as_in_eager_mode(recipe: str) -> None:
    e = make_experts((190, 0, 131, 127), D=128, H=256, tail=5)
    n = Numerics(recipe=recipe, backend="emulated")
    eager, compiled = (passes_of(e, n, torch.bfloat16, compiled=c) for c in (False, True))
    for name, t in eager.items():
        same_bits(compiled[name], t, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_compiled_again_for_other_group_sizes(recipe: str) -> None:
    """Sizes of groups are data: kernels are those of the first micro-batch."""
    from_sizes = [make_experts(s, D=128, H=256) for s in ((100, 60, 40), (0, 199, 1), (200, 0, 0))]
    n = Numerics(recipe=recipe, backend="emulated")
    passes_of(from_sizes[0], n, torch.bfloat16)
    before = kernels_compiled()
    for e in from_sizes[1:]:
        passes_of(e, n, torch.bfloat16)
    assert kernels_compiled() == before > 0


def kernels_compiled() -> int:
    """Variants in Triton's caches of this process."""
    device, modules = torch.cuda.current_device(), (fake, fake_groups, finish, swiglu_hp)
    caches = [getattr(k, "device_caches", {}) for m in modules for k in vars(m).values()]
    return sum(len(c[device][0]) for c in caches if device in c)
