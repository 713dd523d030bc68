"""The kernels of the emulated rules against plain torch, bit for bit; test_rule_kernels.py runs them interpreted."""

from collections.abc import Iterator

import torch
from torch import Tensor

from converters.delayed_config import DelayedConfig
from converters.expert_mlp import expert_mlp
from converters.grouped_mm import grouped_mm
from converters.kernels import fake
from converters.numerics import Numerics
from converters.rules import fused, passes, plain
from converters.rules.delayed import Delayed
from converters.rules.formats import E4M3, E5M2, Format, cast
from converters.rules.ragged import Ragged, ragged
from converters.rules.rule import STATELESS, Rule
from converters.rules.state import DelayedState
from tests.converters.interpreter import run_checks
from tests.helpers import Experts, make_experts

SIZES = (44, 1, 7, 0, 133, 64)
M = 270  # more than two tiles; one group is empty, 21 rows are nobody's
DTYPES = (torch.bfloat16, torch.float32)


def same_bits(ours: Tensor, theirs: Tensor, what: str) -> None:
    """The same dtype, shape and bits, -0 and 0 told apart; any nan is any other."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), f"{what}: {ours.shape} {ours.dtype}"
    bits = [t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32) for t in (ours, theirs)]
    different = (bits[0] != bits[1]) & ~(ours.isnan() & theirs.isnan())
    at = different.nonzero()[:1].tolist()
    pair = [t[different][:3].tolist() for t in (ours, theirs)]
    assert not different.any(), f"{what}: {int(different.sum())} of {ours.numel()} differ, first at {at}: {pair}"


def special_rows(width: int, dtype: torch.dtype) -> Tensor:
    """[M, width] of all magnitudes, with zeros, subnormals, nan, inf, ties and what is around a step of a scale."""
    x = torch.randn(M, width) * torch.exp2(torch.randint(-20, 20, (M, 1)).float())
    x[3], x[5], x[6, 2], x[7, 3:9] = 0, 1e-38, 3e38, torch.tensor([1e-40, -1e-44, 2.0**-126, -0.0, 1e-30, 9e-31])
    x[9, 1], x[10, 4] = torch.nan, -torch.inf
    x[11] = 0
    x[11, :3] = torch.tensor([448.0 * 2**-5, 449.0 * 2**-5, -465.0 * 2**-5])
    x[12] = torch.arange(width) * 2.0**-10 * torch.tensor([1.0, -1.0]).repeat(width // 2)  # halves of the grid's steps
    return x.to(dtype)


def rules(experts: int, ops: object) -> Iterator[tuple[str, Rule]]:
    """Each rule; delayed with multipliers, of which one slot's are to be found, and one is too large for its values."""
    yield from ((name, rule(ops)) for name, rule in STATELESS.items())
    multiplier = torch.full((2, experts), 3.0)
    multiplier[1], multiplier[0, 1:2], multiplier[0, 2:3] = 0, 0, 1e30
    yield "delayed", Delayed(torch.stack([multiplier, 1 / multiplier.clamp_min(1e-9)], dim=1), 0, ops)


def compare(made: object, wanted: object, rows: Ragged, what: str) -> None:
    """Two operands: what is multiplied, rows of nobody apart, and what is multiplied after it."""
    v, w = (o.values(torch.bfloat16) for o in (made, wanted))
    live = slice(int(rows.offs[-1]) if v.dim() == 2 else None)
    same_bits(v[live], w[live], what)
    assert (made.outer is None) == (wanted.outer is None), what
    if made.outer is not None:
        same_bits(made.outer, wanted.outer, what)


