"""An adapter between our state dicts and Hugging Face's, made of rules. One a model: recipes/models/*/adapter.py.

torchtitan asks it for both ways. Loading: `to_hf` of the model's weights gives tensors to fill, the reader fills them,
`from_hf` gives the weights back; views that were filled need no second copy. Export: `to_hf`, then torch's writer.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from converters.rules.checkpoint import is_state
from parallel.wrapped_weight import plain
from recipes.models.hf.reader import INDEX, Region, RegionReader
from recipes.models.hf.rules import Rule

logger = logging.getLogger(__name__)


class HFStateDict(dict[str, Tensor]):
    """What `to_hf` returns: tensors by Hugging Face's names.

    views: for each of our weights that these are views of, the weight itself and its views by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def filled(self) -> dict[str, Tensor]:
        """Our weights whose views are all still here: whatever was written into them is in the weights."""
        return {
            native: weight
            for native, (weight, parts) in self.views.items()
            if all(self.get(key) is part for key, part in parts.items())
        }


class HFAdapter(BaseStateDictAdapter):
    """rules: of the layout that is exported. other_rules: further layouts that `from_hf` accepts."""

    rules: Sequence[Rule]
    other_rules: Sequence[Rule] = ()
    # Tensors of a Hugging Face checkpoint that have no place in the model, as a pattern of the whole name.
    ignored: str = r".*\.rotary_emb\.inv_freq"

    def __init__(self, model_args: BaseModelArgs, hf_assets_path: str | None) -> None:
        self.model_args = model_args
        self.hf_assets_path = hf_assets_path
        self.rules = self.make_rules()
        self.fqn_to_index_mapping = self._shards(Path(hf_assets_path)) if hf_assets_path else None

    def make_rules(self) -> Sequence[Rule]:
        """The rules of the exported layout, with concrete names."""
        raise NotImplementedError

    def layout(self, name: str) -> list[Rule]:
        """Complete rules of an export: "hub", or "fused" where the model has one.

        Raises:
            ValueError: the model has no such layout.
        """
        if name == "hub":
            return list(self.rules)
        raise ValueError(f"{type(self).__name__} has no layout {name!r}: its checkpoints have one, 'hub'.")

    def config(self) -> dict[str, Any]:
        """The model's config.json for transformers, without what only its tokenizer knows."""
        raise NotImplementedError

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """What a folder's config.json says and this model does not do, one phrase each."""
        raise NotImplementedError

    def regions(self, key: str, shape: tuple[int, ...]) -> list[Region]:
        """Which of the exported layout's tensors a stored tensor holds."""
        raise NotImplementedError

    def to_hf(self, state_dict: Mapping[str, Any]) -> HFStateDict:
        """Hugging Face's tensors; of sharded weights this rank's part.

        Raises:
            ValueError: a weight has no rule.
        """
        weights = {name: plain(w) for name, w in state_dict.items() if not _is_routing_state(name, w)}
        out = HFStateDict()
        for rule in self.rules:
            if not all(name in weights for name in rule.natives):
                continue  # in another pipeline stage
            tensors = rule.to_hf(weights)
            out.update(tensors)
            if rule.in_place:
                out.views[rule.natives[0]] = (weights[rule.natives[0]], tensors)
        known = {name for rule in self.rules for name in rule.natives}
        if unknown := sorted(set(weights) - known):
            raise ValueError(f"{', '.join(unknown[:5])}: no tensor of a Hugging Face checkpoint is this weight.")
        return out

    def from_hf(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Our weights, from any accepted layout.

        Raises:
            ValueError: a tensor is unknown, or some but not all experts of a weight are there.
        """
        out = hf_state_dict.filled() if isinstance(hf_state_dict, HFStateDict) else {}
        used = {key for rule in self.rules if rule.natives[0] in out for key in rule.keys}
        for rule in (*self.rules, *self.other_rules):
            if all(name in out for name in rule.natives):
                continue
            present = [key for key in rule.keys if key in hf_state_dict]
            if present and len(present) < len(rule.keys):
                missing = sorted(set(rule.keys) - set(present), key=rule.keys.index)
                raise ValueError(f"{', '.join(missing[:3])} missing ({len(present)} of {len(rule.keys)} are there).")
            if present:
                out |= rule.from_hf(hf_state_dict)
                used |= set(present)
        strangers = [k for k in hf_state_dict if k not in used and not re.fullmatch(self.ignored, k)]
        if strangers:
            raise ValueError(f"{', '.join(strangers[:5])}: no weight of this model is this tensor.")
        return out

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """A reader of any accepted layout.

        Raises:
            ValueError: a quantized checkpoint is asked for, config.json in the folder describes another model, or a
                tensor of this model is not there.
        """
        if from_quantized:
            raise ValueError(
                "checkpoint.initial_load_in_hf_quantized = true: quantized checkpoints are not read, take the model's "
                "BF16 checkpoint."
            )
        self.check_config(Path(path))
        reader = RegionReader(path, self.regions)
        if missing := [key for rule in self.rules for key in rule.keys if key not in reader.tensors]:
            raise ValueError(
                f"{path!r} has no tensor {missing[0]} ({len(missing)} are missing): is it of another model?"
            )
        return reader

    def check_config(self, folder: Path) -> None:
        """Refuses a folder whose config.json describes another model; one without the file passes."""
        path = folder / "config.json"
        if path.exists() and (problems := self.config_problems(json.loads(path.read_text()))):
            raise ValueError(
                f"{path} describes another model than this flavor: {'; '.join(problems)}. Choose the flavor of that "
                "checkpoint, or add one."
            )

    def _shards(self, folder: Path) -> dict[str, int] | None:
        """File number of each exported tensor after the folder's index, None without one: then all go into one file."""
        path = folder / INDEX
        if not path.exists():
            return None
        weight_map = json.loads(path.read_text())["weight_map"]
        numbers: dict[str, int] = {}
        for key, file in weight_map.items():
            found = re.search(r"\d+", file)
            names = [region.name for region in self.regions(key, self._placeholder(key))]
            numbers |= dict.fromkeys(names, int(found[0]) if found else 1)
        exported = [key for rule in self.rules for key in rule.keys]
        if missing := [key for key in exported if key not in numbers]:
            logger.warning(f"{path} is of another model ({missing[0]} is not in it): an export will be one file.")
            return None
        return {key: numbers[key] for key in exported}

    def _placeholder(self, key: str) -> tuple[int, ...]:
        """A shape for `regions` where only names matter."""
        return (1, 2, 1)


def _is_routing_state(name: str, value: Any) -> bool:
    """Whether a state is torchtitan's balancing bias, which Hugging Face's models lack; says so if it is not zero. So
    is the memory of delayed scaling.
    """
    if is_state(name):
        return True
    if not name.endswith(".expert_bias"):
        return False
    if isinstance(value, Tensor) and value.device.type != "meta" and bool(torch.count_nonzero(value)):
        logger.warning(f"{name} is not exported: transformers has no such bias and will route a little differently.")
    return True


def layers(templates: Iterable[tuple[str, str]], n_layers: int) -> list[tuple[str, str]]:
    """(native, key) pairs of all layers from pairs with {} for the layer's number."""
    return [(a.format(i), b.format(i)) for i in range(n_layers) for a, b in templates]
