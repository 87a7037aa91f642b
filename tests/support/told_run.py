"""Trains as ``python -m hpc_tune`` does; each rank says besides which world it found, as JSON."""

import dataclasses
import json
import sys

from hpc_tune.config.load import load_config
from hpc_tune.train import run

_bootstrap = run.bootstrap


def _telling(*arguments):
    session = _bootstrap(*arguments)
    sys.stdout.write(json.dumps(dataclasses.asdict(session.world)) + "\n")
    return session


if __name__ == "__main__":
    run.bootstrap = _telling
    sys.exit(run.run(load_config(None, sys.argv[1:])))
