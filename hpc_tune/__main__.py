"""``python -m hpc_tune``."""

import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "hpc_tune: this is Python %d.%d at %s; expected 3.10 or newer: load the site's module, or "
        "name another python\n" % (sys.version_info[:2] + (sys.executable,))
    )
    sys.exit(2)

from hpc_tune.cli import main

sys.exit(main())
