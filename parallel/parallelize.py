"""In which order is a model made parallel, and what does torchtitan 0.2.2 leave to put right around its own plan?

    converters   on the meta device (the trainer)
    this file    refuses expert parallelism that does not divide the experts
    torchtitan   TP -> EP -> context parallelism -> recomputation -> compile -> FSDP2, HSDP or DDP  (parallelize_llama)
    this file    gradients of an MoE whose expert parallelism borrows the ranks of tensor parallelism, and of embeddings
    to_empty, init_weights, optimizer, checkpoint (the trainer)

With TP and `expert_tensor_parallel_degree` 1 each TP rank routes its share of the tokens to the experts. So what comes
back through the routed path, to the input and to the router's scores, is the gradient of that share; torchtitan takes
it for the gradient of all tokens, and every rank drops the others'. In a small model the grad norm reads 1.755 where
it is 1.830. Later releases mark both as partial sums (NoParallel's `local_output_grad_placements`); here hooks do.

With TP the embeddings come as a tensor that is still on its way. torch 2.13 waits for such an input of a compiled
module (pytorch#179849), and the gradient that the module gives it is lost: with `compile.enable` the embeddings miss
what comes through the first layer's attention, or through the whole layer if it is dense. Here it is waited for
before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import parallelize_llama
from torchtitan.models.moe import MoE
from torchtitan.models.moe.moe import GroupedExperts

from parallel.loss import scaled_gradient


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        out = torch.ops._c10d_functional.all_reduce(g.contiguous(), "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(out), None


def partial_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, the same on all ranks of `mesh`; its gradient is the sum of the ranks' gradients."""
    return _SummedGradient.apply(x, mesh.get_group().group_name)


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _wait(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return _Waited.apply(out) if isinstance(out, AsyncCollectiveTensor) else out


def _mark_inside(moe: MoE, tp_mesh: DeviceMesh) -> None:
    """The router's scores get the sum of the ranks' gradients; what all ranks compute alike gives its average to x."""
    share = 1 / tp_mesh.size()
    average = lambda module, args: (scaled_gradient(args[0], share), *args[1:])  # noqa: E731
    moe.router.register_forward_hook(lambda module, args, out: (partial_gradient(out[0], tp_mesh), *out[1:]))
    moe.router.gate.register_forward_pre_hook(
        average
    )  # not the router's input: an auxiliary loss may call the gate too
    if moe.shared_experts is not None:
        moe.shared_experts.register_forward_pre_hook(average)


def _mark_input(moe: MoE, tp_mesh: DeviceMesh) -> None:
    moe.register_forward_pre_hook(lambda module, args: (partial_gradient(args[0], tp_mesh), *args[1:]))


def check_expert_parallel(model: nn.Module, degree: int) -> None:
    """Raises ValueError where expert parallelism would divide the experts of a layer unevenly."""
    for fqn, module in model.named_modules():
        if isinstance(module, GroupedExperts) and module.num_experts % degree:
            raise ValueError(
                f"{fqn} has {module.num_experts} experts, and parallelism.expert_parallel_degree = {degree} does not "
                "divide them: each rank holds as many as the others. Choose a degree that does."
            )


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """`parallelize_fn` of a train spec: torchtitan's plan for Llama4 and models with its module names, put right.

    Raises:
        ValueError: the degree of expert parallelism does not divide the experts.
    """
    check_expert_parallel(model, parallel_dims.ep)
    borrows = parallel_dims.tp_enabled and parallel_dims.ep_enabled and not parallel_dims.etp_enabled
    moes = [m for m in model.modules() if isinstance(m, MoE)] if borrows else []
    for moe in moes:  # before torchtitan makes DTensors of these inputs, and compiles the modules
        _mark_inside(moe, parallel_dims.get_mesh("tp"))
    model = parallelize_llama(model, parallel_dims, job_config)
    if parallel_dims.tp_enabled and model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(_wait)
    for moe in moes:  # after torchtitan has gathered this one
        _mark_input(moe, parallel_dims.get_mesh("tp"))
    return model


def let_expert_parallelism_stand_alone() -> None:
    """Teaches torchtitan's meshes that expert parallelism needs an FSDP axis even if it has one rank. Idempotent.

    `parallelize_llama` wraps a model with EP in FSDP2 whatever the data-parallel degree, and asks for the mesh axis
    "fsdp", which torchtitan makes from two ranks on (as it does not for "efsdp"): TP 8 with EP 8 on one host fails for
    want of it.
    """
    exists = ParallelDims._mesh_exist
    if getattr(exists, "with_fsdp", False):
        return

    def mesh_exist(self: ParallelDims, name: str, degree: int) -> bool:
        return exists(self, name, degree) or (name == "fsdp" and self.ep > 1)

    mesh_exist.with_fsdp = True
    ParallelDims._mesh_exist = mesh_exist
