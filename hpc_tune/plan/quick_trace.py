"""Traces that take seconds: of few blocks and few tokens, extended by straight lines.

trace_step -> trace_few_blocks (deep models) -> trace_few_tokens (long rows on CPUs)
-> trace_worst_rank

python -m hpc_tune.plan.quick_trace CONFIG --world 16 model.path=shape:llama3-70b
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.errors import HpcTuneError
from hpc_tune.log import configure, print_line
from hpc_tune.plan.trace import TracedStep, TraceFunction, TraceReport, make_traced_step, trace_step

_FEW_BLOCKS = (8, 12)
_FEW_STAGE_BLOCKS = (2, 4)
# A CPU's attention is traced tile by tile.
_MAX_TOKENS, _FEW_TOKENS = 1 << 14, 2048


def trace_few_blocks(step: TracedStep) -> TraceReport:
    """Trace two smaller depths and extend each figure to the depth of the model.

    Stages are taken to be equally deep.
    """
    stages = step.layout.pipeline * step.parallel.stages_per_rank
    few, more = (stages * n for n in (_FEW_STAGE_BLOCKS if stages > 1 else _FEW_BLOCKS))
    began_s, num_blocks = time.perf_counter(), step.shape.num_blocks
    with tempfile.TemporaryDirectory() as folder:
        shapes = (step.shape.with_blocks(blocks, Path(folder)) for blocks in (few, more))
        low, high = (trace_step(dataclasses.replace(step, shape=shape)) for shape in shapes)
    report = _extrapolate(low, high, ratio=(num_blocks - few) / (more - few))
    trace_s = time.perf_counter() - began_s
    return dataclasses.replace(report, num_layers=num_blocks, trace_s=trace_s)


def cached(trace: TraceFunction) -> TraceFunction:
    """Return ``trace`` for the steps of one run and layout, each size of which is traced once."""
    known: dict[tuple[int, ...], TraceReport] = {}

    def traced(step: TracedStep) -> TraceReport:
        size = step.micro_rows, step.seq_len, step.num_micro, step.rank
        if size not in known:
            known[size] = trace(step)
        return known[size]

    return traced


def trace_few_tokens(trace: TraceFunction, step: TracedStep) -> TraceReport:
    """Trace a step with tiles; long or many rows by one row of fewer tokens, and one of twice that.

    What a step keeps grows with its tokens; a tile's scores have a size of their own.
    """
    rows, length = step.micro_rows, step.seq_len
    if not step.has_tiles or rows * length <= _MAX_TOKENS:
        return trace(step)
    global_rows = step.num_micro * step.layout.data_size
    one_row = dataclasses.replace(step, micro_rows=1, global_rows=global_rows)
    few = min(length, _FEW_TOKENS)
    low = trace(dataclasses.replace(one_row, seq_len=few))
    high = trace(dataclasses.replace(one_row, seq_len=2 * few))
    report = _extrapolate(low, high, ratio=(rows * length - few) / few)
    return dataclasses.replace(report, trace_s=low.trace_s + high.trace_s)


def _extrapolate(low: TraceReport, high: TraceReport, ratio: float) -> TraceReport:
    """Return what lies ``ratio`` times as far from ``low`` as ``high`` does.

    The parts of a step are extended each by itself, since their worst moments grow or do not.
    """

    def extend(at_low: int, at_high: int) -> int:
        return round(at_low + ratio * (at_high - at_low))

    extended: dict[str, Any] = {
        name: extend(getattr(low, name), getattr(high, name))
        for name in dataclasses.asdict(low)
        if name.endswith("_bytes")
    }
    parts = {
        part: (extend(peak, high.parts[part][0]), extend(heap_peak, high.parts[part][1]))
        for part, (peak, heap_peak) in low.parts.items()
    }
    sizes = sorted({*low.shards, *high.shards})
    shards = {size: extend(low.shards.get(size, 0), high.shards.get(size, 0)) for size in sizes}
    peak_bytes, extended["heap_peak_bytes"] = map(max, zip(*parts.values(), strict=True))
    kinds = ("weight", "adapter", "gradient", "optimizer")
    extended["activation_bytes"] = peak_bytes - sum(extended[f"{kind}_bytes"] for kind in kinds)
    others = {"peak_bytes": peak_bytes, "parts": parts, "shards": shards}
    return dataclasses.replace(low, **extended | others)


def trace_worst_rank(trace: TraceFunction, step: TracedStep) -> TraceReport:
    """Trace as each rank that may need most, and return the report of the one that does.

    Stages differ along the pipeline, the outermost axis of the ranks: the first has most
    micro-batches in flight and the embedding, the last has the head; the second stands for those
    between. ``trace`` is how each is traced.
    """
    num_stages = step.layout.pipeline
    width = step.layout.size // num_stages
    stages = sorted({0, min(1, num_stages - 1), num_stages - 1})
    reports = [trace(dataclasses.replace(step, rank=stage * width)) for stage in stages]
    return max(reports, key=lambda report: report.peak_bytes)


def main() -> int:
    """Trace a configuration file and print the report as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m hpc_tune.plan.quick_trace")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument("--rank", type=int, help="default: the one that needs most")
    parser.add_argument("--quick", action="store_true", help="few blocks, extended")
    arguments = parser.parse_intermixed_args()
    configure(rank=0)
    trace = trace_few_blocks if arguments.quick else trace_step
    try:
        config = load_config(arguments.config, arguments.overrides)
        step = make_traced_step(config, arguments.world)
        if arguments.rank is None:
            report = trace_worst_rank(trace, step)
        else:
            report = trace(dataclasses.replace(step, rank=arguments.rank))
    except HpcTuneError as error:
        print_line(str(error))
        return error.exit_code
    print(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
