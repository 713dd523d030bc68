"""Installs everything of ours into torchtitan. Importing this module is enough, and safe to repeat.

Named by `experimental.custom_import`, so that stock `python -m torchtitan.train` finds our converters, models and
datasets. torchtitan keeps all three in dicts of its own modules; this is the one place that fills them.
"""

import torch
from torchtitan.models.llama4.infra import parallelize
from torchtitan.protocols import train_spec as train_specs

import converters.dense_linear
import converters.dispatched_mlp
import converters.expert_mlp
import converters.expert_weight
import converters.routed_mlp  # noqa: F401  (all define ops)
from converters.registry import install
from parallel.parallelize import let_expert_parallelism_stand_alone
from parallel.recomputation import keep_fsdp_out_of_recomputation
from recipes.datasets import register_datasets
from recipes.issue1152 import model as issue1152
from recipes.job_config import DataConfig
from recipes.models import llama4, mixtral

# What selective recomputation keeps, beside torchtitan's own list: FP8 products, as it keeps every other matmul.
SAVED_OPS = {
    torch.ops.titan_moe_fp8.expert_mlp.default,
    torch.ops.titan_moe_fp8.routed_mlp.default,
    torch.ops.titan_moe_fp8.arrived_mlp.default,
    torch.ops.titan_moe_fp8.grouped_mm.default,
    torch.ops.titan_moe_fp8.ruled_mlp.default,
    torch.ops.titan_moe_fp8.ruled_mm.default,
    torch.ops.titan_moe_fp8.dense_linear.default,
}
SPECS = {"llama4": llama4.train_spec, "mixtral": mixtral.train_spec, "issue1152": issue1152.train_spec}


def register() -> None:
    """Converters, train specs and datasets. A model that is already registered, by us or by the user, stays."""
    install()
    let_expert_parallelism_stand_alone()
    keep_fsdp_out_of_recomputation()
    for name, make in SPECS.items():
        if name not in train_specs._extra_train_specs:
            train_specs.register_train_spec(name, make())
    register_datasets(DataConfig())
    parallelize._op_sac_save_list.update(SAVED_OPS)


register()
