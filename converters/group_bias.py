"""The bias of a grouped GEMM: which rows does it belong to?"""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_group_bias(out: Tensor, bias: Tensor | None, offs: Tensor | None, experts: int) -> Tensor:
    """out + bias, in out's dtype, whatever the parameter's.

    Args:
        out: [M, N], or [E, M, N] without offs.
        bias: [E, N], a row for each group, or [N] for all of them; None: out as it is.
        offs: int [E], ends of the groups of out [M, N]. Rows past offs[-1] get no bias and add nothing to its gradient.
        experts: E.

    Raises:
        ValueError: a bias of another shape, which might fit by chance ([M, N], or [M, 1]), and mean something else.
    """
    if bias is None:
        return out
    N = out.shape[-1]
    if bias.shape not in ((N,), (experts, N)):
        raise ValueError(
            f"a grouped product of {experts} experts takes a bias [{experts}, {N}], one row an expert, or [{N}]; got "
            f"{tuple(bias.shape)}."
        )
    per_expert = bias.expand(experts, N)
    if offs is None:
        return out + per_expert.to(out.dtype)[:, None]
    # An embedding: its backward sums the rows of a group without asking the host how many, and reads none of the
    # padding index. In float32: on a CPU it sums in the dtype of its table. right=True passes over groups of no rows;
    # rows past the last end get index E.
    per_expert = per_expert.to(torch.promote_types(out.dtype, torch.float32))
    row = torch.arange(out.shape[0], dtype=offs.dtype, device=offs.device)
    expert = torch.searchsorted(offs, row, right=True, out_int32=True)
    table = torch.cat([per_expert, per_expert.new_zeros((1, N))])
    return out + F.embedding(expert, table, padding_idx=experts).to(out.dtype)
