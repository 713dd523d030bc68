"""Triton kernels against their torch twins, bit for bit; run by test_kernels.py in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from converters.backends import hopper, reference, reference_tokens
from converters.kernels import swiglu, tokens, weights
from tests.converters.interpreter import run_checks

SIZES, M = [44, 1, 7, 0, 133, 64], 270  # uneven, empty, over a tile, 21 rows of nobody


def _offs() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(torch.int32)


def _same(ours: Tensor, theirs: Tensor) -> None:
    bits = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (ours, theirs)]
    different = (bits[0] != bits[1]) & ~(ours.float().isnan() & theirs.float().isnan())
    assert not different.any(), f"{int(different.sum())} of {ours.numel()} differ, first at {different.nonzero()[0]}"


def _rows(dtype: torch.dtype) -> Tensor:
    x = torch.randn(M, 48) * torch.exp2(torch.randint(-20, 20, (M, 1)).float())
    x[3], x[5], x[6, 2] = 0, 1e-38, 3e38
    x[9, 1], x[10, 4] = torch.nan, torch.inf
    x[11] = 0
    x[11, :3] = torch.tensor([448.0 * 2**-5, 449.0 * 2**-5, -465.0 * 2**-5])  # around a step of the scale
    return x.to(dtype)


def check_group_tables() -> None:
    """Spans, tiles and chunks by hand."""
    g = hopper.groups(_offs(), M)
    starts = [0, 44, 45, 52, 52, 185, 249]
    tiles = [1, 1, 1, 0, 2, 1]
    assert g.spans[:, 0].tolist() == starts
    assert g.spans[:6, 1].tolist() == starts[1:]
    assert g.spans[6].tolist() == [249, 270, 7, 5]
    assert g.spans[:6, 2].tolist() == [sum(tiles[:i]) for i in range(6)]
    assert g.tiles[:7].tolist() == [
        [0, 0, 44, 1],
        [1, 44, 45, 1],
        [2, 45, 52, 1],
        [4, 52, 185, 1],
        [4, 180, 185, 1],
        [5, 185, 249, 1],
        [5, 249, 270, 0],
    ]
    assert g.chunks[:5].tolist() == [[0, 0, 44, 0], [1, 44, 45, 1], [2, 45, 52, 2], [4, 52, 185, 3], [5, 185, 249, 5]]


def check_quantize_rows() -> None:
    """Normal, tiny, huge, zero, nan and inf rows, in BF16 and float32."""
    for dtype in (torch.bfloat16, torch.float32):
        x = _rows(dtype)
        for ours, theirs in zip(hopper.quantize_rows(x), reference.quantize_rows(x), strict=True):
            _same(ours, theirs)


def check_gathered_rows() -> None:
    """Rows by index, repeated and absent ones."""
    x, index = _rows(torch.bfloat16), torch.tensor([3, -1, 7, 0, 0])
    gathered = x[index.clamp_min(0)].clone()
    gathered[1] = 0
    for ours, theirs in zip(hopper.quantize_rows(x, index), reference.quantize_rows(gathered), strict=True):
        _same(ours, theirs)


def check_swiglu() -> None:
    """SwiGLU and its gradient. The interpreter computes the sigmoid as torch does."""
    y13, dh = torch.randn(20, 96).bfloat16(), torch.randn(20, 48).bfloat16()
    over = dh.clone()
    in_place = hopper.dswiglu_rows(over, y13)
    for ours, theirs in (
        (hopper.swiglu_rows(y13), reference.swiglu_rows(y13)),
        (in_place, reference.dswiglu_rows(dh, y13)),
    ):
        found, expected = (q.float() * s[:, None] for q, s in (ours, theirs))
        assert (found - expected).norm() <= 1e-3 * expected.norm()
    assert in_place[0].data_ptr() == over.data_ptr()
    for ours, other in zip(in_place, swiglu.dswiglu_rows(dh, y13), strict=True):
        _same(ours, other)


def _untransposed(q: Tensor, g: hopper.Groups) -> Tensor:
    out = torch.zeros(M, q.shape[0], dtype=torch.uint8)
    for begin, end, tile, _ in g.spans[:-1].tolist():
        out[begin:end] = q.view(torch.uint8).t()[128 * tile :][: end - begin]
        padding = q.view(torch.uint8).t()[128 * tile + end - begin : 128 * tile + -(-(end - begin) // 128) * 128]
        assert not padding.any(), "padding is not zero"
    return out.view(torch.float8_e4m3fn)


def check_columns() -> None:
    """Re-scaled from row-scaled FP8, and from high precision; rows of nobody are nan and must not matter."""
    x = _rows(torch.bfloat16).nan_to_num(posinf=0)
    x[sum(SIZES) :] = torch.nan
    live = torch.tensor(SIZES) > 0
    g, rg = hopper.groups(_offs(), M), reference.groups(_offs(), M)
    q, s = hopper.quantize_rows(x)
    for ours, theirs in (
        (hopper.wgrad_operand(q, s, g), reference.wgrad_operand(q, s, rg)),
        (hopper.wgrad_operand_hp(x, g), reference.wgrad_operand_hp(x, rg)),
    ):
        _same(_untransposed(ours.q, g), theirs.q)
        _same(ours.scale[live].float(), theirs.scale[live])


def check_some_columns() -> None:
    """Halves of the columns of a tensor, as they lie: what they are in the operand of all columns."""
    x = torch.randn(M, 96).bfloat16()
    g = hopper.groups(_offs(), M)
    q, s = hopper.quantize_rows(x)
    for whole, halves in (
        (hopper.wgrad_operand(q, s, g), [hopper.wgrad_operand(h, s, g) for h in q.chunk(2, dim=1)]),
        (hopper.wgrad_operand_hp(x, g), [hopper.wgrad_operand_hp(h, g) for h in x.chunk(2, dim=1)]),
    ):
        joined = torch.cat([_untransposed(h.q, g).view(torch.uint8) for h in halves], dim=1)
        _same(joined.view(torch.float8_e4m3fn), _untransposed(whole.q, g))
        live = torch.tensor(SIZES) > 0
        _same(torch.cat([h.scale for h in halves], dim=1)[live], whole.scale[live])


def check_weights() -> None:
    """Cold, and carried with the right, the wrong and a nan scale: always the same bytes."""
    weights.REPAIR_PROGRAMS = 2
    for dtype in (torch.float32, torch.bfloat16):
        ws = [
            torch.randn(3, 80, 48).to(dtype),
            (torch.randn(3, 16, 48) * torch.tensor([1, 2, 100.0])[:, None, None]).to(dtype),
        ]
        theirs = reference.quantize_weight(ws)
        for factor in (None, [1, 1, 1], [1, 2, 0.25], [torch.nan, 1, 1]):
            previous = None if factor is None else replace(theirs, scale=theirs.scale * torch.tensor(factor))
            ours = hopper.quantize_weight(ws, previous=previous)
            _same(ours.q, theirs.q)
            _same(ours.q_t, theirs.q_t)
            _same(ours.scale, theirs.scale)


def check_one_layout_of_a_weight() -> None:
    """For a single pass the other layout is left empty, cold and carried."""
    weights.REPAIR_PROGRAMS = 2
    w = torch.randn(2, 80, 48)
    theirs = reference.quantize_weight([w])
    for previous in (None, replace(theirs, scale=theirs.scale * 4)):
        forward = hopper.quantize_weight([w], previous=previous, backward=False)
        backward = hopper.quantize_weight([w], previous=previous, forward=False)
        assert forward.q_t.numel() == backward.q.numel() == 0
        _same(forward.q, theirs.q)
        _same(backward.q_t, theirs.q_t)
        _same(forward.scale, theirs.scale)
        _same(backward.scale, theirs.scale)


def check_transposed_weight() -> None:
    """A transposed view is quantized as it lies."""
    w = torch.randn(2, 48, 80).transpose(1, 2)
    ours, theirs = hopper.quantize_weight([w]), reference.quantize_weight([w])
    _same(ours.q, theirs.q)
    _same(ours.q_t, theirs.q_t)


def check_wgrad_hp() -> None:
    """The weight gradient of high precision operands; an expert without rows gets zeros."""
    a, b = torch.randn(M, 32), torch.randn(M, 48)
    ours = hopper.gemm_wgrad_hp(a, b, hopper.groups(_offs(), M), torch.float32)
    theirs = reference.gemm_wgrad_hp(a, b, reference.groups(_offs(), M), torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not ours[3].any()
    one, other = (
        hopper.gemm_wgrad_hp(a.bfloat16(), x, hopper.groups(_offs(), M), torch.float32) for x in (b, b.bfloat16())
    )
    assert torch.equal(one, other)  # tl.dot takes two of one dtype


def _routed(T: int, k: int, D: int, absent: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, D], slots [T, k] of which `absent` are elsewhere, scores [M] and rows [M, D], with zeros, inf and nan."""
    M = T * k - absent
    slots = reference_tokens.slots_of(torch.randperm(T * k)[:M], T, k)
    x = torch.randn(T, D) * torch.exp2(torch.randint(-20, 20, (T, 1)).float())
    scores, rows = torch.randn(M), torch.randn(M, D).bfloat16()
    if T > 2 and M > 2:
        x[0], x[1, 0], x[2, 1], scores[:3] = 0, torch.inf, torch.nan, torch.tensor([0, torch.inf, torch.nan])
    return x.bfloat16(), slots, scores, rows


