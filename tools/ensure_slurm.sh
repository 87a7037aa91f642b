#!/bin/sh
# Installs Slurm's daemons and programs where they are missing: root on Debian or Ubuntu only. The
# tests that start a cluster of their own are skipped without them.
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || {
    echo "Slurm is not installed, and can only be installed here by root with apt-get" >&2
    exit 1
}
apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    slurmctld slurmd slurm-client munge
