"""Mixtral: sizes and FLOPs, the auxiliary loss against transformers, what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import tomli
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.config import JobConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from recipes.models.mixtral import FLAVORS, train_spec
from recipes.models.mixtral.args import MixtralModelArgs, mixtral_moe
from recipes.models.mixtral.balance import Balance, attach, balance_loss, balanced_moes
from recipes.models.mixtral.model import Mixtral, SlidingWindowAttention
from recipes.register import SPECS
from tests.helpers import DEVICE

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("mixtral*.toml"))

# Total and active parameters in billions and their digits (arXiv 2401.04088; mistral.ai/news/mixtral-8x22b).
PUBLISHED = {"8x7b": (46.7, 12.9, 1), "8x22b": (141, 39, 0)}


def tiny(**changes: object) -> MixtralModelArgs:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 48, "vocab_size": 64}
    return MixtralModelArgs(**sizes | {"max_seq_len": 64, "moe_args": mixtral_moe(4)} | changes)


def job(**parallelism: object) -> JobConfig:
    config = JobConfig()
    config.training.seq_len = 32
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def on_meta(args: MixtralModelArgs) -> Mixtral:
    with torch.device("meta"):
        return Mixtral(args)


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_parameters_are_those_published(flavor: str) -> None:
    args = FLAVORS[flavor]
    model = on_meta(args)
    total, _ = args.get_nparams_and_flops(model, 4096)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = total - experts + experts * args.moe_args.top_k // args.moe_args.num_experts
    digits = PUBLISHED[flavor][2]
    assert (round(total / 1e9, digits), round(active / 1e9, digits), digits) == PUBLISHED[flavor]


def test_flops_are_those_of_the_gemms() -> None:
    """Counted by torch over a forward and backward, without attention and without the bmm that sums top-k outputs."""
    args = tiny()
    args.moe_args.use_grouped_mm = False
    model, tokens = Mixtral(args).to(DEVICE), torch.randint(0, 64, (2, 32), device=DEVICE)
    with torch.no_grad():
        model.init_weights()
    with FlopCounterMode(display=False) as counter:
        out = model(tokens)
        out.backward(torch.randn_like(out))
    gemms = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    _, flops = args.get_nparams_and_flops(model, 32)
    attention = 6 * args.n_layers * args.n_heads * 2 * args.head_dim * 32
    # torch counts no elementwise work; the formula counts the norms' weights as if they were GEMMs.
    norms = 6 * sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert gemms / tokens.numel() == flops - attention - norms


def test_window_shortens_attention_flops() -> None:
    model = on_meta(tiny())
    with_window = [tiny(sliding_window=w).get_nparams_and_flops(model, 64)[1] for w in (16, 64, None)]
    assert with_window[0] < with_window[1] == with_window[2]


def test_auxiliary_loss_is_that_of_transformers_for_each_sequence_and_layer() -> None:
    logits = torch.randn(3, 20, 8)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scores = ours.softmax(-1)
    loss = balance_loss(scores, scores.topk(2, dim=-1).indices, Balance(coef=0.02, layers=5))
    expected = 0.02 / 5 * sum(load_balancing_loss_func((theirs[b],), 8, 2) for b in range(3)) / 3
    torch.testing.assert_close(loss, expected)
    upstream = torch.randn(())
    loss.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_attach_adds_the_loss_to_the_gradient_and_changes_no_value() -> None:
    x, w, upstream = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True), torch.randn(5)
    out = attach(x, 3 * (x * w).sum())
    assert torch.equal(out, x)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream + 3 * w.detach())
    torch.testing.assert_close(w.grad, 3 * x.detach())


@pytest.mark.parametrize("bias", [None, 1e-3], ids=["auxiliary", "with_bias"])
def test_auxiliary_loss_in_the_model(bias: float | None) -> None:
    """Against autograd through scores that hooks see; with a bias, the chosen experts are those of the bias."""
    args = tiny(router_aux_loss_coef=0.5, moe_args=mixtral_moe(4, load_balance_coeff=bias))
    args.moe_args.use_grouped_mm = False
    model, tokens = Mixtral(args), torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        model.init_weights()
        for layer in model.layers.values():
            layer.moe.router.gate.weight.normal_()
            if bias:
                layer.moe.expert_bias.copy_(torch.tensor([0.0, 0.9, 0.0, 0.1]))
    upstream = torch.randn(2, 16, 64)
    attached = gradients(model, tokens, upstream, coef=0.0)
    for moe in model.modules():
        if hasattr(moe, "balance"):
            moe.balance = None
    explicit = gradients(model, tokens, upstream, coef=0.5)
    without = gradients(model, tokens, upstream, coef=0.0)
    for name, grad in attached.items():
        torch.testing.assert_close(grad, explicit[name], msg=lambda m, n=name: f"{n}: {m}")
    gate = "layers.0.moe.router.gate.weight"
    assert not torch.allclose(attached[gate], without[gate], rtol=0.1)


def gradients(model: Mixtral, tokens: Tensor, upstream: Tensor, coef: float) -> dict[str, Tensor]:
    """Of <logits, upstream> and coef times the mean auxiliary loss, from scores seen by hooks."""
    losses: list[Tensor] = []

    def hook(gate: nn.Linear, inputs: tuple[Tensor], logits: Tensor) -> None:
        moe = next(m.moe for m in model.layers.values() if m.moe.router.gate is gate)
        scores = logits.view(*tokens.shape, -1).float().softmax(-1)
        chosen = (scores if moe.expert_bias is None else scores + moe.expert_bias).topk(2, dim=-1).indices
        share = nn.functional.one_hot(chosen, 4).sum(2).float().mean(1)
        losses.append(4 * (share * scores.mean(1)).sum(-1).mean())

    handles = [layer.moe.router.gate.register_forward_hook(hook) for layer in model.layers.values()] if coef else []
    model.zero_grad()
    total = (model(tokens) * upstream).sum() + coef * sum(losses) / len(model.layers)
    total.backward(torch.ones(()))
    for handle in handles:
        handle.remove()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_no_auxiliary_loss_in_evaluation() -> None:
    model = Mixtral(tiny(router_aux_loss_coef=0.5))
    assert len(balanced_moes(model)) == 2
    assert not balanced_moes(Mixtral(tiny()))
    x = torch.randn(1, 4, 32, requires_grad=True)
    nodes = [model.layers["0"].moe.train(on)(x).grad_fn for on in (True, False)]
    names = [str(sorted(_graph(node))) for node in nodes]
    assert "_AttachBackward" in names[0]
    assert "_AttachBackward" not in names[1]


def _graph(node: object) -> set[str]:
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return {type(n).__name__ for n in seen}


@pytest.mark.parametrize("window", [1, 3, 16, 17])
def test_sliding_window_sees_the_last_tokens(window: int) -> None:
    q, k, v = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    out = SlidingWindowAttention(window)(q, k, v, enable_gqa=True)
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    for row in range(16):
        seen = slice(max(0, row - window + 1), row + 1)
        weights = (q[:, :, row : row + 1] @ k[:, :, seen].mT * 8**-0.5).softmax(-1)
        torch.testing.assert_close(out[:, :, row : row + 1], weights @ v[:, :, seen])


@pytest.mark.parametrize(
    ("changes", "parallelism", "match"),
    [
        ({"attn_type": "varlen"}, {}, r"attn_type = 'varlen': Mixtral has"),
        ({"attn_mask_type": "block_causal"}, {}, "set attn_type = 'flex'"),
        ({}, {"expert_parallel_comm_backend": "deepep"}, "use 'standard'"),
        ({"sliding_window": 8}, {"context_parallel_degree": 2}, "sliding_window = 8"),
        ({"attn_type": "flex"}, {"context_parallel_degree": 2}, "attn_type = 'flex'"),
    ],
)
def test_refused(changes: dict, parallelism: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tiny(**changes).update_from_config(job(**parallelism))


def test_window_longer_than_the_sequence_is_no_window() -> None:
    tiny(sliding_window=32).update_from_config(job(context_parallel_degree=2))


def test_longest_sequence_of_a_run_fits_the_rotation() -> None:
    config, args = job(), tiny()
    config.validation.enable, config.validation.seq_len = True, 48
    args.update_from_config(config)
    assert Mixtral(args).freqs_cis.shape == (48, 2 * args.head_dim)


def test_spec_is_registered_and_a_run_leaves_the_flavors_alone() -> None:
    assert SPECS["mixtral"] is train_spec
    spec = train_spec()
    spec.model_args["debug"].update_from_config(job())
    assert (spec.model_args["debug"].max_seq_len, FLAVORS["debug"].max_seq_len) == (32, 2048)
    assert replace(FLAVORS["8x22b"], vocab_size=32768) == FLAVORS["8x22b_instruct"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_names_a_flavor(path: Path) -> None:
    model = tomli.loads(path.read_text())["model"]
    assert model["name"] == "mixtral"
    assert model["flavor"] in FLAVORS


def test_every_recipe_has_its_twin() -> None:
    names = {path.stem for path in RECIPES}
    assert len(names) == 8
    assert {name.replace("fp8", "bf16") for name in names} == {name for name in names if "bf16" in name}
