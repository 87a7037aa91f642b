"""Environment variables that sites set for their network fabric, compared with this node's.

HPE Slingshot works without most of them, but slower, or hangs once many ranks send large messages.
NCCL's protocol LL128 silently corrupts messages over it
(https://github.com/NVIDIA/nccl/issues/2001), so that is an error here. The values are from

    HPE      https://github.com/HewlettPackard/shs-ccl-docs/blob/main/ccl_env.sh
    CSCS     https://docs.cscs.ch/software/communication/nccl/
    OLCF     https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html
    Sigma2   https://documentation.sigma2.no/hpc_machines/olivia/nccl.html
"""

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_tune.packages import parse_release


@dataclass(frozen=True)
class ExpectedVariable:
    """A variable and the value that sites set; ``equivalent_values`` are as good."""

    name: str
    value: str
    equivalent_values: tuple[str, ...] = ()


_SLINGSHOT_VARIABLES = (
    ExpectedVariable("NCCL_NET_GDR_LEVEL", "PHB", ("3",)),
    ExpectedVariable("NCCL_CROSS_NIC", "1"),
    ExpectedVariable("FI_CXI_DEFAULT_CQ_SIZE", "131072"),
    ExpectedVariable("FI_CXI_DEFAULT_TX_SIZE", "2048", ("16384",)),
    ExpectedVariable("FI_CXI_RX_MATCH_MODE", "hybrid", ("software",)),
    ExpectedVariable("FI_MR_CACHE_MONITOR", "userfaultfd", ("kdreg2",)),
    ExpectedVariable("FI_CXI_DISABLE_HOST_REGISTER", "1"),
)
_SLINGSHOT_AMD_VARIABLES = (ExpectedVariable("FI_CXI_RDZV_PROTO", "alt_read"),)
PLUGIN_NETWORKS = ("Slingshot", "EFA")
_LL128_MIN_VERSION = (2, 27)  # from this version on, NCCL's tuning chooses LL128 over Slingshot
FABRIC_VARIABLE_NAMES = (
    *(variable.name for variable in (*_SLINGSHOT_VARIABLES, *_SLINGSHOT_AMD_VARIABLES)),
    "NCCL_PROTO",
)


def tcp_warning(
    card_kinds: Sequence[str], library: str, plugin: str, socket_names: str
) -> str | None:
    """Return a warning if NCCL sends by TCP on nodes whose cards need a plugin (pure).

    ``card_kinds``: of the node's cards; ``plugin``: the one that is loaded, known after the first
    communicator; ``socket_names``: NCCL_SOCKET_IFNAME.
    """
    kind = next((kind for kind in card_kinds if kind in PLUGIN_NETWORKS), None)
    if kind is None or plugin:
        return None
    names = socket_names.removeprefix("=").split(",")
    interfaces = ", ".join(filter(None, names)) or "any interface"
    text = (
        f"{library} sends by TCP between the nodes, over {interfaces}: "
        f"{kind} needs its network plugin (aws-ofi-nccl), and none is loaded. Load the site's "
        "module before the ranks start, and bind it into a container (doctor says more)"
    )
    if len(names) == 1 and card_kinds.count(kind) > 1:
        example = ", such as hsn0,hsn1" if kind == "Slingshot" else ""
        text += (
            f". Until then name all {card_kinds.count(kind)} interfaces in run.interface{example}"
        )
    return text


def find_deviating_variables(
    card_kind: str, library: str, settings: Mapping[str, str]
) -> list[ExpectedVariable]:
    """Return the variables that sites set and that are unset or different here (pure).

    ``card_kind``: of card, such as Slingshot; ``library``: NCCL or RCCL.
    """
    if card_kind != "Slingshot":
        return []
    return [
        var
        for var in (*_SLINGSHOT_VARIABLES, *(_SLINGSHOT_AMD_VARIABLES if library == "RCCL" else ()))
        if settings.get(var.name) not in (var.value, *var.equivalent_values)
    ]


def find_harmful_settings(
    card_kind: str, library: str, version: str, settings: Mapping[str, str]
) -> list[tuple[bool, str]]:
    """Return (whether it is certain, message) of settings that hang or corrupt messages (pure).

    ``version``: of the loaded library.
    """
    if card_kind != "Slingshot":
        return []
    problems = []
    if (
        library == "NCCL"
        and parse_release(version) >= _LL128_MIN_VERSION
        and _allows_ll128(settings)
    ):
        problems.append(
            (
                True,
                f"NCCL {version} sends by the protocol LL128 over Slingshot, and values can arrive "
                "wrong without an error (https://github.com/NVIDIA/nccl/issues/2001): export "
                "NCCL_PROTO=^LL128",
            )
        )
    if settings.get("FI_MR_CACHE_MONITOR") == "memhooks":
        problems.append(
            (
                False,
                "FI_MR_CACHE_MONITOR=memhooks misses memory that is freed, so that runs hang; "
                "export FI_MR_CACHE_MONITOR=userfaultfd, or kdreg2",
            )
        )
    return problems


