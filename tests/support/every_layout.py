"""A program for ranks: parallel=auto chooses, then each layout of all ranks trains a few steps.

    every_layout.py key=value ...

Rank 0 prints a JSON object: what was chosen, and for each layout the predicted and the measured
seconds of a step. All layouts have the ranks in the order that was chosen.
"""

import gc
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

from hpc_tune.autotune.candidates import legal_layouts, predict_candidates
from hpc_tune.autotune.search import choose_layout_on_rank_0, measure_world
from hpc_tune.batch import Batch
from hpc_tune.config.constraints import allows_tensor_parallel
from hpc_tune.config.load import load_config, write_resolved_config
from hpc_tune.engine.base import EngineSettings, train_step
from hpc_tune.engine.native import NativeEngine
from hpc_tune.log import configure_logging
from hpc_tune.memory.host import find_host_limit
from hpc_tune.model.build import build, resolve_dtype
from hpc_tune.model.experts import max_expert_parallel_size
from hpc_tune.plan.hardware import detect_machine
from hpc_tune.plan.resolve import choose_reshard, with_layout
from hpc_tune.plan.step_time import Network, StepWork, step_time
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import measure_model_size
from hpc_tune.world.bootstrap import bootstrap, regroup, shutdown

WARM_UP, STEPS, ENOUGH_S = 1, 4, 25.0


def batches_of(config, layout, rank):
    """Return this rank's micro-batches of full rows, and the tokens of all ranks."""
    rows = config.batch.global_size // layout.data_parallel_size
    micro, length = config.batch.micro_size, config.data.seq_len
    batches = []
    for first in range(0, rows, micro):
        shape = (min(micro, rows - first), length)
        tokens_BT = torch.randint(0, 250, shape)
        positions_BT = torch.arange(length).expand(shape).contiguous()
        num = shape[0] * length
        batches.append(Batch(tokens_BT, tokens_BT, positions_BT, num, num, first))
    return batches, config.batch.global_size * length


def steps_of(config, built, layout, reshard, comm):
    """Return the seconds of each step, and how many of them this rank waited for messages."""
    parallel = with_layout(config.parallel, layout).model_copy(update={"reshard": reshard})
    plan = StepPlan.for_model(built, layout, parallel)
    engine = NativeEngine(built, EngineSettings(plan, comm.device, config.optim))
    batches, tokens = batches_of(config, layout, comm.world.rank)
    times, waits = [], []
    for number in range(WARM_UP + STEPS):
        [spent_s] = comm.max([sum(times)])
        if number > WARM_UP and spent_s > ENOUGH_S:
            break
        began_s = time.perf_counter()
        comm.sum([0.0])  # as the loop does before a step, and after it
        waits.append(train_step(engine, batches, tokens, 1e-4).comm_s)
        comm.sum([0.0])
        times.append(time.perf_counter() - began_s)
    return times[WARM_UP:], waits[WARM_UP:]


def main():
    """Do it all; see above."""
    config = load_config(None, ["parallel=auto", *sys.argv[1:]])
    comm = bootstrap(config.run)
    configure_logging(comm.world.rank)
    machine = detect_machine(comm, find_host_limit(config.memory.host_limit).num_bytes)
    began_s = time.monotonic()
    measured, comm = measure_world(config, comm, machine)
    measuring_s = time.monotonic() - began_s
    write_settings, limit_s = partial(write_resolved_config, config), config.run.timeout / 2
    chosen, lines = choose_layout_on_rank_0(measured, write_settings, comm, machine, limit_s)
    dtype = resolve_dtype(config.model.dtype, comm.device)

    def built():
        return build(Path(config.model.path), dtype, config.tune, config.train.seed)

    module, model = built().module, built().config
    size, num_experts = measure_model_size(module), max_expert_parallel_size(module)
    del module
    work = StepWork(size, model, config.batch.global_size, config.data.seq_len, dtype.itemsize)
    network = Network.from_links(measured.links, measured.nodes)
    all_ranks = len(measured.nodes)
    order = chosen.ranks if len(chosen.ranks) == all_ranks else tuple(range(all_ranks))
    allow_tensor_parallel = allows_tensor_parallel(config.tune, config.train)
    layouts = legal_layouts(config.parallel, model, all_ranks, allow_tensor_parallel, num_experts)
    settings = (config.parallel, config.batch, work, machine, measured.compute, network)
    ranked = predict_candidates(layouts, *settings)
    whole = [c.layout for c in ranked if c.layout.size == all_ranks]
    inside = regroup(comm, measured.positions_in_link_order(order), config.run.timeout)
    runs = [(layout, order) for layout in whole]
    if len(chosen.ranks) < all_ranks:
        runs.append((chosen.layout, chosen.ranks))
    rows = []
    for layout, ranks in runs:
        if ranks != order:
            places = [order.index(rank) for rank in ranks]
            inside = regroup(inside, places, config.run.timeout)
            if inside is None:
                time.sleep(1.0)
                return
        reshard = choose_reshard(config.parallel, size, layout, machine.bytes_per_rank)
        settings = config.parallel.model_copy(update={"reshard": reshard})
        micro = config.batch.micro_size
        found = step_time(work, layout, ranks, settings, micro, measured.compute, network)
        times, waits = steps_of(config, built(), layout, reshard, inside)
        rows.append(
            {
                "layout": str(layout),
                "reshard": reshard,
                "ranks": list(ranks),
                "predicted_s": found.seconds,
                "predicted_comm_s": found.comm_s,
                "measured_s": statistics.median(times),
                "comm_s": statistics.median(waits),
                "chosen": layout == chosen.layout,
            }
        )
        if inside.is_rank_0:
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        gc.collect()
    if inside.is_rank_0:
        compute = {name: getattr(measured.compute, name) for name in ("sharing", "sync_s")}
        told = {"rows": rows, "lines": lines, "measuring_s": measuring_s, **compute}
        told["measured"] = json.loads(measured.to_json())
        print(json.dumps(told), flush=True)
    shutdown(inside)


if __name__ == "__main__":
    main()
