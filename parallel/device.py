"""What does torchtitan lack on a machine without a GPU?

torchtitan 0.2.2 assumes an accelerator. `prepare_device()` fills the gaps, all of them here, and does nothing where
torch finds one. It must run before the rest of torchtitan is imported, since that copies `device_type` by value.

| gap on a CPU (torchtitan 0.2.2, torch 2.13)                     | filled with                                      |
|-----------------------------------------------------------------|--------------------------------------------------|
| device type falls back to "cuda"                                | "cpu" and a device module over `torch.cpu`       |
| memory statistics are -1                                        | peak resident size of the process                |
| `get_peak_flops` runs lspci and then assumes an A100            | no peak: MFU reads 0                             |
| `has_cuda_capability(9, 0)` is False and disables grouped GEMMs | True for (9, 0): `torch._grouped_mm` runs here   |
| `torch.histc` has no int64 kernel (router, reorderer)           | scatter_add of ones                              |
| `generate_permute_indices` launches a Triton kernel             | its own `use_cpu=True`                           |
| FSDP2 reduces gradients with PREMUL_SUM, which gloo lacks       | plain sums (`set_force_sum_reduction_for_comms`) |
| `torch.device("cpu:1")` for LOCAL_RANK=1 is no device           | every rank of the host uses "cpu:0"              |
| a barrier with `device_ids` is refused by gloo                  | a barrier without                                |
| rings of context parallelism know CUDA's attention kernels only | the CPU's too (cpu_attention.py)                 |
| DTensor draws the same random numbers for every shard           | a seed for each (cpu_random.py)                  |
"""

import functools
import math
import os
import platform
import resource
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._utils import _get_available_device_type
from torch.distributed.fsdp import FSDPModule

from parallel.cpu_attention import let_rings_run_on_cpu
from parallel.cpu_random import let_shards_differ


class CPUDevice:
    """The part of `torch.cuda`'s interface that torchtitan calls, for the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        """Peak resident bytes of this process since it started: the kernel keeps one maximum and no reset."""
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        keys = ("active_bytes.all.peak", "reserved_bytes.all.peak")
        return dict.fromkeys(keys, peak) | {"num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | None = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def _histc(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def histc(
        input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, **kwargs: object
    ) -> torch.Tensor:  # torch's own argument names
        integer = not input.dtype.is_floating_point
        if not (integer and input.device.type == "cpu" and min == 0 and max == bins):
            return original(input, bins, min, max, **kwargs)
        # Unlike bincount, scatter_add has a static output shape, so torch.compile traces it. Expert ids are < bins.
        return input.new_zeros(bins).scatter_add_(0, input.flatten(), torch.ones_like(input.flatten()))

    return histc


def _patch_everywhere(name: str, old: object, new: object) -> None:
    """Replaces `old` in torchtitan's modules that have already copied it by value."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchtitan") and getattr(module, name, None) is old:
            setattr(module, name, new)


def _patch_torchtitan() -> None:
    import torchtitan.models.moe.kernels as kernels  # after the device type is known
    from torchtitan.tools import utils

    has_capability, permute = utils.has_cuda_capability, kernels.generate_permute_indices
    _patch_everywhere("get_peak_flops", utils.get_peak_flops, lambda device_name: math.inf)
    _patch_everywhere("has_cuda_capability", has_capability, lambda major, minor: (major, minor) == (9, 0))
    _patch_everywhere("generate_permute_indices", permute, functools.partial(permute, use_cpu=True))


def _patch_torch() -> None:
    torch.histc = _histc(torch.histc)
    let_rings_run_on_cpu()
    let_shards_differ()
    set_factor, barrier = FSDPModule.set_gradient_divide_factor, dist.barrier

    @functools.wraps(set_factor)
    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor
    dist.barrier = functools.wraps(barrier)(lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs))


def prepare_device() -> str:
    """Makes this process ready for torchtitan and returns the device type: "cuda", another accelerator, or "cpu".

    Idempotent. On a CPU it changes torchtitan's and torch's functions named in the table above, for the whole process.
    """
    if accelerator := _get_available_device_type():
        return accelerator
    from torchtitan.tools import utils  # imports nothing else of torchtitan but its logging

    if utils.device_type == "cpu":
        return "cpu"
    device = CPUDevice()
    _patch_everywhere("device_module", utils.device_module, device)
    _patch_everywhere("device_type", utils.device_type, "cpu")
    os.environ["LOCAL_RANK"] = "0"
    _patch_torch()
    _patch_torchtitan()
    return "cpu"
