"""What no FP8 product can take is refused in every way in, before anything is computed or a GPU is asked for."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from converters import capability
from converters.backends import get_backend
from converters.config import Numerics
from converters.dense_linear import dense_linear
from converters.dense_mlp import dense_mlp
from converters.dispatched_mlp import dispatched_mlp
from converters.dispatched_tokens import dispatched_tokens
from converters.expert_mlp import expert_mlp
from converters.expert_weight import FP8ExpertWeight
from converters.grouped_mm import grouped_mm
from converters.linear_weight import FP8LinearWeight
from converters.routed_mlp import routed_mlp
from converters.sequential_experts import sequential_mlp

E, M, D, H = 2, 8, 32, 48
OFFS = torch.tensor([3, 8], dtype=torch.int32)
Call = Callable[[Tensor, Callable[..., Tensor], Numerics], object]


def mlp_weights(make: Callable[..., Tensor], *lead: int, dims: tuple[int, int] = (D, H)) -> list[Tensor]:
    d, h = dims
    return [make(*lead, h, d), make(*lead, d, h), make(*lead, h, d)]


def routed(x: Tensor, make: Callable[..., Tensor], n: Numerics) -> Tensor:
    slots = torch.arange(M, dtype=torch.int32).view(M, 1)
    return routed_mlp(x, torch.rand(M), slots, None, *mlp_weights(make, E), OFFS, False, n)


def wrapped(x: Tensor, make: Callable[..., Tensor], n: Numerics) -> Tensor:
    return torch._grouped_mm(x, nn.Parameter(FP8ExpertWeight(make(E, H, D), n), requires_grad=False).mT, offs=OFFS)


def wrapped_linear(x: Tensor, make: Callable[..., Tensor], n: Numerics) -> Tensor:
    return nn.functional.linear(x, nn.Parameter(FP8LinearWeight(make(H, D), n), requires_grad=False))


CALLS: dict[str, Call] = {
    "expert_mlp": lambda x, make, n: expert_mlp(x, *mlp_weights(make, E), OFFS, n),
    "sequential_mlp": lambda x, make, n: sequential_mlp(x, *mlp_weights(make, E), OFFS, n),
    "grouped_mm": lambda x, make, n: grouped_mm(x, make(E, H, D).mT, OFFS, n),
    "dense_linear": lambda x, make, n: dense_linear(x, [make(H, D), make(D, D)], n)[0],
    "dense_mlp": lambda x, make, n: dense_mlp(x, *mlp_weights(make), n),
    "routed_mlp": routed,
    "dispatched_mlp": lambda x, make, n: dispatched_mlp(x, *mlp_weights(make, E), None, n),
    "dispatched_tokens": lambda x, make, n: dispatched_tokens(
        x, torch.rand(M), OFFS, None, *mlp_weights(make, E), None, False, n
    ),
    "wrapped": wrapped,
    "wrapped_linear": wrapped_linear,
    "compiled": lambda x, make, n: torch.compile(expert_mlp, backend="aot_eager")(x, *mlp_weights(make, E), OFFS, n),
}
LOCAL = {name: call for name, call in CALLS.items() if not name.startswith("dispatched")}
by_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@by_call
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_rows_of_no_float_dtype(call: Call, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"take rows of bfloat16, float32.*; got {str(dtype)[6:]}\."):
        call(torch.ones(M, D).to(dtype), torch.randn, Numerics())


@by_call
@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_weights_of_no_float_dtype(call: Call, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"take weights of bfloat16, float32.*; got {str(dtype)[6:]}\."):
        call(torch.randn(M, D), lambda *shape: torch.ones(shape).to(dtype), Numerics())


@by_call
def test_weights_elsewhere(call: Call) -> None:
    with pytest.raises(ValueError, match="rows and weights are on one device; got cpu and meta"):
        call(torch.randn(M, D), lambda *shape: torch.empty(shape, device="meta"), Numerics())


@pytest.mark.parametrize("emulated", [False, True], ids=["reference", "emulated"])
@pytest.mark.parametrize("call", [CALLS["expert_mlp"], CALLS["grouped_mm"]], ids=["expert_mlp", "grouped_mm"])
def test_emulated_products_ask_too(call: Call, emulated: bool) -> None:
    n = Numerics(recipe="tensorwise", backend="emulated") if emulated else Numerics()
    with pytest.raises(ValueError, match="take rows of"):
        call(torch.ones(M, D).int(), torch.randn, n)


@by_call
def test_hopper_without_its_gpu(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"compute capability 9.0.*there is no GPU.*on cpu\. Use Numerics\(backend='ref"
    ):
        call(torch.randn(M, D), torch.randn, Numerics(backend="hopper"))


@by_call
def test_hopper_and_rows_on_the_host(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converters.operands.hopper_problem", lambda: None)
    with pytest.raises(ValueError, match=r"takes tensors on a GPU\. The rows are on cpu"):
        call(torch.randn(M, D), torch.randn, Numerics(backend="hopper"))


def test_a_backend_that_cannot_run_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert capability.hopper_problem()
    with pytest.raises(ValueError, match=r"A100 has 8\.0\. Use backend = 'reference'"):
        get_backend.__wrapped__("hopper")


class OnGPU(Tensor):
    """Rows and weights that say they are on a GPU, for checks that come before any kernel."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.mark.parametrize("dims", [(40, 48), (32, 40), (8, 8)], ids=str)
