"""Another process under the same memory limit.

    python -m tests.support.noisy_neighbor METRICS BYTES [KIND FILE]

Once METRICS has three lines, it takes BYTES at 100 MB/s: as its own memory, which it holds until it
is killed, or with KIND tmpfs as FILE, which must be on a tmpfs; then it exits. With KIND cached it
first writes as much to FILE on a disk, so that page cache fills the limit.
"""

import os
import sys
import time
from pathlib import Path

PIECE = 5_000_000
PERIOD_S = 0.05


def main() -> None:
    metrics, num_bytes = Path(sys.argv[1]), int(sys.argv[2])
    kind, file = sys.argv[3:5] if len(sys.argv) > 3 else ("memory", os.devnull)
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.05)
    held = []
    with open(file, "wb") as out:
        if kind == "cached":
            for _ in range(num_bytes // PIECE):
                out.write(b"x" * PIECE)
            os.fsync(out.fileno())
        for _ in range(num_bytes // PIECE):
            if kind == "tmpfs":
                out.write(b"x" * PIECE)
                out.flush()
            else:
                held.append(bytearray(b"x" * PIECE))
            time.sleep(PERIOD_S)
        if kind != "tmpfs":
            time.sleep(3600)


if __name__ == "__main__":
    main()
