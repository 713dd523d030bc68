"""The tokens of a step, summed over the data-parallel ranks while the host goes on.

torchtitan 0.2.2 divides each loss by the labels of all ranks, and reads their sum to the host before it launches the
forward pass. So the host waits until the GPU has done the step before, and then the GPU for the host: 2.1 ms a step of
172 ms for the like wait on one H200 (batches.py). The sum can stay on the device: a tensor divides a loss as well as a
number does, to the same bits below 2**24 tokens a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import utils as dist_utils


@contextmanager
def first_sum_on_device(expected: bool) -> Iterator[None]:
    """The first `dist_utils.dist_sum` within gives a float32 tensor on the device, and waits for nobody.

    In torchtitan's train_step that is the count of tokens, if there are several data-parallel ranks (`expected`). Sums
    after it, of what is logged, are numbers as ever.
    """
    if not expected:
        yield
        return
    original = dist_utils.dist_sum

    def first(x: Tensor, mesh: DeviceMesh, extra_pg: Any = None) -> Tensor:
        dist_utils.dist_sum = original
        assert extra_pg is None, "torchtitan sums tokens over one mesh"
        return funcol.all_reduce(x, "sum", mesh).float()

    dist_utils.dist_sum = first
    try:
        yield
    finally:
        dist_utils.dist_sum = original
