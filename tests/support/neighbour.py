"""Another process under the same memory limit.

    python -m tests.support.neighbour METRICS BYTES [FILE]

When METRICS has three lines it takes BYTES at 100 MB/s: of its own memory, which it holds until it
is ended, or as FILE, which should be on a tmpfs; then it leaves.
"""

import sys
import time
from pathlib import Path

PIECE = 5_000_000
PERIOD_S = 0.05


def main() -> None:
    metrics, num_bytes = Path(sys.argv[1]), int(sys.argv[2])
    file = open(sys.argv[3], "wb") if len(sys.argv) > 3 else None  # noqa: SIM115
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.05)
    held = []
    for _ in range(num_bytes // PIECE):
        if file is None:
            held.append(bytearray(b"x" * PIECE))
        else:
            file.write(b"x" * PIECE)
            file.flush()
        time.sleep(PERIOD_S)
    if file is None:
        time.sleep(3600)


if __name__ == "__main__":
    main()
