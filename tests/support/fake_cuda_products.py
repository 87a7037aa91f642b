"""A program: the doctor's matrix multiplications on the fake CUDA device.

    python -m tests.support.fake_cuda_products

Prints what was measured, and where the host waited; each matmul takes 2 ms by its events.
"""

import json
from dataclasses import asdict

from tests.support.fake_cuda import load_native

if __name__ == "__main__":
    load_native()

import torch
import torch._dynamo  # not while torch.cuda is replaced

from hpc_tune.probe.gpu_state import GpuState
from hpc_tune.probe.matmuls import MatmulBenchmark, time_matmuls
from tests.support.fake_cuda import fake_cuda


def main() -> None:
    with fake_cuda() as watch:
        ready = torch.cuda.Event.elapsed_time  # which refuses an event that nobody waited for

        def elapsed_ms(event, later):
            ready(event, later)
            return 2.0

        torch.cuda.Event.elapsed_time = elapsed_ms
        torch.cuda.Event.__init__ = lambda event, enable_timing: setattr(event, "at", -1)
        work = MatmulBenchmark(torch.device("cuda", 0))
        made = [*watch.waits]
        watch.begin()
        work.warm_up()
        warming = [*watch.waits]
        watch.begin()
        work.start_batch()
        in_batch = [*watch.waits]
        watch.begin()
        found = time_matmuls(work, 0.2, lambda: GpuState(sm_mhz=1755.0))
        waits = {wait: watch.waits.count(wait) for wait in dict.fromkeys(watch.waits)}
    print(
        json.dumps(
            {
                "found": asdict(found),
                "made": made,
                "warming": warming,
                "in_batch": in_batch,
                "waits": waits,
                "races": watch.races,
            }
        )
    )


if __name__ == "__main__":
    main()