def test_dims_that_hopper_cannot_read(dims: tuple[int, int]) -> None:
    def make(*shape: int) -> Tensor:
        return torch.randn(shape).as_subclass(OnGPU)

    (d, h), hopper = dims, Numerics(backend="hopper")
    x, calls = (
        make(M, d),
        [
            lambda n: expert_mlp(x, *mlp_weights(make, E, dims=dims), OFFS, n),
            lambda n: dense_mlp(x, *mlp_weights(make, dims=dims), n),
            lambda n: dense_linear(x, [make(h, d)], n),
            lambda n: grouped_mm(x, make(E, h, d).mT, OFFS, n),
        ],
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=r"matrix dims are multiples of 16; got \(.*Numerics\(backend='reference'\)"
        ):
            call(hopper)


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float_dtypes_pass(call: Call, dtype: torch.dtype) -> None:
    out = call(torch.randn(M, D).to(dtype), lambda *shape: (torch.randn(shape) * 0.02).to(dtype), Numerics())
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_the_reference_takes_any_dims() -> None:
    x = torch.randn(M, 7)
    assert dense_linear(x, [torch.randn(5, 7)], Numerics())[0].shape == (M, 5)


@pytest.mark.parametrize("name", ["routed_mlp", "dispatched_mlp", "dispatched_tokens"])
@pytest.mark.parametrize(
    "numerics",
    [Numerics(wgrad="bf16"), Numerics(recipe="rowwise"), Numerics(recipe="tensorwise", backend="emulated")],
    ids=str,
)
def test_rows_that_are_in_fp8_only(name: str, numerics: Numerics) -> None:
    with pytest.raises(ValueError, match=re.escape("the rows are in FP8 only, so this takes recipe 'tokenwise'")):
        CALLS[name](torch.randn(M, D), torch.randn, numerics)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("recipe", "foo", "Numerics recipe = 'foo' is unknown: choose one of 'tokenwise', 'rowwise'"),
        ("backend", "auto", "Numerics backend = 'auto' is unknown: choose one of 'reference', 'hopper', 'emulated'"),
        ("backend", "cuda", "Numerics backend = 'cuda' is unknown"),
        ("wgrad", "x", "Numerics wgrad = 'x' is unknown: choose one of 'fp8', 'fp8_columns', 'bf16'"),
        ("accumulate", "slow", "Numerics accumulate = 'slow' is unknown"),
        ("grad_dtype", "bf16", "Numerics grad_dtype = 'bf16' is unknown"),
        ("cache", "no", "Numerics cache = 'no' must be true or false"),
        ("used_once", 1, "Numerics used_once = 1 must be true or false"),
        ("temporary", None, "Numerics temporary = None must be true or false"),
        ("fp8_all_gather", "auto", "Numerics fp8_all_gather = 'auto' must be true or false"),
    ],
)
def test_numerics_know_their_values(option: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Numerics(**{option: value})
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(Numerics(), **{option: value})


def test_hopper_has_no_rowwise() -> None:
    with pytest.raises(ValueError, match="backend 'hopper' has no recipe 'rowwise': 'reference' and 'emulated' have"):
        Numerics(recipe="rowwise", backend="hopper")
