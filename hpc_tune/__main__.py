"""``python -m hpc_tune``."""

import sys

from hpc_tune.cli import main

sys.exit(main())
