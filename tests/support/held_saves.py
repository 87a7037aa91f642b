"""Trains as ``python -m hpc_tune`` does, with saves that take long.

    python -m tests.support.held_saves SECONDS [key=value ...]

The thread of a save waits for SECONDS before each piece that it writes.
"""

import sys
import time

from hpc_tune.config.load import load_config
from hpc_tune.faults import Faults
from hpc_tune.train.run import run

if __name__ == "__main__":
    piece_s = float(sys.argv[1])
    faults = Faults(write=lambda number, copies: time.sleep(piece_s))
    sys.exit(run(load_config(None, sys.argv[2:]), faults=faults))
