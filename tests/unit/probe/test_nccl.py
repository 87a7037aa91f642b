"""Which NCCL and which plugin are there, from trees of files, and from a library compiled here."""

import shutil
import subprocess
import sys

import pytest

from hpc_tune.probe.fabric import format_nccl_version, read_nccl, read_nccl_version
from tests.support.ranks import ROOT

MAPS = """\
55d0-55d1 r--p 00000000 08:01 12  /usr/bin/python3.11
7f00-7f01 r-xp 00000000 08:01 13                         {folder}/libnccl.so.2
7f01-7f02 r--p 00001000 08:01 13                         {folder}/libnccl.so.2
7f03-7f04 rw-p 00000000 00:00 0
7f05-7f06 rw-p 00000000 00:00 0                          [heap]
"""


@pytest.fixture
def root(tmp_path):
    """A root of files with nothing but a process that has loaded an NCCL."""
    maps = tmp_path / "proc" / "self" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(MAPS.format(folder="/venv/nvidia/nccl/lib"))
    return tmp_path


def touch(*files):
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def load(root, *paths):
    with (root / "proc" / "self" / "maps").open("a") as maps:
        maps.writelines(f"7f10-7f11 r-xp 00000000 08:01 14  {path}\n" for path in paths)


def test_the_library_that_is_loaded_tells_its_version(root):
    asked = []
    found = read_nccl("2.27.5", False, {}, root, lambda path: asked.append(path) or "2.18.3")
    assert (found.name, found.version, found.built) == ("NCCL", "2.18.3", "2.27.5")
    assert found.libraries == ("/venv/nvidia/nccl/lib/libnccl.so.2",)
    assert asked == list(found.libraries)
    assert (found.plugin, found.plugin_file, found.libfabric) == ("", "", "")


def test_without_a_library_of_its_own_torch_is_believed(root):
    (root / "proc" / "self" / "maps").unlink()
    found = read_nccl("2.27.7", True, {}, root)
    assert (found.name, found.version, found.libraries) == ("RCCL", "2.27.7", ())


def test_two_libraries_and_a_plugin_that_are_loaded_are_all_told(root):
    load(root, "/site/lib/libnccl.so.2.18.3", "/site/my plugins/libnccl-net-ofi.so.0.0.0 (deleted)")
    load(root, "/site/libfabric.so.1.27.0", "/site/libnccl-tuner.so")
    found = read_nccl("2.27.5", False, {}, root, lambda path: "")
    assert found.libraries == ("/venv/nvidia/nccl/lib/libnccl.so.2", "/site/lib/libnccl.so.2.18.3")
    assert found.plugin == "/site/my plugins/libnccl-net-ofi.so.0.0.0"
    assert found.libfabric == "/site/libfabric.so.1.27.0"


@pytest.mark.parametrize(
    ("setting", "file"),
    [
        (None, "libnccl-net.so"),
        ("none", "libnccl-net.so"),
        ("ofi", "libnccl-net-ofi.so"),
        ("libnccl-net-ofi.so", "libnccl-net-ofi.so"),
        ("/elsewhere/libnccl-net-ofi.so", "libnccl-net-ofi.so"),
        ("spcx,ofi", "libnccl-net-ofi.so"),
        ("other", ""),
    ],
)
def test_a_plugin_is_looked_for_by_the_names_that_nccl_tries(root, setting, file):
    folder = root / "site"
    touch(folder / "libnccl-net.so", folder / "libnccl-net-ofi.so", folder / "libnccl-netcdf.so")
    environ = {"LD_LIBRARY_PATH": f"{root}/nothing:{folder}:"}
    environ |= {"NCCL_NET_PLUGIN": setting} if setting else {}
    found = read_nccl("2.27.5", False, environ, root, lambda path: "")
    assert found.plugin_file == (str(folder / file) if file else "")
    assert found.settings == ({"NCCL_NET_PLUGIN": setting} if setting else {})


def test_the_loader_s_cache_and_folders_come_after_the_variable(root):
    touch(root / "usr" / "lib64" / "librccl-net.so", root / "usr" / "lib64" / "libfabric.so.1")
    found = read_nccl("", True, {}, root, lambda path: "")
    assert found.plugin_file == str(root / "usr" / "lib64" / "librccl-net.so")
    cache = (
        b"glibc-ld.so.cache1.1\0libc.so.6\0/lib/libc.so.6\0libfabric.so.1\0/opt/libfabric.so.1\0"
    )
    touch(root / "etc" / "ld.so.cache")
    (root / "etc" / "ld.so.cache").write_bytes(cache + b"/opt/librccl-net.so\0")
    found = read_nccl("", True, {}, root, lambda path: "")
    assert (found.plugin_file, found.libfabric) == ("/opt/librccl-net.so", "/opt/libfabric.so.1")


@pytest.mark.parametrize(
    ("number", "version"),
    [(22705, "2.27.5"), (23004, "2.30.4"), (2804, "2.8.4"), (21803, "2.18.3")],
)
def test_the_number_of_a_version_in_words(number, version):
    assert format_nccl_version(number) == version


LOADED = """
import ctypes, sys
from hpc_tune.probe.fabric import read_nccl

ctypes.CDLL(sys.argv[1])
found = read_nccl("2.27.5", False, {})
print(*found.libraries, found.version, sep="\\n")
"""


def test_a_real_library_is_asked_and_one_without_the_function_is_not(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a compiler")
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *number) { *number = 22803; return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    assert read_nccl_version(str(library)) == "2.28.3"
    assert read_nccl_version(str(tmp_path / "none.so")) == ""
    # In a process of its own: a torch for GPUs has loaded its own NCCL into this one.
    words = [sys.executable, "-c", LOADED, str(library)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines() == [str(library), "2.28.3"], done.stderr
