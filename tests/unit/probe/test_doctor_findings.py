"""What the doctor finds in facts and links that were planted; which pairs talk at the same time."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from hpc_tune.cluster.unused_gpus import UnusedGpus
from hpc_tune.probe.doctor import doctor_lines, make_report_dict
from hpc_tune.probe.fabric import NcclLibrary
from hpc_tune.probe.facts import FolderFacts, RankFacts, measure_folder
from hpc_tune.probe.findings import find_problems
from hpc_tune.probe.gpu_state import GpuState
from hpc_tune.probe.links import (
    CollectiveTime,
    Link,
    Links,
    describe_links,
    describe_slow_links,
    format_rate,
    list_pair_rounds,
)
from hpc_tune.probe.matmuls import MatmulResult
from hpc_tune.probe.software import CompiledOps
from hpc_tune.probe.topology import NO_NVML, NetworkCard, NodeGpu, Topology

GIB = 1 << 30
UNUSED = UnusedGpus("torch finds no GPU on n1", is_error=True)
CARD = NetworkCard("mlx5_0", "ACTIVE", "400 Gb/sec", 0, (0,))
GPUS = (NodeGpu("a", "H100", "0000:17:00.0", 0, 18), NodeGpu("b", "H100", "0000:3d:00.0", 0, 18))
NODE = Topology(GPUS, {"0-1": "NVLink"}, (CARD,), "580.1", "13.0")
GOOD = RankFacts(
    rank=0,
    node=0,
    local_rank=0,
    hostname="n0",
    launcher="openmpi",
    cpus=(0, 1),
    num_reachable=4,
    numa_nodes=(0,),
    threads=2,
    device_wanted="auto",
    device="H100",
    device_uuid="a",
    device_bytes=80 * GIB,
    device_numa=0,
    versions={"torch": "2.11.0", "peft": "0.21"},
    mpi="Open MPI v5.0.11",
    cuda="12.8",
    nccl="2.28",
    compiled=CompiledOps(("cpu_adam",), ()),
    host_limit_bytes=500 * GIB,
    host_limit_source="the machine's RAM",
    host_used_bytes=10 * GIB,
    memlock_bytes=None,
    open_files=65536,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    topology=NODE,
    folders=(FolderFacts("run.dir", "/scratch/run", 100 * GIB, 1e9),),
)


def world(*changes):
    """Return two nodes of two ranks; each change is (rank, fields)."""
    ranks = []
    for rank in range(4):
        node, local = divmod(rank, 2)
        cpus = (2 * local, 2 * local + 1)
        host = f"n{node}"
        fields = {"rank": rank, "node": node, "local_rank": local, "hostname": host, "cpus": cpus}
        ranks.append(dataclasses.replace(GOOD, **fields))
    for rank, fields in changes:
        ranks[rank] = dataclasses.replace(ranks[rank], **fields)
    return ranks


def links(*rates):
    """Return the links of four nodes of one rank, in the order 0-1, 0-2, 0-3, 1-2, 1-3, 2-3."""
    pairs = itertools.combinations(range(4), 2)
    return [Link(pair, pair, 1e-5, r) for pair, r in zip(pairs, rates, strict=True)]


def worn(gpu):
    return dataclasses.replace(gpu, nvlinks=gpu.nvlinks - 1)


PLANTED = {
    "another torch": (
        [(3, {"versions": {"torch": "2.9", "peft": "0.21"}})],
        "error",
        "torch differs: 2.11.0 on n0, n1; 2.9 on n1",
    ),
    "another peft": (
        [(3, {"versions": {"torch": "2.11.0", "peft": "1"}})],
        "warning",
        "peft differs: 0.21 on n0, n1; 1 on n1",
    ),
    "another NCCL": ([(3, {"nccl": "2.20"})], "error", "NCCL differs: 2.20 on n1; 2.28 on n0, n1"),
    "a package on one node alone": (
        [(3, {"versions": {"torch": "2.11.0", "peft": "0.21", "deepspeed": "0.19"}})],
        "warning",
        "deepspeed differs: 0.19 on n1; none on n0, n1",
    ),
    "no newer attention": (
        [(r, {"lacks_attention": "flash-attn-3"}) for r in range(4)],
        "warning",
        "n0, n1: attention is torch's own; flash-attn-3, built for this torch, takes about half",
    ),
    "nothing to compile with": (
        [(2, {"compiled": CompiledOps((), ("ninja", "nvcc"))})],
        "warning",
        "n1: deepspeed has no compiled ops, and there is no ninja and no nvcc",
    ),
    "GPUs that torch does not see": (
        [(r, {"device_bytes": 0, "device_numa": None, "unused": UNUSED}) for r in (2, 3)],
        "error",
        "torch finds no GPU on n1",
    ),
    "a torch behind another": (
        [(r, {"hidden": "torch 2.13 in /venv hides torch 2.10"}) for r in range(4)],
        "warning",
        "n0, n1: torch 2.13 in /venv hides torch 2.10",
    ),
    "the driver's library is not installed": (
        [(r, {"topology": Topology(driver_error=NO_NVML)}) for r in (0, 2)],
        "warning",
        "n0, n1: nvidia-ml-py is not installed, so the links between GPUs are unknown",
    ),
    "an NVLink is down": (
        [(0, {"topology": dataclasses.replace(NODE, gpus=(GPUS[0], worn(GPUS[1])))})],
        "warning",
        "n0: GPU 1 has only 17 of 18 NVLinks up",
    ),
    "few of many CPUs": (
        [(r, {"num_reachable": 64}) for r in (0, 1)],
        "warning",
        "the ranks of n0 have 4 CPUs of 64 together",
    ),
    "more ranks than CPUs": (
        [(r, {"num_reachable": 1, "cpus": (0,)}) for r in (0, 1)],
        "warning",
        "n0: 2 ranks share 1 CPU",
    ),
    "one core": (
        [(0, {"cpus": (5,)}), (1, {"cpus": (5,)})],
        "warning",
        "pinned all 2 ranks of n0 to 1 CPU of 4",
    ),
    "far from its GPU": ([(1, {"numa_nodes": (1,)})], "warning", "rank 1 on n0 runs on NUMA"),
    "memlock": ([(2, {"memlock_bytes": 65536})], "error", "n1: a process may lock 64.0 KiB"),
    "open files": ([(0, {"open_files": 64})], "error", "n0: a process may open 64 files, 4 ranks"),
    "full /dev/shm": ([(0, {"shm_free_bytes": 4096})], "error", "n0: /dev/shm has 4.00 KiB of 64"),
    "little memory": ([(2, {"host_limit_bytes": GIB})], "warning", "n1: 1.00 GiB of host memory"),
    "read-only": (
        [(0, {"folders": (FolderFacts("data.cache", "/ro", error="Read-only file system"),)})],
        "error",
        "data.cache /ro on n0 cannot be written: Read-only file system",
    ),
    "full disk": (
        [(0, {"folders": (FolderFacts("run.dir", "/a", 1 << 20, 1e9),)})],
        "warning",
        "run.dir /a on n0 has 1.00 MiB left",
    ),
    "slow disk": (
        [(0, {"folders": (FolderFacts("run.dir", "/a", GIB, 1e6),)})],
        "warning",
        "is slow: 1.0 MB/s",
    ),
    "a clock that is ahead": (
        [(r, {"clock_s": 1e9 + 4200 * (r > 1)}) for r in range(4)],
        "warning",
        "n1: its clock is 1h10m ahead of the other node's: the job's end is read from rank 0's",
    ),
}


def test_a_good_cluster_has_no_findings():
    assert find_problems(world(), Links(tuple(links(*[4e10] * 6)), ())) == []


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found_and_nothing_else(name):
    changes, level, words = PLANTED[name]
    [found] = find_problems(world(*changes), Links((), ()))
    assert found.level == level
    assert words in found.text


def test_of_three_clocks_the_one_that_differs_is_told():
    ranks = [
        dataclasses.replace(GOOD, rank=r, node=r, hostname=f"n{r}", clock_s=1e9 + apart_s)
        for r, apart_s in enumerate((0.0, -90.0, 0.5))
    ]
    [found] = find_problems(ranks, Links((), ()))
    assert found.text.startswith("n1: its clock is 1m30s behind the others': ")


def network(library=None, cards=(CARD,), ethernet=None):
    """Return two nodes of two ranks with these cards and this library."""
    topology = dataclasses.replace(NODE, cards=cards, ethernet=ethernet or {})
    library = library or NcclLibrary("NCCL", "2.28.9", "2.28.9")
    return [
        dataclasses.replace(rank, topology=topology, library=None if rank.local_rank else library)
        for rank in world()
    ]


HDR = dataclasses.replace(CARD, rate="200 Gb/sec")
SLINGSHOT = NetworkCard("cxi0", "", "200 Gb/sec", 0, (), "Slingshot")
EFA = NetworkCard("rdmap0s6", "ACTIVE", "100 Gb/sec", 0, (), "EFA")
DOWN = dataclasses.replace(CARD, name="mlx5_9", state="DOWN")
PLAIN = NcclLibrary("NCCL", "2.28.9", "2.28.9")
RCCL = NcclLibrary("RCCL", "2.27.7", "2.27.7")
LOADED = dataclasses.replace(PLAIN, plugin="/site/libnccl-net.so")


def with_settings(library, **settings):
    return dataclasses.replace(library, settings=settings)


# As HPE's ccl_env.sh has it, and CSCS.
OF_SITES = {
    "NCCL_PROTO": "^LL128",
    "NCCL_NET_GDR_LEVEL": "PHB",
    "NCCL_CROSS_NIC": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_RDZV_PROTO": "alt_read",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
}
AS_SITES = with_settings(LOADED, **OF_SITES)

# The library, the cards, what was measured across nodes in GB/s, and what is found.
FELL_BACK = {
    "InfiniBand by TCP": (
        PLAIN,
        (HDR, DOWN),
        1.2,
        "across nodes 1.2 GB/s, where InfiniBand mlx5_0 is 200 Gb/s (25.0 GB/s): NCCL has probably "
        "fallen back to TCP. NCCL_DEBUG=INFO",
    ),
    "InfiniBand switched off": (
        with_settings(PLAIN, NCCL_IB_DISABLE="1"),
        (HDR,),
        1.2,
        "(25.0 GB/s): NCCL_IB_DISABLE=1 sends by TCP: unset it",
    ),
    "sockets by choice": (
        with_settings(PLAIN, NCCL_NET="Socket"),
        (HDR,),
        1.2,
        "(25.0 GB/s): NCCL_NET=Socket sends by TCP: unset it",
    ),
    "Slingshot without a plugin": (
        RCCL,
        (SLINGSHOT,) * 4,
        2.5,
        "across nodes 2.5 GB/s, where Slingshot cxi0 is 200 Gb/s (25.0 GB/s): RCCL has no network "
        "plugin on n0, n1 and sends by TCP over Slingshot. Load the site's module of aws-ofi-rccl, "
        "so that librccl-net.so is in LD_LIBRARY_PATH",
    ),
    "Slingshot without a plugin, and nothing measured": (
        PLAIN,
        (SLINGSHOT,),
        None,
        "NCCL has no network plugin on n0, n1 and sends by TCP over Slingshot. Load the site's "
        "module of aws-ofi-nccl, so that libnccl-net.so",
    ),
    "EFA with a plugin that was not taken": (
        dataclasses.replace(
            PLAIN, plugin_file="/opt/libnccl-net.so", libfabric="/opt/libfabric.so"
        ),
        (EFA,),
        1.0,
        "by TCP over EFA. It did not load /opt/libnccl-net.so: NCCL_DEBUG=INFO says why",
    ),
    "a plugin without libfabric": (
        dataclasses.replace(PLAIN, plugin_file="/opt/libnccl-net.so"),
        (SLINGSHOT,),
        2.0,
        "It did not load /opt/libnccl-net.so, which needs libfabric.so, and that is not found",
    ),
    "a plugin that is switched off": (
        with_settings(PLAIN, NCCL_NET_PLUGIN="none", NCCL_IB_DISABLE="1"),
        (SLINGSHOT,),
        2.0,
        "over Slingshot. NCCL_NET_PLUGIN=none switches it off: unset it",
    ),
    "a plugin, and slow all the same": (
        with_settings(LOADED, NCCL_IB_DISABLE="1"),
        (HDR,),
        8.0,
        "across nodes 8.0 GB/s, where InfiniBand mlx5_0 is 200 Gb/s",
    ),
    "Ethernet alone": (
        with_settings(PLAIN, NCCL_SOCKET_IFNAME="=eth0"),
        (),
        1.0,
        "across nodes 1.0 GB/s, where Ethernet eth0 is 100 Gb/s (12.5 GB/s): one TCP connection",
    ),
}


@pytest.mark.parametrize("name", FELL_BACK)
def test_a_network_that_is_slower_than_it_was_sold_is_found_with_the_reason(name):
    library, cards, speed, words = FELL_BACK[name]
    measured = links(*[speed * 1e9] * 6) if speed else ()
    ranks = network(library, cards, {"eth0": 100_000})
    [found] = find_problems(ranks, Links(tuple(measured), ()))
    assert found.level == "warning"
    assert words in found.text


@pytest.mark.parametrize(
    ("library", "cards", "speed"),
    [
        (PLAIN, (HDR,), 9.0),
        (AS_SITES, (SLINGSHOT,), 18.0),
        (AS_SITES, (SLINGSHOT,), None),
        (PLAIN, (DOWN,), 1.0),
        (PLAIN, (), 0.1),
        (with_settings(PLAIN, NCCL_SOCKET_IFNAME="=eth0"), (), 6.0),
    ],
)
def test_a_network_that_does_what_it_was_sold_for_has_no_findings(library, cards, speed):
    measured = links(*[speed * 1e9] * 6) if speed else ()
    ranks = network(library, cards, {"eth0": 100_000})
    assert find_problems(ranks, Links(tuple(measured), ())) == []


def on_slingshot(library, **settings):
    """Return (level, text) of what is found where these, unset if empty, differ from sites'."""
    given = {name: value for name, value in {**OF_SITES, **settings}.items() if value}
    found = with_settings(library, **given)
    ranks = network(found, (SLINGSHOT,))
    assert find_problems(ranks[:2], Links((), ())) == [], "one node needs none of it"
    return [(finding.level, finding.text) for finding in find_problems(ranks, Links((), ()))]


