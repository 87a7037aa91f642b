#!/bin/sh
# ensure_slurm.sh: where root may install packages, install Slurm's daemons and programs, with which
# the tests start a cluster of their own. Elsewhere say what is missing; those tests are skipped then.
set -eu
has_slurm() {
    command -v slurmctld && command -v slurmd && command -v munged && command -v sbatch
} >/dev/null
if has_slurm; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        slurmctld slurmd slurm-client munge
fi
if ! has_slurm; then
    echo "no Slurm here, and only root of a Debian or Ubuntu can install it by this script" >&2
    exit 1
fi