def _allows_ll128(settings: Mapping[str, str]) -> bool:
    """Return whether NCCL may choose LL128: NCCL_PROTO lists protocols to use, or to avoid (^)."""
    protocols = settings.get("NCCL_PROTO", "").upper()
    is_listed = "LL128" in protocols.removeprefix("^").split(",")
    return not protocols or is_listed != protocols.startswith("^")


# -- Which NCCL, or RCCL, this process has loaded, and what carries its messages between nodes.
#
# On InfiniBand NCCL drives the cards itself. On HPE Slingshot and Amazon's EFA it needs a network
# plugin over libfabric (aws-ofi-nccl), which it looks for by name when the first communicator is
# created; without one it silently sends by TCP.


_NCCL_LIBRARY_NAME = re.compile(r"lib[nr]ccl\.so[.0-9]*")
_NCCL_PLUGIN_NAME = re.compile(r"lib[nr]ccl-net[^/]*\.so[.0-9]*")
_LIBFABRIC_NAME = re.compile(r"libfabric\.so[.0-9]*")
_LIBRARY_FOLDERS = ("lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib")
_LD_CACHE_ENTRY = re.compile(rb"/[^\0]*/(?:lib[nr]ccl-net[^/\0]*|libfabric)\.so[.0-9]*")
NETWORK_VARIABLES = (
    *("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"),
    *FABRIC_VARIABLE_NAMES,
)


@dataclass(frozen=True)
class NcclLibrary:
    """The NCCL or RCCL library of one rank.

    ``version``: of the loaded library, else ``built``, the one that torch was compiled with.
    ``libraries``: the loaded files; empty if it is linked into torch's own. ``plugin``: the loaded
    one; ``plugin_file`` and ``libfabric``: where the system would find them. ``settings``:
    variables that choose the network.
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
    built_version: str,
    is_rocm: bool,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    version_reader: Callable[[str], str] | None = None,
) -> NcclLibrary:
    """Return the NCCL or RCCL that is loaded now; it loads its plugin with its first communicator.

    ``built_version``: the version that torch was compiled with; ``root``: the root of the file
    system to read; ``version_reader``: returns a library's version, by default the one it reports.
    """
    loaded_files = list(dict.fromkeys(_mapped_files(root / "proc" / "self" / "maps")))
    libraries = tuple(p for p in loaded_files if _NCCL_LIBRARY_NAME.fullmatch(Path(p).name))
    paths = [*loaded_files, *_find_loadable_libraries(environ, root)]
    return NcclLibrary(
        name="RCCL" if is_rocm else "NCCL",
        version=((version_reader or read_nccl_version)(libraries[0]) if libraries else "")
        or built_version,
        built=built_version,
        libraries=libraries,
        plugin=_first_match(_NCCL_PLUGIN_NAME, loaded_files),
        plugin_file=_first_match(_plugin_pattern(environ.get("NCCL_NET_PLUGIN", "")), paths),
        libfabric=_first_match(_LIBFABRIC_NAME, paths),
        settings={name: environ[name] for name in NETWORK_VARIABLES if environ.get(name)},
    )


def read_nccl_version(library: str) -> str:
    """Return the version that a loaded library reports; torch reports that of its headers."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if status else format_nccl_version(number.value)


def format_nccl_version(number: int) -> str:
    """Format NCCL's version number: 22705 is 2.27.5; before 2.9, 2804 was 2.8.4 (pure)."""
    major, remainder = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{remainder // 100}.{remainder % 100}"


def _plugin_pattern(plugin: str) -> re.Pattern[str]:
    """Match the plugin file names that NCCL tries; NCCL_NET_PLUGIN is a file name or its suffix."""
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


def _find_loadable_libraries(environ: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield the plugins and libfabric files that the dynamic loader would find, in its order."""
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    yield from _list_network_libraries(folders)
    try:
        cache = (root / "etc" / "ld.so.cache").read_bytes()
    except OSError:
        cache = b""
    yield from (match.decode(errors="replace") for match in _LD_CACHE_ENTRY.findall(cache))
    yield from _list_network_libraries([root / folder for folder in _LIBRARY_FOLDERS])


def _list_network_libraries(folders: list[Path]) -> Iterator[str]:
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if _NCCL_PLUGIN_NAME.fullmatch(name) or _LIBFABRIC_NAME.fullmatch(name):
                yield str(folder / name)