@pytest.mark.parametrize("protocols", ["", "LL128", "ll,ll128", "^LL"])
def test_a_protocol_whose_values_arrive_wrong_over_slingshot_is_an_error(protocols):
    [(level, text)] = on_slingshot(LOADED, NCCL_PROTO=protocols)
    assert level == "error"
    assert text.startswith("n0, n1: NCCL 2.28.9 sends by the protocol LL128 over Slingshot")
    older = dataclasses.replace(LOADED, version="2.26.2", built="2.26.2")
    assert on_slingshot(older, NCCL_PROTO=protocols) == []


@pytest.mark.parametrize("protocols", ["^LL128", "^LL,LL128", "Simple", "LL,Simple"])
def test_without_that_protocol_nothing_is_found(protocols):
    assert on_slingshot(LOADED, NCCL_PROTO=protocols) == []


def test_variables_that_are_not_as_sites_set_them_are_one_line_to_copy():
    [(level, text)] = on_slingshot(LOADED, FI_CXI_DEFAULT_CQ_SIZE="", NCCL_CROSS_NIC="0")
    assert level == "warning"
    assert text == (
        "n0, n1: Slingshot sites set variables that are different here (NCCL_CROSS_NIC=0): export "
        "NCCL_CROSS_NIC=1 FI_CXI_DEFAULT_CQ_SIZE=131072"
    )
    rccl = dataclasses.replace(RCCL, plugin="/site/librccl-net.so")
    assert on_slingshot(rccl, FI_CXI_DISABLE_HOST_REGISTER="1", NCCL_PROTO="") == []
    [(_, text)] = on_slingshot(rccl, FI_CXI_RDZV_PROTO="")
    assert text.endswith("export FI_CXI_RDZV_PROTO=alt_read")