ROUTES = [(3, 1, 48, 0), (3, 3, 80, 2), (1, 8, 48, 0), (0, 2, 48, 0), (3, 2, 48, 6)]
LONG = (2, 2, 80, 1)  # with blocks of 32 columns


def _each_route(check: Callable[..., None]) -> None:
    before = tokens.MAX_BLOCK
    for route in (*ROUTES, LONG):
        tokens.MAX_BLOCK = 32 if route is LONG else before
        x, slots, scores, rows = _routed(*route)
        for weighted in (None, scores):
            check(x, slots, weighted, rows)
    tokens.MAX_BLOCK = before


def check_tokens_to_rows() -> None:
    """Weighted or not, with and without dots, k 1 to 8, rows longer than a program holds."""

    def check(x: Tensor, slots: Tensor, scores: Tensor | None, rows: Tensor) -> None:
        for other in (None, rows):
            args = x, slots, len(rows), scores, other
            ours, theirs = tokens.to_rows(*args), reference_tokens.to_rows(*args)
            _same(ours[0], theirs[0])
            _same(ours[1], theirs[1])
            torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-4, equal_nan=True)
            packed, dots = tokens.to_packed_rows(*args)
            assert packed.shape == reference_tokens.to_packed_rows(*args)[0].shape
            _same(packed.view(torch.float8_e4m3fn)[:, : x.shape[1]].contiguous(), theirs[0])
            _same(packed.view(torch.float32)[:, x.shape[1] // 4], theirs[1])
            _same(dots, ours[2])

    _each_route(check)


def check_rows_to_tokens() -> None:
    """The same with and without a base."""

    def check(x: Tensor, slots: Tensor, scores: Tensor | None, rows: Tensor) -> None:
        x = x.nan_to_num(posinf=1)
        for base, other in ((None, None), (x, None), (None, x), (x, x)):
            args = rows, slots, torch.float32, scores, base, other
            for ours, theirs in zip(tokens.to_tokens(*args), reference_tokens.to_tokens(*args), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)

    _each_route(check)


if __name__ == "__main__":
    run_checks(globals())