def check_casts() -> None:
    """Every value that bfloat16 has, and float32 ones around the steps of both formats, as they are and multiplied."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    near = torch.cat([(codes.float().view(torch.int32) + d).view(torch.float32) for d in (-1, 1, 0x7FFF, 0x8000)])
    for x in (codes.reshape(-1, 256), near.reshape(-1, 256)):
        rows = ragged(torch.tensor([len(x)], dtype=torch.int32), len(x))
        for fmt in (E4M3, E5M2):
            for multiplier in (1.0, 0.3, 7e4):
                m = torch.tensor([multiplier])
                rule = Delayed(torch.stack([m, m])[None], 0, fused, final=True)
                made = rule.rows(x, fmt, rows, 0)
                same_bits(made.v.float(), cast(x, m, fmt).float(), f"{fmt.name} {multiplier}")


def _check_rows(fmt: Format, dtype: torch.dtype, sizes: tuple[int, ...], width: int, total: int) -> None:
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = ragged(offs, total)
    x = special_rows(width, dtype)[:total]
    for (name, ours), (_, theirs) in zip(rules(len(sizes), fused), rules(len(sizes), plain), strict=True):
        for slot in range(2 if name == "delayed" else 1):
            for made, wanted in zip(ours.both(x, fmt, rows, slot), theirs.both(x, fmt, rows, slot), strict=True):
                compare(made, wanted, rows, f"{name} {fmt.name} {dtype} {sizes} {width} {slot}")
        if name == "delayed":
            same_bits(ours.amax, theirs.amax, name)
            same_bits(ours.used, theirs.used, name)


def check_rows_and_columns() -> None:
    """Every rule, both formats, both dtypes: uneven and empty groups, blocks that end early, rows of nobody."""
    _check_rows(E4M3, torch.bfloat16, SIZES, 144, M)
    _check_rows(E5M2, torch.float32, SIZES, 144, M)


def check_odd_shapes() -> None:
    """One row, no row, no token at all, one group, an odd width, rows longer than a program holds."""
    for sizes, width, total in (((0, 1), 16, 1), ((0, 0), 16, 0), ((0, 0, 0), 48, 40), ((140,), 34, 140)):
        _check_rows(E5M2, torch.bfloat16, sizes, width, total)
    x, before, fake.MAX_BLOCK = special_rows(80, torch.float32), fake.MAX_BLOCK, 32
    for fmt in (E4M3, E5M2):
        same_bits(fused.rows_pow2(x, fmt).v, plain.rows_pow2(x, fmt).values(torch.bfloat16), fmt.name)
    fake.MAX_BLOCK = before


def check_weights() -> None:
    """Every rule, one and two tensors, both contractions, a transposed view, blocks of 128 that two weights share."""
    ws = [special_rows(144, torch.bfloat16)[: 3 * n].view(3, n, 144) for n in (70, 80)]
    ws[1] = ws[1].transpose(1, 2).contiguous().transpose(1, 2)
    rows = ragged(torch.tensor([1, 2, 3], dtype=torch.int32), 3)
    for parts in (ws, [ws[0].float() * 1.1]):
        for (name, ours), (_, theirs) in zip(rules(3, fused), rules(3, plain), strict=True):
            for contracted in (1, 2) if name == "rowwise" else (2,):
                for slot in range(2 if name == "delayed" else 1):
                    made, wanted = (r.weight(parts, contracted, slot) for r in (ours, theirs))
                    compare(made, wanted, rows, f"{name} {contracted} {slot} {len(parts)}")


def check_finish() -> None:
    """Nobody's rows and experts without any become zeros, though they hold nan; factors, dtypes, parts."""
    rows = ragged(torch.tensor(SIZES).cumsum(0).to(torch.int32), M)
    factor = torch.rand(len(SIZES))
    y, dw = torch.randn(M, 300), torch.randn(len(SIZES), 36, 300)
    y[sum(SIZES) :], dw[3] = torch.nan, torch.nan
    bf16, fp32 = DTYPES
    for made, dtype, f in ((bf16, bf16, None), (bf16, fp32, None), (bf16, bf16, factor), (fp32, fp32, factor)):
        ours, theirs = (o.finish_rows(y.to(made), rows, f, dtype) for o in (fused, plain))
        same_bits(ours, theirs, f"rows {made} {dtype}")
        for parts in (1, 2):
            ours, theirs = (o.finish_weights(dw.to(made), rows, f, dtype, parts) for o in (fused, plain))
            same_bits(ours, theirs, f"weights {made} {dtype} {parts}")
    for f in (None, factor):  # as torch._grouped_mm gives what is no multiple of 16 bytes wide
        (y20, dw20), wide = (y[:, :20].bfloat16(), dw[..., :20].bfloat16()), torch.nn.functional.pad
        ours = [fused.finish_rows(wide(y20, (0, 4))[:, :20], rows, f, bf16)]
        ours.append(fused.finish_weights(wide(dw20, (0, 4))[..., :20], rows, f, bf16, 1))
        theirs = [plain.finish_rows(y20, rows, f, bf16), plain.finish_weights(dw20, rows, f, bf16, 1)]
        for i in range(2):
            same_bits(ours[i], theirs[i], f"filled up {i} {f is None}")


def check_swiglu() -> None:
    """In float32, but for the last bits of exp: the interpreter has numpy's."""
    y13, dh = 3 * torch.randn(20, 96).bfloat16(), torch.randn(20, 48).bfloat16()
    y13[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -100.0])
    for ours, theirs in (
        (fused.swiglu(y13), plain.swiglu(y13)),
        (fused.dswiglu(dh, y13), plain.dswiglu(dh, y13)),
    ):
        assert ours.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def _mlp(e: Experts, n: Numerics) -> list[Tensor]:
    """Outputs, gradients and state of two micro-batches in bfloat16, the second one larger."""
    state = DelayedState(2, 3, n.gradients, DelayedConfig(amax_history_len=3)) if n.recipe == "delayed" else None
    made = []
    for i in range(2 if state else 1):
        leaves = [t.bfloat16().requires_grad_() for t in ((i + 1) * e.x, e.w1, e.w2, e.w3)]
        out = expert_mlp(*leaves, e.offs, n, state)
        made += [out.detach(), *torch.autograd.grad(out, leaves, e.upstream.bfloat16())]
    return made + ([t.clone() for t in state.tensors()] if state else [])


def _linear(e: Experts, n: Numerics) -> list[Tensor]:
    """A GEMM alone, in float32."""
    state = DelayedState(1, 3, n.gradients, DelayedConfig(warm_start=True)) if n.recipe == "delayed" else None
    leaves = [e.x.clone().requires_grad_(), e.w1.transpose(1, 2).clone().requires_grad_()]
    y = grouped_mm(*leaves, e.offs, n, state)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=torch.manual_seed(1)))]


def check_mlp() -> None:
    """The MLP and a GEMM alone, forward and backward, by every rule: only who computes the operands differs."""
    fused.swiglu, fused.dswiglu = plain.swiglu, plain.dswiglu  # see check_swiglu
    plainly = passes.ops
    e = make_experts((40, 0, 31), D=48, H=80, tail=3)
    for recipe in (*STATELESS, "delayed"):
        for run, fmt, wgrad in ((_mlp, "e5m2", "fp8"), (_linear, "e4m3", "fp8_columns"), (_linear, "e4m3", "bf16")):
            n = Numerics(recipe=recipe, backend="emulated", grad_dtype=fmt, wgrad=wgrad)
            passes.ops = plainly
            wanted = run(e, n)
            passes.ops = lambda device: fused
            for i, (ours, theirs) in enumerate(zip(run(e, n), wanted, strict=True)):
                same_bits(ours, theirs, f"{n} {i}")


if __name__ == "__main__":
    run_checks(globals())