@pytest.mark.parametrize(("name", "value"), [("FI_MR_CACHE_MONITOR", "memhooks")])
def test_variables_that_make_runs_hang_are_named(name, value):
    texts = [text for _, text in on_slingshot(LOADED, **{name: value})]
    assert any(text.startswith(f"n0, n1: {name}={value}") for text in texts)


def test_cpus_and_one_node_need_no_plugin():
    ranks = network(PLAIN, (SLINGSHOT,))
    assert find_problems(ranks[:2], Links((), ())) == []
    cpu_ranks = [dataclasses.replace(rank, nccl="", library=None) for rank in ranks]
    assert find_problems(cpu_ranks, Links(tuple(links(*[1e8] * 6)), ())) == []


def test_an_older_nccl_than_torch_was_built_for_is_found_and_where_it_is_from():
    old = dataclasses.replace(PLAIN, version="2.18.3", libraries=("/site/libnccl.so.2",))
    [found] = find_problems(network(old), Links((), ()))
    assert "n0, n1: torch is built for NCCL 2.28.9, and 2.18.3 is loaded from /site/l" in found.text
    newer = dataclasses.replace(old, version="2.30.1")
    assert find_problems(network(newer), Links((), ())) == []
    both = dataclasses.replace(newer, libraries=("/pip/libnccl.so.2", "/site/libnccl.so.2"))
    [found] = find_problems(network(both), Links((), ()))
    assert "NCCL is loaded twice (/pip/libnccl.so.2, /site/libnccl.so.2)" in found.text


