#!/bin/sh
# ensure_launchers.sh VENV FOLDER: put the MPIs of clusters into FOLDER, for tests that start ranks
# with each of them: MPICH from PyPI, Open MPI 4.1 and MPICH from Debian. They are unpacked there,
# not installed, so that everything else keeps its mpirun.
set -eu
venv=$1
folder=$2
mpich=$folder/mpich
debian=$folder/debian
packages='openmpi-bin openmpi-common libopenmpi3 mpich libmpich12'
mkdir -p "$folder"
if [ ! -x "$mpich/bin/mpirun" ]; then
    "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --ignore-installed \
        --prefix "$mpich" mpich
fi
if [ ! -x "$debian/usr/bin/mpirun.openmpi" ] && command -v apt-get >/dev/null 2>&1; then
    rm -rf "$folder/archives" "$folder/new"
    mkdir -p "$folder/archives/partial" "$folder/new"
    [ "$(id -u)" != 0 ] || apt-get update -q
    # With dependencies that are not installed; a folder of our own needs no lock.
    apt-get install -y -q --download-only --reinstall --no-install-recommends \
        -o Debug::NoLocking=true -o Dir::Cache::archives="$(cd "$folder" && pwd)/archives" $packages
    for package in "$folder"/archives/*.deb; do
        dpkg-deb --extract "$package" "$folder/new"
    done
    # mpi4py looks for MPICH under the name that it has everywhere else.
    for library in "$folder"/new/usr/lib/*/libmpich.so.12; do
        ln -s libmpich.so.12 "${library%/*}/libmpi.so.12"
    done
    rm -rf "$debian" "$folder/archives"
    mv "$folder/new" "$debian"
fi
for launcher in "$mpich/bin/mpirun" "$debian/usr/bin/mpirun.openmpi" "$debian/usr/bin/mpirun.mpich"; do
    [ -x "$launcher" ] || echo "no ${launcher#"$folder"/}: tests that need it are skipped" >&2
done
