"""Hugging Face checkpoints of sharded models, through torchtitan's own CheckpointManager: what one process has."""

import copy
import functools
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager, ModelWrapper
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import parallelize_llama

from recipes.models.hf.adapter import HFAdapter
from recipes.models.hf.reader import INDEX
from recipes.models.hf.tensors import experts_of, halves, joined, transposed
from recipes.models.llama4.adapter import Llama4Adapter
from recipes.models.llama4.attention import Llama4
from recipes.models.mixtral.adapter import MixtralAdapter
from recipes.models.mixtral.args import MixtralModelArgs
from recipes.models.mixtral.model import Mixtral
from tests.helpers import distributed
from tests.recipes.tiny_models import llama4_args, mixtral_args

WORLD = 4


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism over four ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1


def with_experts(args: object, experts: int) -> object:
    args = copy.deepcopy(args)
    return replace(args, moe_args=replace(args.moe_args, num_experts=experts))


MIXTRAL, LLAMA4 = mixtral_args(), llama4_args(n_layers=2)
CASES = {
    "hsdp_ep": (MIXTRAL, Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "fsdp_ep": (MIXTRAL, Layout(dp_shard=4, ep=2)),
    # Fewer experts than ranks: FSDP shards the hidden dim of the experts.
    "fsdp_hidden": (with_experts(MIXTRAL, 2), Layout(dp_shard=4, ep=2)),
    "tp_fsdp": (MIXTRAL, Layout(dp_shard=2, tp=2)),
    "tp_ep": (MIXTRAL, Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    "llama4_hsdp_ep": (LLAMA4, Layout(dp_replicate=2, dp_shard=2, ep=2)),
    "llama4_fsdp_hidden": (with_experts(LLAMA4, 2), Layout(dp_shard=4, ep=2)),
    "llama4_tp_ep": (LLAMA4, Layout(dp_shard=2, tp=2, ep=2, etp=2)),
}


@functools.cache  # a mesh is a dozen process groups
def dims_of(layout: Layout) -> ParallelDims:
    dims = ParallelDims(**vars(layout), cp=1, pp=1, world_size=WORLD)
    dims.build_mesh()
    return dims


def sharded(model_class: type[nn.Module], args: object, layout: Layout) -> nn.Module:
    config = JobConfig()
    config.training.seq_len, config.training.mixed_precision_param = 64, "float32"
    config.activation_checkpoint.mode = "none"
    with torch.device("meta"):
        model = model_class(copy.deepcopy(args))
    parallelize_llama(model, dims_of(layout), config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    return model


def manager(model: nn.Module, adapter: HFAdapter) -> SimpleNamespace:
    """What CheckpointManager's dcp_load and dcp_save read of self."""
    return SimpleNamespace(sd_adapter=adapter, states={MODEL: ModelWrapper(model)}, pg=None)


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def load_all(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def write_original(args: object, folder: Path, files: int) -> None:
    """A random model in `files` files; that transformers has the same in such a folder is test_hf.py's matter."""
    model_class, adapter = kind(args)
    torch.manual_seed(0)
    model = model_class(copy.deepcopy(args))
    tensors = {name: torch.randn_like(w) for name, w in adapter(args, None).to_hf(model.state_dict()).items()}
    folder.mkdir(parents=True)
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    file_of = {name: names[i % files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({k: v for k, v in tensors.items() if file_of[k] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": file_of}))


def kind(args: object) -> tuple[type[nn.Module], type[HFAdapter]]:
    return (Mixtral, MixtralAdapter) if isinstance(args, MixtralModelArgs) else (Llama4, Llama4Adapter)


def round_trip(args: object, layout: Layout, folder: Path) -> None:
    """Loads a folder into the sharded model, exports it, and compares both with the original."""
    original, out = folder / "original", folder / "export"
    model_class, adapter_class = kind(args)
    model, adapter = sharded(model_class, args, layout), adapter_class(args, str(original))
    self = manager(model, adapter)
    weights = self.states[MODEL].state_dict()
    CheckpointManager.dcp_load(self, weights, str(original), from_hf=True, from_quantized=False)
    expected = adapter.from_hf(load_all(original))
    for name, p in model.named_parameters():
        assert torch.equal(whole(p), expected.pop(name)), name
    assert not expected
    CheckpointManager.dcp_save(self, self.states[MODEL].state_dict(), str(out), AsyncMode.DISABLED, to_hf=True)
    dist.barrier()
    for file in original.glob("*.safetensors"):
        before, after = load_file(file), load_file(out / file.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(w, after[k]) for k, w in before.items()), file.name


def strided_shards() -> None:
    """FSDP over tensor parallelism on one dim, as eight ranks have it: the outer shards are strided."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "etp"))
    i, j = mesh.get_coordinate()
    full = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(0))
    local = full.chunk(2, 1)[j].chunk(2, 1)[i].contiguous()
    layout = [_StridedShard(1, split_factor=2), Shard(1)]
    weight = DTensor.from_local(local, mesh, layout, run_check=False, shape=full.shape, stride=full.stride())
    for e, expert in experts_of(weight).items():
        assert torch.equal(expert.full_tensor(), full[e])
    left = transposed(weight)
    assert torch.equal(left.full_tensor(), full.mT)
    both = joined(left, left, dim=2)
    assert torch.equal(both.full_tensor(), torch.cat((full.mT, full.mT), 2))
    assert torch.equal(halves(both, dim=2)[1].full_tensor(), full.mT)


@distributed(WORLD)
def test_sharded_models_load_and_export_the_same_bytes() -> None:
    strided_shards()
    shared = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(shared)
    for name, (args, layout) in CASES.items():
        folder = Path(shared[0]) / name
        if dist.get_rank() == 0:
            write_original(args, folder / "original", files=3)
        dist.barrier()
        try:
            round_trip(args, layout, folder)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
