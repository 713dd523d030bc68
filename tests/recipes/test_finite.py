"""A nan or inf stops a run at the right step, before a checkpoint, and names the parameter it came from."""

import pytest
import torch
from torch import nn
from torchtitan.distributed import utils as dist_utils

from converters.selection import clean_fqn
from recipes.finite import GradientWatch, NonFiniteError

ORIGINAL = dist_utils.clip_grad_norm_


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture
def watch(model):
    watch = GradientWatch([model])
    watch.install()
    yield watch
    watch.remove()
    assert dist_utils.clip_grad_norm_ is ORIGINAL


def step(model: nn.Module, bad: dict[str, float] | None = None, max_norm: float = 1.0) -> torch.Tensor:
    """What the trainer does between zero_grad and the optimizer; `bad` puts one value into the named gradients."""
    model.zero_grad()
    y = model(torch.randn(3, 4))
    y.backward(torch.randn_like(y))
    for name, value in (bad or {}).items():
        model.get_parameter(name).grad.view(-1)[0] = value
    return dist_utils.clip_grad_norm_(list(model.parameters()), max_norm, foreach=True)


def test_clipping_is_torchtitans_own(model, watch):
    grads = []
    for clip in (dist_utils.clip_grad_norm_, ORIGINAL):
        torch.manual_seed(0)
        model.zero_grad()
        y = model(torch.randn(3, 4))
        y.backward(torch.randn_like(y))
        norm = clip(iter(list(model.parameters())), 0.1, foreach=True)  # a generator is used up once
        grads.append([norm, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_finite_steps_pass(model, watch):
    for n in range(1, 5):
        norm = step(model)
        watch.end_step(n, look_now=n % 2 == 0)
        watch.check(n, 1.0, norm.item())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_saves_is_stopped_at_once(model, watch, value):
    step(model, {"1.weight": value})
    message = (
        r"Step 7: gradient norm is (nan|inf)\. 1 of 6 gradients are non-finite; .* reached is 1\.weight\. No check"
    )
    with pytest.raises(NonFiniteError, match=message):
        watch.end_step(7, look_now=True)


def test_any_other_step_is_stopped_one_later_under_its_own_number(model, watch):
    step(model, {"1.weight": float("nan")})
    watch.end_step(7, look_now=False)
    step(model)
    with pytest.raises(NonFiniteError, match=r"Step 7: gradient norm is nan\. 1 of 6 .* 1\.weight"):
        watch.end_step(8, look_now=False)


def test_a_logged_step_tells_its_loss(model, watch):
    norm = step(model, {"0.bias": float("nan")})
    watch.end_step(7, look_now=False)
    with pytest.raises(NonFiniteError, match=r"Step 7: loss is 2\.5, gradient norm nan\. 1 of 6 .* 0\.bias"):
        watch.check(7, 2.5, norm.item())


def test_a_nan_loss_is_enough(model, watch):
    norm = step(model)
    watch.end_step(7, look_now=False)
    with pytest.raises(NonFiniteError, match="Step 7: loss is nan, gradient norm"):
        watch.check(7, float("nan"), norm.item())


def test_the_last_bad_parameter_in_order_is_the_first_of_backward(model, watch):
    step(model, {"0.weight": float("nan"), "0.bias": float("nan"), "1.weight": float("nan")})
    with pytest.raises(NonFiniteError, match=r"3 of 6 .* reached is 1\.weight\. No checkpoint"):
        watch.end_step(1, look_now=True)


def test_a_bad_last_layer_points_at_the_loss(model, watch):
    step(model, {name: float("nan") for name, _ in model.named_parameters()})
    with pytest.raises(NonFiniteError, match=r"6 of 6 .* 2\.bias\. It is the model's last: the loss or the forward"):
        watch.end_step(1, look_now=True)


def test_parameters_without_a_gradient_keep_the_names_right(model, watch):
    model[0].requires_grad_(False)
    step(model, {"2.weight": float("inf")})
    with pytest.raises(NonFiniteError, match=r"1 of 4 .* reached is 2\.weight\. No checkpoint"):
        watch.end_step(1, look_now=True)


def test_the_norm_of_another_rank_stops_this_one(model, watch, monkeypatch):
    def clip_with_a_bad_rank(parameters, *args, **kwargs):
        return ORIGINAL(parameters, *args, **kwargs) * float("nan")

    monkeypatch.setattr(watch, "_original", clip_with_a_bad_rank)
    step(model)
    with pytest.raises(NonFiniteError, match="This rank's own gradients are finite"):
        watch.end_step(1, look_now=True)
    monkeypatch.undo()


def test_somebody_elses_clip_survives_the_end(model, monkeypatch):
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", ORIGINAL)  # what monkeypatch gives back at the end
    watch = GradientWatch([model])
    watch.install()
    other = lambda parameters, *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(dist_utils, "clip_grad_norm_", other)
    watch.remove()
    assert dist_utils.clip_grad_norm_ is other


def test_names_are_the_models_own():
    assert clean_fqn("layers.0._checkpoint_wrapped_module._orig_mod.moe.w1") == "layers.0.moe.w1"


@pytest.mark.gpu
def test_on_a_gpu_a_good_step_does_not_wait(model):
    model = model.cuda()
    watch = GradientWatch([model])
    watch.install()
    try:
        y = model(torch.randn(3, 4, device="cuda"))
        y.backward(torch.randn_like(y))
        torch.cuda.set_sync_debug_mode("error")
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        watch.end_step(1, look_now=False)
        torch.cuda.set_sync_debug_mode("default")
        step_two = model(torch.randn(3, 4, device="cuda"))
        step_two.backward(torch.full_like(step_two, float("nan")))
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        with pytest.raises(NonFiniteError, match="Step 2: gradient norm is nan"):
            watch.end_step(2, look_now=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        watch.remove()
