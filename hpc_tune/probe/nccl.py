"""Which NCCL, or RCCL, this process has loaded, and what carries its messages between nodes.

On InfiniBand NCCL speaks to the cards itself. On HPE Slingshot and Amazon's EFA it needs a network
plugin over libfabric (aws-ofi-nccl), which it looks for by name when the first communicator is
made; without one it says nothing and sends by TCP.
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpc_tune.probe import fabric

_LIBRARY = re.compile(r"lib[nr]ccl\.so[.0-9]*")
_PLUGIN = re.compile(r"lib[nr]ccl-net[^/]*\.so[.0-9]*")
_LIBFABRIC = re.compile(r"libfabric\.so[.0-9]*")
_FOLDERS = ("lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib")
_CACHE_ENTRY = re.compile(rb"/[^\0]*/(?:lib[nr]ccl-net[^/\0]*|libfabric)\.so[.0-9]*")
NETWORK_VARIABLES = (
    *("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"),
    *fabric.VARIABLE_NAMES,
)


@dataclass(frozen=True)
class NcclLibrary:
    """The library of one rank.

    ``version`` is of what is loaded, ``built`` what torch was compiled with. ``libraries`` are the
    files loaded; none where it is a part of torch's own. ``plugin`` is loaded, ``plugin_file`` and
    ``libfabric`` are where the system would find them. ``settings``: variables that choose the
    network.
    """

    name: str
    version: str
    built: str
    libraries: tuple[str, ...] = ()
    plugin: str = ""
    plugin_file: str = ""
    libfabric: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)


def read_nccl(
    built: str,
    is_rocm: bool,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    ask: Callable[[str], str] | None = None,
) -> NcclLibrary:
    """Return what is loaded now; the plugin is, once a communicator has been made.

    ``root`` is that of the files that are looked at; ``ask`` returns the version of a library.
    """
    loaded = list(dict.fromkeys(_mapped_files(root / "proc" / "self" / "maps")))
    libraries = tuple(path for path in loaded if _LIBRARY.fullmatch(Path(path).name))
    found = [*loaded, *_findable_libraries(environ, root)]
    return NcclLibrary(
        name="RCCL" if is_rocm else "NCCL",
        version=((ask or read_version)(libraries[0]) if libraries else "") or built,
        built=built,
        libraries=libraries,
        plugin=_first_match(_PLUGIN, loaded),
        plugin_file=_first_match(_plugin_pattern(environ.get("NCCL_NET_PLUGIN", "")), found),
        libfabric=_first_match(_LIBFABRIC, found),
        settings={name: environ[name] for name in NETWORK_VARIABLES if environ.get(name)},
    )


def read_version(library: str) -> str:
    """Return the version that a loaded library itself tells; torch knows that of its headers."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed else format_version(number.value)


def format_version(number: int) -> str:
    """Return NCCL's number as a version: 22705 is 2.27.5; before 2.9, 2804 was 2.8.4 (pure)."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _plugin_pattern(plugin: str) -> re.Pattern[str]:
    """Return the names of the plugin that NCCL looks for: NCCL_NET_PLUGIN is a file, or its end."""
    if plugin in ("", "none"):
        return re.compile(r"lib[nr]ccl-net\.so[.0-9]*")
    names = [re.escape(Path(name).name) for name in plugin.split(",")]
    return re.compile("|".join(rf"{name}|lib[nr]ccl-net-{name}\.so[.0-9]*" for name in names))


def _first_match(pattern: re.Pattern[str], paths: list[str]) -> str:
    return next((path for path in paths if pattern.fullmatch(Path(path).name)), "")


def _mapped_files(maps: Path) -> Iterator[str]:
    try:
        text = maps.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield fields[5].removesuffix(" (deleted)")


def _findable_libraries(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield the plugins and libfabrics that the system's loader would find, in its order."""
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    yield from _libraries_in(folders)
    try:
        cache = (root / "etc" / "ld.so.cache").read_bytes()
    except OSError:
        cache = b""
    yield from (match.decode(errors="replace") for match in _CACHE_ENTRY.findall(cache))
    yield from _libraries_in([root / folder for folder in _FOLDERS])


def _libraries_in(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if _PLUGIN.fullmatch(name) or _LIBFABRIC.fullmatch(name):
                yield str(folder / name)
