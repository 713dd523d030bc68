"""The forwards that converted modules run: a linear layer, a SwiGLU MLP, an attention with its projections.

A linear layer alone is one op. A SwiGLU MLP is one op for its three layers, and wq, wk, wv of an attention, called on
the same tensor, are one op for all. Where somebody else has to do with the layers, they run one by one with the
module's own forward: under tensor parallelism, whose plan hangs on each layer's inputs and outputs, and where one of
them has hooks.
"""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from converters.dense_linear import dense_linear, dense_linear_by_key
from converters.dense_mlp import dense_mlp
from converters.operands import check_operands

PROJECTIONS = ("wq", "wk", "wv")
SWIGLU = ("w1", "w2", "w3")


def linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    """Stands in for `nn.Linear.forward`: x [..., K] -> [..., N], DTensors under tensor parallelism."""
    w = self.weight
    y = _tensor_parallel(x, w) if isinstance(w, DTensor) else dense_linear(x, [w], w._context)[0]
    return y if self.bias is None else y + self.bias.to(y.dtype)


def _tensor_parallel(x: Tensor, w: DTensor) -> DTensor:
    """x as torch's ColwiseParallel, RowwiseParallel or a plan of replicas (torchtitan's NoParallel) hands it over.

    Raises:
        ValueError: another placement.
    """
    last = x.dim() - 1
    plans: dict[Placement, tuple[Placement, Placement, Placement]] = {  # of w -> of x, of x's gradient, of y
        Shard(0): (Replicate(), Partial(), Shard(last)),
        Shard(1): (Shard(last), Shard(last), Partial()),
        Replicate(): (Replicate(), Replicate(), Replicate()),
    }
    plan = plans.get(w.placements[0]) if len(w.placements) == 1 else None
    if plan is None or not isinstance(x, DTensor) or x.placements != (plan[0],):
        raise ValueError(
            f"a linear layer in FP8 whose weight is {w.placements} got {getattr(x, 'placements', type(x).__name__)}: "
            "use ColwiseParallel on replicated inputs or RowwiseParallel on inputs cut along their last dim, or leave "
            "the layer out with [fp8.dense] exclude."
        )
    # Not from to_local(): torch.compile knows no object that a tensor made inside the graph brings along.
    numerics, rows, weight = w._local_tensor._context, x.to_local(grad_placements=[plan[1]]), w.to_local()
    check_operands(rows, [weight], numerics)
    y = dense_linear_by_key(rows, [weight], numerics.key)[0]
    return DTensor.from_local(y, w.device_mesh, [plan[2]], run_check=False)


def _are_ours_alone(layers: list[nn.Linear]) -> bool:
    """Whether nobody else sees what goes in and comes out of each layer."""
    return not any(m._forward_pre_hooks or m._forward_hooks or isinstance(m.weight, DTensor) for m in layers)


def swiglu_forward(self: nn.Module, x: Tensor) -> Tensor:
    """Stands in for the forward of a module with `w2(silu(w1(x)) * w3(x))`: x [..., D] -> [..., D]."""
    if not _are_ours_alone([self.w1, self.w2, self.w3]):
        return type(self).forward(self, x)
    w1, w2, w3 = self.w1.weight, self.w2.weight, self.w3.weight
    return dense_mlp(x, w1, w2, w3, w1._context)


class _Joined:
    """An attention module during one forward: whatever it is and has, but wq, wk and wv are one op.

    The first of them computes all three; a call on another tensor than that (no self-attention) its own layer only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._x, self._out = module, None, []

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_module", "_x", "_out"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def wq(self, x: Tensor) -> Tensor:
        return self._project(x, 0)

    def wk(self, x: Tensor) -> Tensor:
        return self._project(x, 1)

    def wv(self, x: Tensor) -> Tensor:
        return self._project(x, 2)

    def _project(self, x: Tensor, which: int) -> Tensor:
        module = self._module
        layers = [module.wq, module.wk, module.wv]
        if self._x is None:
            weights = [m.weight for m in layers]
            self._x, self._out = x, dense_linear(x, weights, weights[0]._context)
        if x is not self._x:
            return layers[which](x)
        out, bias = self._out[which], layers[which].bias
        return out if bias is None else out + bias.to(out.dtype)


def attention_forward(self: nn.Module, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Stands in for the forward of an attention module, which runs as it is, with its projections joined."""
    alone = _are_ours_alone([self.wq, self.wk, self.wv])
    return type(self).forward(_Joined(self) if alone else self, x, *args, **kwargs)
