"""The gradients of a SwiGLU MLP in FP8, one operator a step: what a step has used up is freed before the next begins.

    step               alive meanwhile, in bytes beside the MLP's output (2 M D)             peak with the output
    gradient_rows      x8, y13, h8: M D + 5 M H; q_t of W2: W, and of W13: 2 W; g8: M D      4 M D + 5 M H + 3 W
    hidden_gradient    the same, and dh: 2 M H, which becomes dy8                            4 M D + 7 M H + 3 W
    dW2                x8, dy8; q_t of W13; operands: P (D + H); dW2: b W                    less
    input_gradient     x8, dy8, dW2; q_t of W13; dx: 2 M D                                   less
    operands of dW13   x8, dy8, dW2, dx; operands: P (D + 2 H)                               less
    dW1                dW2, dx; operands; dW1: b W                                           less
    dW3                dW2, dx, dW1; operands without dW1's: P (D + H); dW3: b W             4 M D + P (D + H) + 3 b W

W = E H D; b: bytes of an element of a weight; P: the padded rows of an operand (kernels/cols.py), M and up to 128 an
expert. torchtitan's function in BF16, compiled, has 4 M D + 2 M H + 6 W at its end and 2 M D + 8 M H + 2 W in the
gradient of its SwiGLU, whichever is more. What keeps ours below, or within the padding of small groups:

- An operator's arguments live until it ends, whoever else needs them. So each step is an operator of its own, its
  inputs come in a dict that is emptied on the way, and the autograd node gives them up first (`taken`).
- The gradient of the SwiGLU is written over dh, which has as many bytes.
- dW1 and dW3 are two products: in the last step one operand of P H is gone.
- Where each layout of a weight is used once, W13's q_t is there from the forward on. Where that would make
  `hidden_gradient` the peak (many rows an expert), the backward makes it instead, for a further reading of w1 and w3
  (`makes_both`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from converters.backends import get_backend
from converters.backends.reference import FP8, dswiglu, swiglu
from converters.dense_linear import one_group
from converters.differentiable import unwrapped
from converters.kernels.ops import operator
from converters.numerics import Numerics
from converters.scaling import wgrad_gemm
from converters.scaling import wgrad_operand as operand_of
from converters.telemetry import is_measured
from converters.telemetry_gradients import see_gradient, see_input_gradient, see_weight_gradient, watch_hidden
from converters.telemetry_mlp import parts_of
from converters.telemetry_rows import PlainRows
from converters.weight_cache import fp8_weight

Saved = dict[str, Tensor | None]


def groups_of(tables: list[Tensor], n: Numerics, M: int, device: torch.device) -> Any:
    """A backend's groups from their tables; no tables: all M rows are one group."""
    return get_backend(n.backend).groups_of(tables, M) if tables else one_group(n.backend, M, device)


def makes_both(M: int, w1: Tensor) -> bool:
    """Whether the forward makes q_t of W13 too, where it is used once. w1: [E, H, D] or [H, D].

    With it `hidden_gradient` has 4 M D + 7 M H + 3 W bytes, the last step 3 b W + 4 M D + M (H + D).
    """
    H, D = w1.shape[-2:]
    return 3 * (w1.element_size() - 1) * w1.numel() >= M * (6 * H - D)


def _empty_rows(g: Tensor, w1: Tensor, tables: list[Tensor], numerics: str) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape, dtype=FP8), g.new_empty(g.shape[0], dtype=torch.float32)


@operator(_empty_rows)
def gradient_rows(g: Tensor, w1: Tensor, tables: list[Tensor], numerics: str) -> tuple[Tensor, Tensor]:
    """g [M, D] -> g8 [M, D], sg [M]. w1, here and below: by it telemetry knows the MLP."""
    n = Numerics.parse(numerics)
    rows = get_backend(n.backend).quantize_rows(g)
    see_gradient(w1, PlainRows(g), rows, groups_of(tables, n, g.shape[0], g.device).offs)
    return rows