def test_a_driver_that_refuses_is_found_where_its_gpus_are_used():
    refused = dataclasses.replace(NODE, driver_error="Insufficient Permissions")
    ranks = world(*((r, {"topology": refused}) for r in (0, 2)))
    [found] = find_problems(ranks, Links((), ()))
    assert found.level == "warning"
    assert "n0, n1: the driver's management library refuses (Insufficient Perm" in found.text
    cpu_ranks = [
        dataclasses.replace(r, device_bytes=0, device_numa=None, device_wanted="cpu", nccl="")
        for r in ranks
    ]
    assert find_problems(cpu_ranks, Links((), ())) == []


def test_a_rank_that_has_cores_at_its_gpu_and_elsewhere_is_no_finding():
    assert find_problems(world((1, {"numa_nodes": (0, 1)})), Links((), ())) == []


def test_a_card_that_is_worse_than_on_other_nodes_is_named():
    down = dataclasses.replace(CARD, state="DOWN", rate="10 Gb/sec")
    ranks = [
        dataclasses.replace(GOOD, rank=n, node=n, hostname=f"n{n}", num_reachable=2)
        for n in range(3)
    ]
    assert find_problems(ranks, Links((), ())) == []
    ranks[1] = dataclasses.replace(ranks[1], topology=dataclasses.replace(NODE, cards=(down,)))
    [found] = find_problems(ranks, Links((), ()))
    assert "n1: network card mlx5_0 is DOWN at 10 Gb/sec, on 2 other nodes ACTIVE" in found.text


