"""``python -m hpc_tune``."""

import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "hpc_tune: this is Python %d.%d at %s; expected 3.10 or newer: load the site's module, or "
        "name another python\n" % (sys.version_info[:2] + (sys.executable,))
    )
    sys.exit(2)

try:
    from hpc_tune.cli import main

    code = main()
except ModuleNotFoundError as error:
    if (error.name or "hpc_tune").partition(".")[0] == "hpc_tune":
        raise
    sys.stderr.write(
        "hpc_tune: the Python at %s has no module %s; expected one in which hpc_tune is installed: "
        "activate that environment (source .venv/bin/activate), or install into this one as "
        "docs/laptop.md says\n" % (sys.executable, error.name)
    )
    code = 2
sys.exit(code)