def _empty_hidden(
    g8: Tensor, sg: Tensor, y13: Tensor, w1: Tensor, w2: Tensor, s2: Tensor | None, tables: list[Tensor], numerics: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, H2), hp = y13.shape, Numerics.parse(numerics).wgrad_from_hp
    rows = y13.new_empty((M, H2), dtype=FP8), y13.new_empty(M, dtype=torch.float32)
    return *rows, y13.new_empty((M, H2) if hp else 0), y13.new_empty((M, H2 // 2) if hp else 0)


@operator(_empty_hidden)
def hidden_gradient(
    g8: Tensor, sg: Tensor, y13: Tensor, w1: Tensor, w2: Tensor, s2: Tensor | None, tables: list[Tensor], numerics: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> dy8 [M, 2H], sdy [M], and where the weight gradients start from high precision dy [M, 2H] and h [M, H]."""
    n = Numerics.parse(numerics)
    backend, groups = get_backend(n.backend), groups_of(tables, n, y13.shape[0], y13.device)
    w = fp8_weight([w2], s2, n, backward=True)
    dh = backend.gemm_rows(g8, sg, w.q_t, w.scale_t, groups, y13.dtype, n.accumulate)
    del w
    watch = watch_hidden(w1, parts_of([w2], s2), groups.offs, sg, y13) if is_measured(w1) else None
    if watch is not None:
        watch.see_dh(dh)
    hp = [y13.new_empty(0) for _ in range(2)]
    if n.wgrad_from_hp:
        hp = [t.to(y13.dtype) for t in (dswiglu(dh, y13), swiglu(y13))]
    dy8, sdy = backend.dswiglu_rows(dh, y13)
    if watch is not None:
        watch.see_dy13((dy8, sdy))
    return dy8, sdy, *hp


def _empty_input(
    dy8: Tensor,
    sdy: Tensor,
    sx: Tensor,
    w1: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    tables: list[Tensor],
    numerics: str,
    dtype: torch.dtype,
) -> Tensor:
    return dy8.new_empty((dy8.shape[0], w1.shape[-1]), dtype=dtype)


@operator(_empty_input)
def input_gradient(
    dy8: Tensor,
    sdy: Tensor,
    sx: Tensor,
    w1: Tensor,
    w3: Tensor,
    s13: Tensor | None,
    tables: list[Tensor],
    numerics: str,
    dtype: torch.dtype,
) -> Tensor:
    """-> dx [M, D]. sx tells telemetry which forward this is of."""
    n = Numerics.parse(numerics)
    groups = groups_of(tables, n, dy8.shape[0], dy8.device)
    w = fp8_weight([w1, w3], s13, n, backward=True)
    dx = get_backend(n.backend).gemm_rows(dy8, sdy, w.q_t, w.scale_t, groups, dtype, n.accumulate)
    if is_measured(w1):
        see_input_gradient(parts_of([w1, w3], s13), groups.offs, sdy, sx, dx)
    return dx


def _empty_operand(q: Tensor, scale: Tensor | None, tables: list[Tensor], numerics: str) -> tuple[Tensor, Tensor]:
    n, E = Numerics.parse(numerics), tables[0].shape[0] if tables else 1
    groups = get_backend(n.backend).groups(q.new_empty(E, dtype=torch.int32), q.shape[0])
    made = operand_of((q, scale, q), groups, n)
    return made.q, made.scale


@operator(_empty_operand)
def wgrad_operand(q: Tensor, scale: Tensor | None, tables: list[Tensor], numerics: str) -> tuple[Tensor, Tensor]:
    """q [M, D] with scale [M], or in high precision without -> a WgradOperand's q and scale."""
    n = Numerics.parse(numerics)
    made = operand_of((q, scale, q), groups_of(tables, n, q.shape[0], q.device), n)
    return made.q, made.scale


def _empty_weight(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    w: Tensor,
    w1: Tensor,
    key: str,
    tables: list[Tensor],
    M: int,
    numerics: str,
    dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(w.shape, dtype=dtype)


@operator(_empty_weight)
def weight_gradient(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor | None,
    w: Tensor,
    w1: Tensor,
    key: str,
    tables: list[Tensor],
    M: int,
    numerics: str,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of w from its operands, or from M rows in high precision. key: "dw1", "dw2", "dw3"."""
    n = Numerics.parse(numerics)
    groups, make = groups_of(tables, n, M, a.device), get_backend(n.backend).WgradOperand
    sides = [q if scale is None else make(q=q, scale=scale) for q, scale in ((a, a_scale), (b, b_scale))]
    dw = wgrad_gemm(*sides, groups, dtype, n)
    see_weight_gradient(w1, key, dw, groups.offs)
    return dw.view(w.shape)


def taken(ctx: Any, names: tuple[str, ...]) -> Saved:
    """The saved tensors of an autograd node by their names; the node has them no more, unless its graph is kept."""
    saved = dict(zip(names, ctx.saved_tensors, strict=True))
    ctx.maybe_clear_saved_tensors()
    return saved


def mlp_gradients(
    saved: Saved,
    tables: list[Tensor],
    numerics: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    send: Callable[[Tensor], Any] = lambda dx: dx,
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """-> what `send` makes of dx [M, D], and dw1, dw2, dw3.

    saved: g8 [M, D], sg [M]; x8, sx, h8 [M, H], sh; y13 [M, 2H]; g and x in high precision where the weight gradients
    start from it; w1, w2, w3, s13, s2. It is emptied. tables: see `groups_of`. dtypes: of dx and of the weight
    gradients. send: called before dw1 and dw3 are computed, with the only reference to dx.
    """
    n, sg, sx, M = Numerics.parse(numerics), saved.pop("sg"), saved.pop("sx"), saved["y13"].shape[0]
    w1, w2, w3, s13, s2 = (unwrapped(saved.pop(name)) for name in ("w1", "w2", "w3", "s13", "s2"))

    def side(q: Tensor, scale: Tensor, hp: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if n.wgrad == "bf16":
            return hp, None
        return wgrad_operand(*((hp, None) if n.wgrad_from_hp else (q, scale)), tables, numerics)

    def gradient(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None], w: Tensor, key: str) -> Tensor:
        return weight_gradient(*a, *b, w, w1, key, tables, M, numerics, dtypes[1])

    dy8, sdy, dy, h = hidden_gradient(saved["g8"], sg, saved.pop("y13"), w1, w2, s2, tables, numerics)
    sides = [side(saved.pop("g8"), sg, saved.pop("g")), side(saved.pop("h8"), saved.pop("sh"), h)]
    del h
    dw2 = gradient(*sides, w2, "dw2")
    del sides
    sent = send(input_gradient(dy8, sdy, sx, w1, w3, s13, tables, numerics, dtypes[0]))
    x = side(saved.pop("x8"), sx, saved.pop("x"))
    halves = zip(dy8.chunk(2, 1), dy.chunk(2, 1) if n.wgrad_from_hp else (None, None), strict=True)
    dys = [side(q, sdy, hp) for q, hp in halves]
    del halves, dy8, dy
    dw1 = gradient(dys.pop(0), x, w1, "dw1")
    return sent, dw1, dw2, gradient(dys.pop(), x, w3, "dw3")