def test_a_slow_pair_is_named_and_a_slow_node_is_named_once():
    assert describe_slow_links(links(11e9, 11e9, 11e9, 11e9, 11e9, 0.4e9)) == [
        "ranks 2-3 (across nodes): 400.0 MB/s, others up to 11.0 GB/s"
    ]
    assert describe_slow_links(links(11e9, 11e9, 0.4e9, 11e9, 0.5e9, 0.4e9)) == [
        "all links of node 3: 400.0 MB/s, others up to 11.0 GB/s"
    ]
    # Two such nodes, of which each has a link to the other.
    assert describe_slow_links(links(0.4e9, 0.4e9, 0.4e9, 0.5e9, 0.5e9, 11e9)) == [
        "all links of node 0: 400.0 MB/s, others up to 11.0 GB/s",
        "all links of node 1: 400.0 MB/s, others up to 11.0 GB/s",
    ]
    assert describe_slow_links(links(*[1e9] * 6)) == []
    assert describe_slow_links([]) == []


def test_pairs_within_a_node_are_not_compared_with_those_across():
    within = [Link((0, 1), (0, 0), 1e-6, 200e9), Link((2, 3), (1, 1), 1e-6, 200e9)]
    assert describe_slow_links([*within, Link((0, 2), (0, 1), 1e-5, 10e9)]) == []


