"""How much memory do the quantized copies of weights take on this rank?  By the rules of weight_cache.py and FSDP2.

a weight of this rank alone, used often    both layouts and the scales, from step to step
the same, used once a step                 one layout from forward to backward; between steps the scales
sharded by FSDP2, gathered in FP8          the shard and the scales of the whole weight, from one optimizer step to the
                                           next or, used once a step, to its gather in backward; what is gathered
                                           lives as long as FSDP2 keeps a gathered weight, at half of BF16's bytes
sharded by FSDP2, gathered in BF16         nothing: quantized at each use
emulated, without the cache, used by views nothing: quantized at each use

What lives during one use only is there once, however many layers there are: memory is the sum of what is held and the
largest of what passes (`most`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from converters.expert_weight import FP8ExpertWeight
from converters.experts_forward import is_one_op
from converters.gathered_weight import JOINED, SHARED_SCALES, shard_of
from converters.numerics import Numerics
from converters.selection import clean_fqn
from converters.sequential_experts import is_sequential
from parallel.fsdp import fsdp_mesh

SCALE = 4  # bytes, float32


@dataclass(frozen=True)
class Kept:
    """Bytes of one weight's quantized copies on this rank.

    between: held from one optimizer step to the next. held: together with other weights' at the end of a forward.
    passing: beside that, during one use, without scales. why: what decides that.
    """

    between: int
    held: int
    why: str
    passing: int = 0


def most(kept: Iterable[Kept]) -> int:
    """Bytes of these weights' quantized copies that are there at the same time, at most.

    Exact but where each is used once, and the largest is not the last one of the forward: what is held is not complete
    then (9 % too much with experts and dense layers in tests/converters/test_kept_memory.py).
    """
    kept = list(kept)
    return sum(k.held for k in kept) + max((k.passing for k in kept), default=0)


def kept_memory(parts: Iterable[nn.Module]) -> dict[str, Kept]:
    """What this rank will keep of each FP8 weight of the model's `parts`, by its name, once it has trained a step.

    parts: parallelized. A scale that weights of one GEMM share counts to the first of them.
    """
    found = {}
    for part in parts:
        for fqn, module in part.named_modules():
            for name, w in module.named_parameters(recurse=False):
                local = w._local_tensor if isinstance(w, DTensor) else w
                if isinstance(local, FP8ExpertWeight):
                    found[clean_fqn(f"{fqn}.{name}".removeprefix("."))] = _kept(module, name, w, local)
    return found


def _kept(module: nn.Module, name: str, w: Tensor, local: FP8ExpertWeight) -> Kept:
    n, size = local._context, local.numel()
    if n.backend == "emulated":
        return Kept(0, 0, "emulated, quantized at each use")
    if isinstance(w, DTensor) and (mesh := fsdp_mesh(w)) is not None:
        shard = shard_of(module, name) if n.fp8_all_gather else None
        if shard is None:
            whole = mesh.size() * _at_once(module, name, w)
            return Kept(0, 0, "gathered in high precision, quantized at each use", whole)
        both = size + (SCALE * shard.slices if _has_scale(module, name) else 0)
        return Kept(both, both, "the shard that FSDP2 gathers in FP8" + ", up to backward" * n.used_once)
    if not n.cache:
        slices = local.shape[0] if is_sequential(module) else 1
        return Kept(0, 0, "cache = false, quantized at each use", _at_once(module, name, w) // slices)
    if is_sequential(module):
        one = _at_once(module, name, w) // local.shape[0]
        return Kept(0, 0, "one expert at a time, by views, which are quantized at each use", one)
    scales = _scales(module, name, w, n)
    if local.dim() == 3 and not is_one_op(module):  # it may use the weight as a whole, too, which is kept
        return Kept(0, 2 * size + scales, "a weight whose module takes views of it is quantized at each use, not kept")
    if n.used_once:
        # q, while it is used. The largest weights of a layer are an MLP's: W13, with q of 2 S, comes when W2's q_t, S,
        # is not there yet, then W2 with q of S. wq, wk and wv may be followed by nothing.
        joined = getattr(module, JOINED, ())
        q = _at_once(module, name, w) if len(joined) > 2 else size
        return Kept(scales, size + scales, "used once a step, then given up", q)
    return Kept(2 * size + scales, 2 * size + scales, "both layouts, for all uses in a step")


def _at_once(module: nn.Module, name: str, w: Tensor) -> int:
    """Elements that this rank has of the weights which are one GEMM with it."""
    if isinstance(w, DTensor) and w.dim() == 2 and fsdp_mesh(w) is None:  # tensor parallelism: linear layers run alone
        return w._local_tensor.numel()
    weights = [layer.weight for layer in getattr(module, JOINED, ())]
    if not weights:
        names = next((names for names in SHARED_SCALES if name in names), (name,))
        weights = [p for n in names if (p := module._parameters.get(n)) is not None]
    return sum((p._local_tensor if isinstance(p, DTensor) else p).numel() for p in weights)


def _scales(module: nn.Module, name: str, w: Tensor, n: Numerics) -> int:
    """Bytes of the scales: one a slice; by the rule "rowwise" one a row of q and of the joined q_t. Linear layers under
    tensor parallelism run one by one, each with its own.
    """
    local = w._local_tensor if isinstance(w, DTensor) else w
    N, K = local.shape[-2:]
    alone = local.dim() == 2 and isinstance(w, DTensor)
    slices, first = local.shape[0] if local.dim() == 3 else 1, alone or _has_scale(module, name)
    return SCALE * slices * (N + K * first if n.recipe == "rowwise" else first)


def _has_scale(module: nn.Module, name: str) -> bool:
    """Whether it is the first of the weights that are one GEMM."""
    if layers := getattr(module, JOINED, None):
        return module is layers[0]
    return all(name not in names[1:] for names in SHARED_SCALES)
