"""Print constraints that make pip install the oldest versions that setup.py allows.

    python tools/lowest.py >constraints.txt

The tests' tools keep their versions in constraints.txt.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LOWER_BOUND = re.compile(r'"([\w.-]+)>=([\d.]+)')


def main() -> int:
    """Print them; return the exit code."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    needed = setup.partition("install_requires")[2].partition("extras_require")[0]
    lowest = dict(_LOWER_BOUND.findall(needed))
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, pinned, version = line.partition("==")
        # pip chooses these, since the oldest versions of the others may refuse the pinned ones.
        if pinned and name in (*lowest, "datasets", "huggingface_hub", "tokenizers", "torchao"):
            continue
        print(line)
    print("\n".join(f"{name}=={version}" for name, version in lowest.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