@pytest.mark.parametrize(
    "nodes", [[0], [0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 2], [0, 0, 0, 1, 1, 2, 3], [0] * 8]
)
def test_each_pair_of_a_node_and_each_pair_of_nodes_talks_once(nodes):
    seen = [pair for round_ in list_pair_rounds(nodes) for pair in round_]
    within = {pair for pair in itertools.combinations(range(len(nodes)), 2) if same(nodes, pair)}
    assert {pair for pair in seen if same(nodes, pair)} == within
    across = [tuple(sorted((nodes[a], nodes[b]))) for a, b in seen if nodes[a] != nodes[b]]
    assert sorted(across) == list(itertools.combinations(sorted(set(nodes)), 2))
    for round_ in list_pair_rounds(nodes):
        busy = [node for a, b in round_ for node in {nodes[a], nodes[b]}]
        assert len(busy) == len(set(busy)), "a node's links are shared"


def same(nodes, pair):
    return nodes[pair[0]] == nodes[pair[1]]


PRODUCTS = MatmulResult("H100", "bf16", 8192, 700e12, 1.57e-3, 1.7e-3, num_checked=40)
HOT = GpuState(1005.0, 91.0, 420.0, 700.0, ("its temperature", "its power limit"))
ON_CPU = {"device": "cpu", "device_uuid": "", "device_bytes": 0, "device_numa": None, "nccl": ""}
ON_CPU |= {"device_wanted": "cpu"}


def multiplied(*changes, on_cpu=False):
    """Two nodes of two ranks that multiply alike, but for changes of (rank, fields)."""
    found = [PRODUCTS] * 4
    for rank, fields in changes:
        found[rank] = dataclasses.replace(PRODUCTS, **fields)
    place = {"device_place": "0000:17:00.0"}
    of = [{"products": one} | (ON_CPU if on_cpu else place) for one in found]
    return world(*enumerate(of))


def findings(ranks):
    return [(found.level, found.text) for found in find_problems(ranks, Links((), ()))]


def test_a_gpu_that_is_slower_than_its_model_is_named_with_what_holds_it_back():
    slow = {"flops_per_s": 420e12, "loaded": HOT, "idle": GpuState(345.0, 40.0)}
    assert findings(multiplied((3, slow))) == [
        (
            "warning",
            "n1: GPU 0 of rank 3 (H100, 0000:17:00.0, a) multiplies matrices at 420 TFLOP/s in "
            "bf16, 40% below the median of all 4 of its model, 700 TFLOP/s (SM clock 345 -> 1005 "
            "MHz, 40 -> 91 C, 420 of 700 W, held back by its temperature and its power limit): all "
            "ranks wait for the slowest. Leave n1 out of the job (in Slurm --exclude) and report "
            "it to the site",
        )
    ]


@pytest.mark.parametrize(("flops_per_s", "is_slow"), [(631e12, False), (629e12, True)])
def test_ten_percent_below_the_median_is_slow(flops_per_s, is_slow):
    assert bool(findings(multiplied((1, {"flops_per_s": flops_per_s})))) == is_slow


