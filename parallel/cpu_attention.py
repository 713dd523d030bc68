"""How does context parallelism run on a CPU?

torch's ring attention replaces the attention kernels of CUDA, by a table from op to handler; the CPU's own flash
kernel is not in it, and a DTensor that reaches it fails for want of a sharding rule. Its forward returns a logsumexp
and its backward takes one, which is all that the ring asks of a kernel. So two more entries in that table suffice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten
SEQ_DIM = 2  # of q, k, v [B, heads, S, head_dim] and of the logsumexp [B, heads, S], as the ring has it


def _like(query: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """op(q, k, v, dropout_p = 0, is_causal = False, *, scale = None) -> out, logsumexp."""
    query, (q, k, v, *rest) = args[0], map(_local, args)
    is_causal = rest[1] if len(rest) > 1 else kwargs.get("is_causal", False)
    group = query.device_mesh.get_group()
    out = ring._templated_ring_attention(group, SEQ_DIM, op, q, k, v, is_causal=is_causal, scale=kwargs.get("scale"))
    return _like(query, out[0]), _like(query, out[1])


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """op(grad_out, q, k, v, out, logsumexp, dropout_p, is_causal, *, scale = None) -> gradients of q, k, v."""
    query, (grad_out, q, k, v, out, lse, dropout_p, is_causal) = args[1], map(_local, args)
    options = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": kwargs.get("scale")}
    group = query.device_mesh.get_group()
    grads = ring._templated_ring_attention_backward(
        group, SEQ_DIM, op, grad_out, "grad_out", q, k, v, out, lse, **options
    )
    return tuple(_like(query, g) for g in grads)


def let_rings_run_on_cpu() -> None:
    """Adds the CPU's flash attention to the ops that context parallelism replaces. Idempotent."""
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = _forward
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = _backward
