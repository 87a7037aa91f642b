"""A training run whose memory is sampled often enough for a comparison with its plan.

mpirun -np N python -m tests.support.planned_run [key=value ...]
"""

import sys

from hpc_tune.config.load import load_config
from hpc_tune.memory import governor
from hpc_tune.train.run import run

governor.PERIOD_S = 0.01

if __name__ == "__main__":
    sys.exit(run(load_config(None, sys.argv[1:])))