def test_of_two_gpus_the_slower_is_told():
    ranks = multiplied((1, {"flops_per_s": 500e12}))[:2]
    [(_, text)] = findings(ranks)
    assert text.startswith("n0: GPU 0 of rank 1 (")


def test_another_model_or_dtype_is_not_compared():
    others = [(2, {"model": "A100", "flops_per_s": 250e12}), (3, {"dtype": "fp16"})]
    assert findings(multiplied(*others)) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_wrong": 2}, "2 of 40 matmuls of small integers had a wrong value"),
        ({"num_differing": 1}, "the same matmul gave other bits 1 of 40 times"),
        (
            {"num_wrong": 40, "num_differing": 40},
            "40 of 40 matmuls of small integers had a wrong value, the same matmul gave other "
            "bits 40 of 40 times",
        ),
    ],
)
def test_a_gpu_that_computes_wrongly_is_an_error(fields, words):
    [(level, text)] = findings(multiplied((2, fields)))
    assert level == "error"
    assert text == (
        f"n1: GPU 0 of rank 2 (H100, 0000:17:00.0, a) computes wrongly: {words}. Leave n1 out of "
        "the job (in Slurm --exclude) and report it to the site"
    )


def test_a_gpu_that_cannot_multiply_is_an_error_and_not_slow():
    failed = {"flops_per_s": 0.0, "error": "CUDA out of memory."}
    [(level, text)] = findings(multiplied((1, failed)))
    assert (level, text.partition(") ")[2]) == (
        "error",
        "cannot multiply matrices: CUDA out of memory.",
    )


def test_a_slice_of_a_gpu_is_named_by_its_uuid():
    ranks = multiplied((1, {"num_wrong": 1}))
    ranks[1] = dataclasses.replace(ranks[1], device_uuid="MIG-7")
    [(_, text)] = findings(ranks)
    assert text.startswith("n0: the GPU of rank 1 (H100, 0000:17:00.0, MIG-7) computes wrongly")


def test_cpus_are_slow_below_half_of_the_median():
    assert findings(multiplied((3, {"flops_per_s": 351e12}), on_cpu=True)) == []
    [(level, text)] = findings(multiplied((3, {"flops_per_s": 349e12}), on_cpu=True))
    assert level == "warning"
    assert text.startswith("n1: rank 3 on CPUs 2, 3 multiplies matrices at 349 TFLOP/s in bf16")


def test_ranks_that_share_cores_are_not_compared():
    ranks = multiplied((3, {"flops_per_s": 1e12}), on_cpu=True)
    ranks[2:] = [dataclasses.replace(rank, taken=(0,)) for rank in ranks[2:]]
    assert findings(ranks) == []


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            dataclasses.replace(PRODUCTS, loaded=HOT, idle=GpuState()),
            "700 TFLOP/s in bf16, the slowest matmul 1.08 x the median time; SM clock 1005 MHz, "
            "91 C, 420 of 700 W, held back by its temperature and its power limit",
        ),
        (
            dataclasses.replace(
                PRODUCTS, flops_per_s=38.24e9, dtype="fp32", num_wrong=1, loaded=GpuState(watts=9.0)
            ),
            "38.2 GFLOP/s in fp32, the slowest matmul 1.08 x the median time, WRONG results; 9 W",
        ),
        (MatmulResult(error="no kernel image"), "cannot multiply matrices: no kernel image"),
    ],
)
def test_the_report_tells_how_fast_a_rank_multiplies(found, line):
    ranks = world((1, {"products": found}))
    lines = doctor_lines(ranks, Links((), ()), [], uses_colors=False)
    [place] = [number for number, text in enumerate(lines) if text.startswith("  rank 1 ")]
    assert lines[place + 1].strip() == line
    assert (
        make_report_dict(ranks, Links((), ()), [])["ranks"][1]["products"]["error"] == found.error
    )


def test_a_folder_that_is_not_there_yet_is_tried_where_it_will_be(tmp_path):
    found = measure_folder("run.dir", tmp_path / "a" / "b")
    assert not found.error
    assert found.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_folder("run.dir", Path("/proc/1")).error


