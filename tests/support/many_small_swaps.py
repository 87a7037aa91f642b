"""many_runs.py where DeepSpeed swaps to NVMe even tensors as small as those of builtin:tiny.

    python -m tests.support.many_small_swaps JOBS.json

DeepSpeed keeps tensors below 1 MiB in memory, so nothing of a small model would be swapped.
"""

from typing import Any

from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper

from tests.support import many_runs

SWAPPED_BYTES = 8 << 10


def lower_threshold(swapper: Any) -> None:
    init = swapper.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.min_aio_bytes = SWAPPED_BYTES

    swapper.__init__ = changed


if __name__ == "__main__":
    for swapper in (OptimizerSwapper, AsyncPartitionedParameterSwapper):
        lower_threshold(swapper)
    many_runs.main()
