"""A program for one rank: trains a model with train.compile=true and prints what compiling took.

    python -m tests.support.compile_cost KEY=VALUE ...

The last line is JSON: the seconds that the steps took beyond the last step's time, how many graphs
were compiled, and how many came from the cache.
"""

import json
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from hpc_tune.config.load import load_config
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.training import rows


def main() -> None:
    config = load_config(None, [*sys.argv[1:], "train.compile=true"])
    assert run(config, StopAfter(None)) == 0
    steps_s = rows(Path(config.run.dir), "step_s")
    found = {
        "seconds": sum(steps_s.values()) - len(steps_s) * steps_s[len(steps_s)],
        "graphs": counters["stats"]["unique_graphs"],
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "reused": counters["inductor"]["fxgraph_cache_hit"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
