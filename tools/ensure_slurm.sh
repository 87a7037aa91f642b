#!/bin/sh
# ensure_slurm.sh: install Slurm's daemons and programs if root can install packages; tests start
# a cluster of their own with them. Otherwise say what is missing; those tests are then skipped.
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
    echo "no Slurm found; this script can install it only as root on Debian or Ubuntu" >&2
    exit 1
fi
