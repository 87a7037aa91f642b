"""What all tests share."""

import os

# Two tests at a time, and whatever else this machine does: a second thread in each would wait for
# its core by spinning. Ranks decide about theirs by themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
