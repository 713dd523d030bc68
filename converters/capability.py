"""What can this machine run? The only file that probes versions and devices."""

from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

from converters.config import FP8GroupedExpertsConfig
from converters.dense_config import FP8DenseConfig
from converters.numerics import Numerics, needs_emulation

TORCHAO_RANGE = (
    Version("0.17"),
    Version("0.19"),
)  # [first, first unsupported); the same bound stands in pyproject.toml
HOPPER = (9, 0)  # wgmma on E4M3 operands is an sm90 instruction; sm100 needs other kernels


def torchao_problem() -> str | None:
    """One sentence when the installed torchao is outside the declared range, else None."""
    try:
        installed = version("torchao")
    except PackageNotFoundError:
        installed = "none"
    low, high = TORCHAO_RANGE
    if installed != "none" and low <= Version(Version(installed).base_version) < high:
        return None
    return f"torchao {installed} is installed, torchao>={low},<{high} is wanted: pip install 'torchao>={low},<{high}'."


def hopper_problem() -> str | None:
    """One sentence when the hopper backend cannot run here, else None."""
    if not torch.cuda.is_available():
        return "backend 'hopper' needs an NVIDIA GPU with compute capability 9.0 (H100, H200), and there is no GPU."
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        name = torch.cuda.get_device_name()
        return (
            f"backend 'hopper' needs compute capability 9.0 (H100, H200), {name} has {capability[0]}.{capability[1]}."
        )
    return None


def resolve_backend(backend: str, recipe: str, grad_dtype: str) -> str:
    """The backend that "auto" stands for with this recipe on this machine; any other as it is.

    Raises:
        ValueError: hopper was named and cannot run here.
    """
    if backend == "hopper" and (problem := hopper_problem()):
        raise ValueError(f"{problem} Set backend = 'reference' (plain torch, any device) or 'auto'.")
    if backend != "auto":
        return backend
    if needs_emulation(recipe, grad_dtype):
        return "emulated"
    if recipe == "tokenwise":
        return "reference" if hopper_problem() else "hopper"
    return "emulated" if torch.cuda.is_available() else "reference"  # the reference waits for a GPU in every GEMM


def resolve(config: FP8GroupedExpertsConfig | FP8DenseConfig) -> Numerics:
    """Fixes the backend for this machine once.

    Raises:
        ValueError: the backend was named and cannot run here.
    """
    backend = resolve_backend(config.backend, config.recipe, config.grad_dtype)
    wires = config.recipe == "tokenwise" and backend != "emulated"
    return Numerics(
        fp8_all_gather=config.fsdp_fp8_all_gather != "off" and wires,
        recipe=config.recipe,
        backend=backend,
        wgrad=config.wgrad,
        accumulate=config.accumulate,
        grad_dtype=config.grad_dtype,
        cache=config.cache,
    )


def dispatches_fp8(config: FP8GroupedExpertsConfig, numerics: Numerics) -> bool:
    """Whether rows travel between expert-parallel ranks in FP8."""
    if config.ep_fp8_dispatch == "auto":
        return numerics.backend == "hopper" and not numerics.wgrad_from_hp and config.experts == "grouped"
    return config.ep_fp8_dispatch == "on"
