"""Trains as ``python -m hpc_tune`` does; each rank also prints the world it found, as JSON."""

import dataclasses
import json
import sys
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.faults import Faults
from hpc_tune.train.run import run
from hpc_tune.world.bootstrap import bootstrap
from hpc_tune.world.comm import Comm


def join(*arguments: Any) -> Comm:
    comm = bootstrap(*arguments)
    sys.stdout.write(json.dumps(dataclasses.asdict(comm.world)) + "\n")
    return comm


if __name__ == "__main__":
    sys.exit(run(load_config(None, sys.argv[1:]), faults=Faults(join=join)))