def test_links_of_a_node_are_told_by_how_its_gpus_meet():
    ranks = world((1, {"device_uuid": "b"}), (3, {"device_uuid": "of a part of a GPU"}))
    pairs = (Link((0, 1), (0, 0), 1e-6, 2e11), Link((2, 3), (1, 1), 1e-6, 1e11))
    pairs += (Link((0, 2), (0, 1), 1e-5, 1e10),)
    lines = [line for line in doctor_lines(ranks, Links(pairs, ()), [], False) if "links" in line]
    assert lines == [
        "links     same node (NVLink), 1 pair: 200.0 GB/s, 1 us",
        "links     same node, 1 pair: 100.0 GB/s, 1 us",
        "links     across nodes, 1 pair: 10.0 GB/s, 10 us",
    ]


def test_the_report_has_each_rank_and_each_finding():
    library = NcclLibrary(
        "NCCL", "2.28.9", "2.28.3", ("/pip/libnccl.so.2",), "/site/libnccl-net.so"
    )
    ranks = world((0, {"shm_free_bytes": 4096, "library": library}), (1, {"taken": (2,)}))
    small, large = (CollectiveTime("all-reduce", n, 0.001, 2e9) for n in (64, 4 << 20))
    all_links = Links(tuple(links(*[1e10] * 6)), (small, large), skipped=2)
    found = find_problems(ranks, all_links)
    text = "\n".join(doctor_lines(ranks, all_links, found, uses_colors=False))
    for words in (
        "launcher  openmpi and Open MPI v5.0.11: both say 4 ranks",
        "torch is built for CUDA 12.8, the driver is 580.1 and has 13.0; NCCL 2.28",
        "nccl      2.28.9 loaded, /pip/libnccl.so.2; torch is built for 2.28.3; network plugin "
        "/site/libnccl-net.so",
        "rank 1    H100 80.0 GiB a (NUMA 0); CPUs 2 of 2-3 (NUMA 0), 2 threads",
        "deepspeed cpu_adam compiled",
        "rank 3    H100 80.0 GiB a (NUMA 0); CPUs 2-3 (NUMA 0), 2 threads",
        "n1: 2 ranks",
        "GPUs      NVLink: all pairs",
        "mlx5_0: ACTIVE, 400 Gb/sec, NUMA 0, behind a switch with GPU 0",
        "6 pairs: 10.0 GB/s",
        "all-reduce of 64 B: 1.00 ms\n",
        "all-reduce of 4.00 MiB: 1.00 ms, bus 2.0 GB/s",
        "ERROR  n0: /dev/shm",
        "2 pairs not",
    ):
        assert words in text, text
    assert "\033" not in text
    assert "\033[31mERROR" in "\n".join(doctor_lines(ranks, all_links, found, uses_colors=True))
    assert "no problems found" not in text
    assert "no problems found" in doctor_lines(ranks, all_links, [], uses_colors=False)[-1]
    assert make_report_dict(ranks, all_links, found)["findings"][0]["level"] == "error"


@pytest.mark.parametrize(
    ("value", "text"), [(2.5e9, "2.5 GB/s"), (3e6, "3.0 MB/s"), (10, "0.0 kB/s")]
)
def test_rates_are_written_as_people_do(value, text):
    assert format_rate(value) == text


def test_links_are_told_in_words_with_the_median_of_each_kind():
    pairs = [Link((0, n), (0, 0), 1e-6, n * 1e11) for n in (1, 2, 3)]
    pairs.append(Link((0, 4), (0, 1), 1e-5, 1e10))
    found = (
        CollectiveTime("all_reduce", 8, 1.0, 8.0),
        CollectiveTime("all_reduce", 1 << 26, 1.0, 9e9),
    )
    words = "same node 200.0 GB/s, 1 us; across nodes 10.0 GB/s, 10 us; all_reduce 9.0 GB/s"
    assert describe_links(Links(tuple(pairs), found)) == words
