"""Runs in a process of its own, without a GPU: prints as JSON what torchtitan finds there after `prepare_device`.

python -m tests.parallel.device_facts early|late: whether torchtitan is imported after prepare_device or before it.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import device


def refuse_to_run(*args: object, **kwargs: object) -> None:
    raise AssertionError(f"a process was started: {args}")


def with_an_accelerator() -> dict[str, object]:
    """prepare_device where torch finds an accelerator: it must change nothing."""
    before = torch.histc, dist.barrier, os.environ["LOCAL_RANK"]
    device._get_available_device_type, real = (lambda: "cuda"), device._get_available_device_type
    returned = device.prepare_device()
    device._get_available_device_type = real
    return {"returned": returned, "untouched": before == (torch.histc, dist.barrier, os.environ["LOCAL_RANK"])}


def memory() -> dict[str, float]:
    metrics = importlib.import_module("torchtitan.components.metrics")
    monitor = metrics.build_device_memory_monitor()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    block = torch.ones(100 * 2**20)  # 400 MiB, written to
    after = monitor.get_peak_stats()
    monitor.reset_peak_stats()
    return {
        "block": block.numel() * 4 / 2**30,
        "resident": pages * os.sysconf("SC_PAGE_SIZE") / 2**30,  # before the block
        "after": after.max_reserved_gib,
        "percent": after.max_reserved_pct,
        "retries": after.num_alloc_retries,
        "capacity": monitor.device_capacity_gib,
    }


def histc() -> dict[str, object]:
    ids = torch.tensor([[0, 3], [3, 1], [3, 0]])
    real = torch.histc.__wrapped__
    floats = torch.rand(50)
    return {
        "int64": torch.histc(ids.view(-1), bins=5, min=0, max=5).tolist(),
        "dtype": str(torch.histc(ids, bins=5, min=0, max=5).dtype),
        "empty": torch.histc(ids[:0], bins=2, min=0, max=2).tolist(),
        "floats_as_before": torch.equal(torch.histc(floats, 7, 0, 1), real(floats, 7, 0, 1)),
        "defaults_as_before": torch.equal(torch.histc(floats), real(floats)),
    }


def permutation() -> list[list[int]]:
    """Two ranks send to two experts: [rank 0: 4 and 2 rows, rank 1: 1 and 3 rows], groups padded to multiples of 4."""
    utils = importlib.import_module("torchtitan.models.moe.utils")
    counts = torch.tensor([4, 2, 1, 3])
    return [t.tolist() for t in utils.generate_permute_indices(counts, 2, 2, 20, 4)]


def moe() -> dict[str, object]:
    """The MoE layer of a Llama4 whose arguments torchtitan has updated for this device."""
    from torchtitan.config import JobConfig
    from torchtitan.models.llama4 import llama4_args
    from torchtitan.models.moe import build_moe

    args = llama4_args["debugmodel"]
    args.update_from_config(JobConfig())
    layer = build_moe(args.moe_args, dim=32, hidden_dim=48)
    with torch.no_grad():
        layer.init_weights(0.02, buffer_device=torch.device("cpu"))
    x = torch.randn(2, 9, 32, requires_grad=True)
    out = layer(x)
    out.backward(torch.randn_like(out))
    finite = all(t.isfinite().all() for t in (out, x.grad, *(p.grad for p in layer.parameters())))
    return {"grouped_mm": layer.experts.use_grouped_mm, "finite": bool(finite)}


def barrier() -> bool:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier(device_ids=[0])
    dist.barrier()
    dist.destroy_process_group()
    return True


def main(when: str) -> None:
    os.environ["LOCAL_RANK"] = "1"
    subprocess.run = subprocess.Popen = refuse_to_run
    accelerator = with_an_accelerator()
    if when == "late":
        importlib.import_module("torchtitan.train")
    returned = device.prepare_device()
    histc_once = torch.histc
    importlib.import_module("torchtitan.train")
    utils = importlib.import_module("torchtitan.tools.utils")
    copies = [m for name, m in sys.modules.items() if name.startswith("torchtitan") and hasattr(m, "device_type")]
    facts = {
        "accelerator": accelerator,
        "returned": [returned, device.prepare_device()],
        "idempotent": torch.histc is histc_once,
        "device_types": sorted({m.device_type for m in copies if isinstance(m.device_type, str)}),
        "copies": len(copies),
        "name": utils.device_module.get_device_name(),
        "local_rank": os.environ["LOCAL_RANK"],
        "tensor_device": str(torch.zeros(1, device=f"cpu:{os.environ['LOCAL_RANK']}").device),
        "peak_flops": utils.get_peak_flops(utils.device_module.get_device_name()),
        "capabilities": [utils.has_cuda_capability(*c) for c in ((8, 9), (9, 0), (10, 0))],
        "memory": memory(),
        "histc": histc(),
        "permutation": permutation(),
        "moe": moe(),
        "barrier": barrier(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
