"""Which MoE layers run their token path in our kernels, and how does torchtitan's layer come to it?

torchtitan's MoE gathers each token's rows, weights them, has the experts compute, un-permutes and sums up: a dozen
passes over [tokens * top_k, dim], some of them in float32. Here the layer hands tokens and `Routes` to its experts, and
routed_mlp.py does the rest around the FP8 GEMMs. Router, reorderer, shared expert, expert bias and the counts of tokens
are torchtitan's own modules and lines, called as they are, hooks and compiled forms included.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import MoE

from converters.backends.reference_tokens import slots_of
from converters.config import Numerics
from converters.dispatched_tokens import dispatched_tokens
from converters.routed_mlp import routed_mlp
from converters.token_config import Fused
from parallel.expert_parallel import plan

FuseTokenPath = Callable[[nn.Module, list[nn.Module], Numerics, Mapping[str, str]], str]


@dataclass(frozen=True)
class Routes:
    """What a layer's experts get to know beyond tokens and counts.

    A plain class to pytree: FSDP2 would cast the scores to BF16 on their way into the experts.

    Attributes:
        scores: float32 [M], of the rows in the order of the experts.
        order: int64 [M], the place t * top_k + j of each row among all choices of the T tokens. M may be less than
            T * top_k: tensor parallelism with `expert_tensor_parallel_degree` 1 leaves a rank its share of the tokens.
        base: computes what the result is added to, [T, D] (the shared expert); None: nothing.
        before: the scores multiply what goes into the experts.
    """

    scores: Tensor
    order: Tensor
    top_k: int
    before: bool
    base: Callable[[], Tensor] | None


def experts_forward(
    x: Tensor,
    counts: Tensor,
    routes: Routes,
    weights: tuple[Tensor, Tensor, Tensor],
    group: dist.ProcessGroup | None,
    numerics: Numerics,
) -> Tensor:
    """x [T, D], counts [E] of rows -> [T, D]. weights: local w1, w2, w3; group: of FP8 expert parallelism."""
    slots = slots_of(routes.order, x.shape[0], routes.top_k)
    scores = routes.scores.float()
    if group is not None:
        dispatch = plan(counts, group)
        return dispatched_tokens(x, scores, slots, routes.base, *weights, dispatch, routes.before, numerics)
    base = None if routes.base is None else routes.base()
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    return routed_mlp(x, scores, slots, base, *weights, offs, routes.before, numerics)


def fused_moe_forward(self: MoE, x: Tensor) -> Tensor:
    """`MoE.forward` around experts that take `Routes`: x [B, S, D] -> [B, S, D]."""
    tokens = x.view(-1, x.shape[-1])
    top_scores, chosen, counts = self.router(tokens, self.expert_bias)
    with torch.no_grad():
        self.tokens_per_expert.add_(counts)
    scores, order, counts = self.reorderer(top_scores, chosen)
    shared = self.shared_experts
    base = None if shared is None else functools.partial(shared, tokens)
    routes = Routes(scores, order, self.router.top_k, self.score_before_experts, base)
    return self.experts(tokens, counts, routes).reshape(x.shape)


def let_moe_fuse() -> None:
    """Teaches torchtitan's MoE to run `fused_moe_forward` where a layer has `fused_tokens`. Idempotent.

    Not a forward on the instance: a subclass may do something before it calls MoE's, as Mixtral's auxiliary loss does.
    """
    forward = MoE.forward
    if hasattr(forward, "__wrapped__"):
        return

    @functools.wraps(forward)
    def moe_forward(self: MoE, x: Tensor) -> Tensor:
        return fused_moe_forward(self, x) if getattr(self, "fused_tokens", False) else forward(self, x)

    MoE.forward = moe_forward


def _reaches_moe_forward(module: MoE) -> bool:
    """Whether calling the module ends in `MoE.forward`: it is its own, or its class calls super()."""
    if "forward" in module.__dict__:
        return False
    forward = type(module).forward
    return forward is MoE.forward or "__class__" in forward.__code__.co_freevars


def layout_problem(job_config: JobConfig, dims: ParallelDims, dispatches: bool) -> str | None:
    """Why no layer of this job can have the fused path, or None. dispatches: experts send their rows in FP8."""
    if (dims.etp if dims.ep > 1 else dims.tp) > 1:
        return "tensor parallelism cuts the experts' hidden dim, so what comes out of them is a part of a sum"
    comm = job_config.parallelism.expert_parallel_comm_backend
    if dims.ep > 1 and comm != "standard":
        return f"expert_parallel_comm_backend = {comm!r} has a token path of its own"
    if dims.ep > 1 and not dispatches:
        return "rows travel to their experts in BF16 (with ep_fp8_dispatch = 'on' they travel in FP8)"
    return None


def _numerics_problem(n: Numerics) -> str | None:
    if n.recipe != "tokenwise" or n.wgrad != "fp8":
        return f"its rows exist in FP8 only, one scale each: recipe = {n.recipe!r}, wgrad = {n.wgrad!r} need others"
    if n.backend == "emulated":
        return f"the emulated backend has no kernels for it (grad_dtype = {n.grad_dtype!r})"
    return None


def fuse_token_path(model: nn.Module, experts: Iterable[nn.Module]) -> tuple[list[str], list[str]]:
    """Switches the layers of `model` whose experts are among `experts`; they must run fp8_experts_forward.

    Returns:
        Names of the layers switched, and of MoE layers that stay as they are.
    """
    let_moe_fuse()
    wanted, fused, others = set(map(id, experts)), [], []
    for fqn, module in model.named_modules():
        if isinstance(module, MoE):
            module.fused_tokens = id(module.experts) in wanted and _reaches_moe_forward(module)
            (fused if module.fused_tokens else others).append(fqn)
    return fused, others


def _layer_problem(fqn: str, left: Mapping[str, str]) -> str:
    """Why a layer is not fused, though layout and numerics allow it."""
    if why := left.get(f"{fqn}.experts".replace("_checkpoint_wrapped_module.", "")):
        return f"the experts of {fqn} stay in BF16 ({why})"
    return (
        f"{fqn} and its experts do not both run the forward that it needs (torchtitan's own, with experts = 'grouped')"
    )


def switch_token_path(
    model: nn.Module,
    experts: list[nn.Module],
    numerics: Numerics,
    left: Mapping[str, str],
    fused: Fused,
    problem: str | None = None,
) -> str:
    """Fuses what `[fp8.token_path] fused` asks for and can be fused. -> What was done, for the start table.

    left: modules that were not converted, by name, and why.
    problem: why the layout forbids it (`layout_problem`).

    Raises:
        ValueError: fused = "on", and a layer cannot have it.
    """
    if fused == "off" or (fused == "auto" and numerics.backend != "hopper"):
        return f"token path: torchtitan's (fused = {fused!r}, {numerics.backend} backend)"
    # What no layout helps comes first: without experts that run our forward, or with such numerics, no row is sent
    # in FP8 either.
    problem = _numerics_problem(numerics) or (problem if experts else None)
    names, others = ([], []) if problem else fuse_token_path(model, experts)
    if fused == "on" and others:
        problem = _layer_problem(others[0], left)
    elif not names:
        problem = problem or "no MoE layer runs torchtitan's forward around experts that run ours"
    if fused == "on" and problem:
        raise ValueError(
            f"[fp8.token_path] fused = 'on' is not possible here: {problem}. Change that, or set fused = 'auto'."
        )
    if problem:
        return f"token path: torchtitan's, since {problem}"
    return f"token path: fused in {len(names)} MoE layers" + (f", torchtitan's in {len(others)}" if others else "")


def token_path_of(job_config: JobConfig, dims: ParallelDims, dispatches: bool) -> FuseTokenPath:
    """`switch_token_path` as a job sets it. dispatches: its experts send their rows in FP8."""
    fused, problem = job_config.fp8.token_path.fused, layout_problem(job_config, dims, dispatches)
    return functools.partial(switch_token_path, fused=fused, problem=problem)
