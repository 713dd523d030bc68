"""How does a wrapped weight live and travel?  A tensor around `_data`; this file knows nothing of FP8.

`WrappedWeight` is the storage half: flatten and unflatten, the ops that keep the wrapper, FSDP2's all-gather. What a
GEMM with such a weight computes is its subclass's business (converters/expert_weight.py).

How the type of one expert weight changes, outermost first:

    convert        Parameter(Wrapped(meta))
    EP or TP       DTensor(Wrapped)                       distribute_tensor: the wrapper stays innermost
    fully_shard    DTensor(Wrapped(shard))                sharded; with EP or TP a mesh axis more
    forward        Wrapped(gathered), DTensor(Wrapped)    post_all_gather; the module calls to_local()
    optimizer      runs on `_data`; its states are plain tensors
    state_dict     DTensor(plain) or plain: checkpoint.py
"""

import hashlib
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# Ops whose result is the same weight, or a part or view of it: they keep the wrapper. zeros_like is not one of them,
# so that optimizer states are plain tensors.
KEEPS_WRAPPER = {
    aten.alias.default,
    aten.as_strided.default,
    aten.cat.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.expand.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.stack.default,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._pin_memory.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.c10d.scatter_.default,
}

# Products. Reaching one of them below autograd means that nobody chose a precision: refused, never computed silently.
PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addbmm.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.dot.default,
    aten.mv.default,
    aten._grouped_mm.default,
    aten.linear.default,
    aten.matmul.default,
}


class WrappedWeight(Tensor):
    """A weight that is a plain tensor `_data` with a hashable `_context`, and looks like `_data` to everybody else."""

    _data: Tensor
    _context: Any
    _base: Tensor | None = None  # the `_data` that this one is a view of

    @staticmethod
    def __new__(cls: type[Self], data: Tensor, context: Any = None) -> Self:
        return Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            pin_memory=data.is_pinned() if data.device.type == "cpu" else False,
            requires_grad=data.requires_grad,
        )

    def __init__(self, data: Tensor, context: Any = None) -> None:
        self._data = data.detach() if data.requires_grad else data
        self._context = context

    def rewrap(self, data: Tensor) -> Self:
        """The same kind of weight around data of its own."""
        return type(self)(data, self._context)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data"], {"context": self._context}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: dict[str, Any], size: Any, stride: Any) -> Self:
        return cls(inner["_data"], meta["context"])

    def _stable_hash_for_caching(self) -> str:
        """What torch.compile's cache on disk knows this weight by, the same in every process: all that a graph can
        depend on (a product with it is one node until it is compiled), no values. Without this torch warns, and pickles
        the context.
        """
        inner, _ = self.__tensor_flatten__()
        tensors = [(name, getattr(self, name)) for name in inner]
        laid_out = [(n, *map(str, (t.dtype, t.device, t.shape, t.stride(), t.storage_offset()))) for n, t in tensors]
        known = (type(self).__qualname__, repr(self._context), str(self.dtype), self.requires_grad, laid_out)
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self._context}, {self._data!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.data.__set__ and isinstance(args[0], WrappedWeight):  # else only the outside would change
                weight, value = args
                data = value._data if isinstance(value, WrappedWeight) else value
                weight._data, weight._base = data.detach(), None
                return func(weight, weight.rewrap(weight._data))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in PRODUCTS:
            raise NotImplementedError(
                f"{func} with a {cls.__name__}: spell the product as torch.matmul, mm, bmm, @, nn.functional.linear, "
                "torch._grouped_mm or nn.functional.grouped_mm, outside of no-dispatch code, so that it runs in FP8."
            )
        first = next((a for a in _leaves(args) if isinstance(a, WrappedWeight)), None)
        unwrap = lambda tree: tree_map_only(WrappedWeight, lambda w: w._data, tree)  # noqa: E731
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        if written := _written(func, args, kwargs or {}):
            # Below __torch_dispatch__ nothing counts versions, and fused optimizers count none on the wrapper either.
            torch.autograd.graph.increment_version([t for w in written for t in (w._data, w._base) if t is not None])
            return args[0] if args and isinstance(args[0], WrappedWeight) and isinstance(out, Tensor) else out
        if func not in KEEPS_WRAPPER or first is None:
            return out
        if func is torch.ops.c10d.scatter_.default:  # writes in place; returns ([tensors], work)
            return args[0], out[1]
        return tree_map_only(Tensor, first._view if func.is_view else first.rewrap, out)

    def _view(self, data: Tensor) -> Self:
        """A wrapper around a view of `_data`.

        Views made below __torch_dispatch__ do not share the version counter of what they view. So a view of all of it
        (detach, view_as, which nn.Parameter and DTensor.to_local call) keeps the same `_data`, and any other one knows
        its base, for writes through it to count there. What is read through it has no version to trust: `partial`.
        """
        same = data.stride() == self._data.stride() and data.storage_offset() == self._data.storage_offset()
        if same and data.shape == self._data.shape:
            view = type(self)(self._data, self._context)
            view._base = self._base
        else:
            view = self.partial(data)
            view._base = self._data if self._base is None else self._base
        return view

    def partial(self, data: Tensor) -> Self:
        """A part or other view of this weight, whose `data` lives no longer than an expression."""
        return type(self)(data, self._context)

    def gathered(self, data: Tensor) -> Self:
        """What FSDP2 unshards to: `data` lives only until it is resharded."""
        return self.partial(data)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What FSDP2 gathers: the shard in the policy's dtype. Casting is the hook's task (pytorch#157395)."""
        return (padded_shard(self._data.to(mp_policy.param_dtype or self._data.dtype), mesh, outer_size),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered weight, first time; later FSDP2 has re-filled the same storage and `out` still wraps it."""
        (data,) = outputs
        if out is None:
            return self.gathered(data), (data,)
        local = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(local, WrappedWeight), type(local)
        assert local._data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        return None


def padded_shard(shard: Tensor, mesh: Any, outer_size: torch.Size) -> Tensor:
    """`shard` filled up with zeros along dim 0 to the size that every rank gathers.

    With 3 experts on 2 ranks the second holds one. FSDP2 pads plain tensors itself; from a hook it expects the padded
    size, and says so on the short rank only, while the others wait in the collective.
    """
    missing = -(-outer_size[0] // mesh.size()) - shard.shape[0]
    if shard.shape[1:] != outer_size[1:] or missing <= 0:
        return shard
    return torch.cat([shard, shard.new_zeros((missing, *shard.shape[1:]))])


def _leaves(args: Any) -> list[Any]:
    """The tensors of an op's arguments: some are lists of tensors (foreach, cat), a few lists of lists (c10d)."""
    if isinstance(args, (tuple, list)):
        return [leaf for a in args for leaf in _leaves(a)]
    return [args]


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[WrappedWeight]:
    """The wrapped weights that `func` writes into, by its schema."""
    if not func._schema.is_mutable:
        return []
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return [w for name in names for w in _leaves(given.get(name)) if isinstance(w, WrappedWeight)]


def map_local(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(tensor), or a DTensor around function(its local tensor)."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    return DTensor.from_local(
        function(tensor._local_tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def plain(tensor: Tensor) -> Tensor:
    """`tensor` without the wrapper, through a DTensor; shares storage."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return map_local(tensor, lambda w: w._data) if isinstance(local, WrappedWeight) else tensor
