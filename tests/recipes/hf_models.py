"""Tiny random models of transformers, the oracle of our Hugging Face adapters, and ours with the same sizes."""

import copy
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from recipes.models.hf.adapter import HFAdapter
from recipes.models.llama4.adapter import Llama4Adapter
from recipes.models.llama4.args import Llama4Args
from recipes.models.llama4.attention import Llama4
from recipes.models.mixtral.adapter import MixtralAdapter
from recipes.models.mixtral.args import MixtralModelArgs
from recipes.models.mixtral.model import Mixtral


def pair(args: MixtralModelArgs | Llama4Args) -> tuple[PreTrainedModel, nn.Module, HFAdapter]:
    """A random model of transformers, ours of the same sizes with other weights, and the adapter between them."""
    torch.manual_seed(0)
    classes = (
        (MixtralConfig, MixtralForCausalLM, Mixtral, MixtralAdapter)
        if isinstance(args, MixtralModelArgs)
        else (Llama4TextConfig, Llama4ForCausalLM, Llama4, Llama4Adapter)
    )
    Config, Theirs, Ours, Adapter = classes
    config = {k: v for k, v in Adapter(args, None).config().items() if k not in ("architectures", "rope_scaling")}
    theirs, ours = Theirs(Config(**config)), Ours(copy.deepcopy(args))
    with torch.no_grad():
        ours.init_weights()
        for name, p in theirs.named_parameters():
            if "norm" in name:  # ones would hide a norm that is left out
                p.uniform_(0.5, 1.5)
            if "q_proj" in name or "k_proj" in name:  # std 0.02 would leave attention almost uniform
                p.normal_(std=0.3)
    return theirs, ours, Adapter(args, None)


def load(model: nn.Module, adapter: HFAdapter, folder: Path) -> None:
    """As torchtitan's CheckpointManager.dcp_load does with initial_load_in_hf."""
    tensors = adapter.to_hf(model.state_dict())
    dcp.load(tensors, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    missing, unexpected = model.load_state_dict(adapter.from_hf(tensors), strict=False)
    assert not unexpected
    assert all(name.endswith("expert_bias") for name in missing), missing


def gradients(model: nn.Module, tokens: Tensor, upstream: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of `tokens`, and the gradients of all weights."""
    out = model(tokens)
    logits = out if isinstance(out, Tensor) else out.logits
    logits.backward(upstream)
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def equal_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same names and bits."""
    same = lambda x, y: x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))  # noqa: E731
    return a.keys() == b.keys() and all(same(a[k].contiguous(), b[k].contiguous()) for k in a)
