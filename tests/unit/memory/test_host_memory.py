import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from hpc_tune.memory import host
from hpc_tune.memory.host import (
    MACHINE_SOURCE,
    HostLimit,
    HostUsage,
    find_host_limit,
    memory_pressure,
    oom_kills,
    own_bytes,
    swapped_bytes,
    used_bytes,
)

GIB = 1 << 30
RAM = 512 * GIB


class Machine:
    """A fake /proc and /sys/fs/cgroup under a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.file(
            self.proc / "meminfo",
            f"MemTotal:       {RAM >> 10} kB\nMemFree:        1 kB\n"
            f"MemAvailable:   {400 * GIB >> 10} kB\nHugePages_Total:       0\n",
        )

        self.file(self.proc / "self" / "statm", "1000 300 100 1 0 200 0\n")

    @staticmethod
    def file(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))

    def member_of(self, *lines: str) -> None:
        self.file(self.proc / "self" / "cgroup", "\n".join(lines) + "\n")

    def group(self, path: str, limit: str, name: str = "memory.max", stat: str = "") -> Path:
        self.file(self.cgroups / path / name, f"{limit}\n")
        if stat:
            self.file(self.cgroups / path / "memory.stat", stat)
        return self.cgroups / path

    def find(self, configured=None, **environ) -> HostLimit:
        return find_host_limit(configured, environ, self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_any_limit_it_is_the_machines_memory(machine):
    machine.member_of("0::/")
    assert machine.find() == HostLimit(RAM, "the machine's RAM", None)


def test_without_cgroups_it_is_the_machines_memory(machine):
    assert machine.find().num_bytes == RAM


def of_gh200(machine, nodes):
    """Show NUMA nodes: (CPUs, GiB, of them free)."""
    devices = machine.proc.parent / "sys"
    for i, (cpus, total, free) in enumerate(nodes):
        node = devices / "devices" / "system" / "node" / f"node{i}"
        machine.file(node / "cpulist", f"{cpus}\n")
        text = f"Node {i} MemTotal:  {total * GIB >> 10} kB\n"
        machine.file(node / "meminfo", text + f"Node {i} MemFree:  {free * GIB >> 10} kB\n")
    return devices


@pytest.mark.parametrize(("has_driver", "ram", "used"), [(True, 416, 102), (False, 512, 112)])
def test_memory_of_gpus_that_the_kernel_counts_is_not_the_hosts(machine, has_driver, ram, used):
    """Of 512 GiB 96 are the GPU's, in which 10 are used, of 112 that are in use in all."""
    devices = of_gh200(machine, [("0-71", 416, 300), ("", 96, 86), ("", 0, 0)])
    if has_driver:
        machine.file(machine.proc / "driver" / "nvidia" / "version", "NVRM version")
    limit = find_host_limit(None, {}, machine.proc, machine.cgroups, devices)
    assert limit == HostLimit(ram * GIB, "the machine's RAM")
    assert used_bytes(limit, machine.proc, devices=devices) == used * GIB


def test_a_v2_group_limits_the_process_that_is_in_it(machine):
    machine.member_of("0::/user.slice/job")
    group = machine.group("user.slice/job", str(64 * GIB))
    assert machine.find() == HostLimit(64 * GIB, str(group / "memory.max"), group)


def test_a_group_may_have_a_name_of_any_bytes(machine):
    machine.member_of("0::/job/gr\udcf6")
    group = machine.group("job/gr\udcf6", str(8 * GIB))
    assert machine.find() == HostLimit(8 * GIB, str(group / "memory.max"), group)


def test_under_slurm_the_leaf_says_max_and_an_ancestor_has_the_limit(machine):
    path = "system.slice/slurmstepd.scope/job_17/step_0/user/task_3"
    machine.member_of(f"0::/{path}")
    for below in (path, path.rpartition("/")[0]):
        machine.group(below, "max")
    machine.group("system.slice/slurmstepd.scope/job_17", str(96 * GIB))
    machine.group("system.slice", "max")
    found = machine.find()
    assert found.num_bytes == 96 * GIB
    assert found.cgroup == machine.cgroups / "system.slice/slurmstepd.scope/job_17"


@pytest.mark.parametrize(("leaf", "job"), [(8, 32), (32, 8), (8, 8)])
def test_the_tightest_limit_on_the_way_up_holds(machine, leaf, job):
    machine.member_of("0::/job/leaf")
    machine.group("job/leaf", str(leaf * GIB))
    machine.group("job", str(job * GIB))
    found = machine.find()
    assert found.num_bytes == 8 * GIB
    assert found.cgroup == machine.cgroups / ("job/leaf" if leaf < job else "job")


def test_a_v1_group_limits_and_its_no_limit_is_none(machine):
    machine.member_of("11:cpu,cpuacct:/elsewhere", "9:memory:/slurm/uid_1/job_2/step_0", "0::/")
    name = "memory.limit_in_bytes"
    machine.group("memory/slurm/uid_1/job_2/step_0", "9223372036854771712", name)
    group = machine.group("memory/slurm/uid_1/job_2", str(48 * GIB), name)
    machine.group("memory", "9223372036854771712", name)
    machine.group("cpu,cpuacct/elsewhere", "5", name)
    assert machine.find() == HostLimit(48 * GIB, str(group / name), group)


def test_in_hybrid_mode_the_v2_tree_is_below_unified(machine):
    machine.member_of("0::/job")
    machine.group("unified/job", str(GIB))
    assert machine.find().cgroup == machine.cgroups / "unified/job"


@pytest.mark.parametrize(
    "line", ["0::/kubepods/pod1/abc", "0::/../../machine.slice/abc", "9:memory:/docker/abc"]
)
def test_in_a_container_whose_path_is_the_hosts_the_root_is_its_group(machine, line):
    machine.member_of(line)
    machine.file(machine.cgroups.parent.parent / "memory.max", "1")  # not of this tree
    machine.group("", str(16 * GIB))
    machine.group("memory", str(16 * GIB), "memory.limit_in_bytes")
    found = machine.find()
    assert found.num_bytes == 16 * GIB
    assert found.cgroup == machine.cgroups / ("memory" if "memory:" in line else "")


@pytest.mark.parametrize(
    ("environ", "num_bytes", "source"),
    [
        ({"SLURM_MEM_PER_NODE": "131072"}, 128 * GIB, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "0"}, RAM, "the machine's RAM"),
        ({"SLURM_MEM_PER_NODE": ""}, RAM, "the machine's RAM"),
        (
            {"SLURM_MEM_PER_CPU": "4096", "SLURM_CPUS_ON_NODE": "8"},
            32 * GIB,
            "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE",
        ),
        ({"SLURM_MEM_PER_CPU": "4096"}, RAM, "the machine's RAM"),
        ({"SLURM_MEM_PER_NODE": str(1 << 30)}, RAM, "the machine's RAM"),
    ],
)
def test_slurms_variables_count_where_no_cgroup_says_less(machine, environ, num_bytes, source):
    assert machine.find(**environ) == HostLimit(num_bytes, source)
    machine.member_of("0::/job")
    group = machine.group("job", str(GIB))
    assert machine.find(**environ).cgroup == group


def test_a_configured_limit_lowers_and_is_counted_in_the_jobs_group(machine):
    machine.member_of("0::/job")
    group = machine.group("job", str(64 * GIB))
    assert machine.find(10 * GIB) == HostLimit(10 * GIB, "memory.host_limit", group)


def test_a_configured_limit_cannot_raise(machine):
    machine.member_of("0::/job")
    group = machine.group("job", str(64 * GIB))
    assert machine.find(100 * GIB) == HostLimit(64 * GIB, str(group / "memory.max"), group)


def test_in_a_v2_group_page_cache_does_not_count(machine):
    stat = "anon 1100\nfile 500000\nshmem 130\ninactive_anon 1000\nactive_anon 200\n"
    group = machine.group("job", "1", stat=stat + "unevictable 30\nactive_file 400000\n")
    assert used_bytes(HostLimit(1, "", group), machine.proc) == 1230


def test_in_a_v2_group_what_the_kernel_needs_for_it_counts_but_its_caches_do_not(machine):
    stat = "inactive_anon 1000\nkernel_stack 16\npagetables 8\nsec_pagetables 0\npercpu 4\nsock 2\n"
    group = machine.group("job", "1", stat=stat + "slab_reclaimable 900\nslab_unreclaimable 70\n")
    assert used_bytes(HostLimit(1, "", group), machine.proc) == 1100


def test_in_a_v1_group_its_whole_tree_counts_without_page_cache(machine):
    stat = "cache 9\nrss 5\nactive_anon 5\ntotal_cache 500000\ntotal_rss 1100\ntotal_shmem 130\n"
    stat += "total_inactive_anon 1000\ntotal_active_anon 200\ntotal_active_file 400000\n"
    group = machine.group("job", "1", stat=stat + "total_unevictable 30\n")
    assert used_bytes(HostLimit(1, "", group), machine.proc) == 1230


def test_swap_is_the_groups_or_the_machines(machine):
    v1 = machine.group("v1", "1", stat="total_rss 1\ntotal_swap 700\n")
    v2 = machine.group("v2", "1", stat="anon 1\n")
    machine.file(v2 / "memory.swap.current", "300\n")
    machine.file(machine.proc / "meminfo", "SwapTotal:  10 kB\nSwapFree:  4 kB\n")
    assert swapped_bytes(HostLimit(1, "", v1), machine.proc) == 700
    assert swapped_bytes(HostLimit(1, "", v2), machine.proc) == 300
    assert swapped_bytes(HostLimit(1, ""), machine.proc) == 6144


def test_stalls_are_the_groups_or_the_machines(machine):
    group = machine.group("job", "1")
    limit = HostLimit(1, "", group)
    assert memory_pressure(limit, machine.proc) is None
    text = (
        "some avg10={} avg60=1.00 avg300=0.00 total=5\nfull avg10=90.00 avg60=0 avg300=0 total=1\n"
    )
    machine.file(machine.proc / "pressure" / "memory", text.format("2.50"))
    assert memory_pressure(limit, machine.proc) == 0.025
    machine.file(group / "memory.pressure", text.format("40.00"))
    assert memory_pressure(limit, machine.proc) == 0.4
    assert memory_pressure(HostLimit(1, ""), machine.proc) == 0.025


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory.events", "low 0\nmax 12\noom 3\noom_kill 2\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        (None, "nr_free_pages 7\noom_kill 2\n"),
    ],
)
def test_the_kernels_kills_are_counted_where_it_counts_them(machine, file, text):
    group = None if file is None else machine.group("job", "1")
    machine.file(machine.proc / "vmstat" if group is None else group / file, text)
    assert oom_kills(HostLimit(1, "", group), machine.proc) == 2


def test_without_a_counter_nobody_was_killed(machine):
    assert oom_kills(HostLimit(1, "", machine.group("job", "1")), machine.proc) == 0
    assert oom_kills(HostLimit(1, ""), machine.proc) == 0


def test_without_a_group_what_is_not_available_counts(machine):
    assert used_bytes(HostLimit(RAM, MACHINE_SOURCE), machine.proc) == 112 * GIB


def test_own_memory_is_anonymous_and_shared_but_no_file_pages(machine):
    machine.file(
        machine.proc / "self" / "status",
        "Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t 100 kB\nRssFile:\t 700 kB\nRssShmem:\t 8 kB\n",
    )
    assert own_bytes(machine.proc) == 108 * 1024


def test_a_limit_for_the_job_without_a_group_counts_its_ranks_alone(machine):
    for pid in (7, 8):
        status = f"RssAnon:\t {pid}00 kB\nRssFile:\t 900 kB\nRssShmem:\t 4 kB\n"
        machine.file(machine.proc / str(pid) / "status", status)
    limit = machine.find(GIB)
    assert limit == HostLimit(GIB, "memory.host_limit")
    slurm = find_host_limit(None, {"SLURM_MEM_PER_NODE": "1024"}, machine.proc, machine.cgroups)
    assert slurm == HostLimit(GIB, "SLURM_MEM_PER_NODE")
    for of_the_job in (limit, slurm):
        assert used_bytes(of_the_job, machine.proc, [7, 8]) == (700 + 800 + 2 * 4) * 1024
    assert used_bytes(machine.find(), machine.proc, [7, 8]) == 112 * GIB


def test_what_is_read_often_is_the_same(machine):
    usage = HostUsage(HostLimit(RAM, MACHINE_SOURCE), machine.proc)
    page = os.sysconf("SC_PAGESIZE")
    assert usage.used_bytes() == 112 * GIB
    assert usage.private_bytes() == (200 * page, 200 * page)
    usage.close()


def test_on_this_machine_own_memory_grows_by_what_is_touched():
    before = own_bytes()
    # Not by malloc, which may have as much from what an engine before it has freed.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE) as held:
        for place in range(0, len(held), mmap.PAGESIZE):
            held[place] = 1
        assert own_bytes() - before == pytest.approx(len(held), rel=0.3)
    assert 0 < used_bytes(find_host_limit()) < find_host_limit().num_bytes


def test_between_two_sums_of_the_kernel_the_ranks_growth_counts(tmp_path):
    group, proc, page = tmp_path / "group", tmp_path / "proc", os.sysconf("SC_PAGESIZE")
    for folder in (group, proc / "self", proc / "7"):
        folder.mkdir(parents=True)

    def kernel_says(num_bytes):
        (group / "memory.stat").write_text(f"active_anon {num_bytes}\nanon {num_bytes}\n")

    def rank_has(pages):
        for name in ("self", "7"):
            (proc / name / "statm").write_text(f"999 {pages + 5} 5 0 0 999 0\n")

    kernel_says(1000 * page)
    rank_has(600)
    with closing(HostUsage(HostLimit(1 << 40, "the test", group), proc, pids=[7])) as usage:
        assert usage.used_bytes() == 1000 * page
        rank_has(650)
        assert usage.used_bytes() == 1050 * page
        kernel_says(1060 * page)
        assert usage.used_bytes() == 1060 * page
        rank_has(500)
        assert usage.used_bytes() == 1060 * page
        (proc / "7" / "statm").unlink()
        assert usage.used_bytes() == 1060 * page


# MiB: anonymous and file pages as summed, the exact number of charged ones, the ranks' own before
# and now -> what counts. The limit is 1000.
LATE_SUMS = {
    "as summed": (300, 100, 400, 200, 200, 300),
    "ranks took 50 since": (300, 100, 450, 200, 250, 350),
    "ranks took 50, and page cache was freed": (300, 100, 350, 200, 250, 250),
    "what was freed is still in the sum": (300, 100, 220, 200, 20, 120),
    "files are read: new page cache is not in the sum": (300, 100, 900, 200, 200, 300),
    "the sum is from before the ranks' own": (5, 0, 205, 200, 200, 200),
    "full: page cache gives way to what ranks take": (300, 600, 999, 200, 250, 350),
    "full: what others take is not in the sum": (300, 600, 999, 200, 200, 300),
}


@pytest.mark.parametrize("case", LATE_SUMS)
def test_sums_that_are_late_are_corrected_by_exact_numbers(tmp_path, case):
    anonymous, files, charged, before, now, expected = LATE_SUMS[case]
    group, proc = tmp_path / "group", tmp_path / "proc"
    for folder in (group, proc / "self"):
        folder.mkdir(parents=True)

    def rank_has(mib):
        pages = (mib << 20) // os.sysconf("SC_PAGESIZE")
        (proc / "self" / "statm").write_text(f"{pages} {pages} 0 0 0 {pages} 0\n")

    (group / "memory.stat").write_text(
        f"anon {anonymous << 20}\nactive_anon {anonymous << 20}\nactive_file {files << 20}\n"
    )
    (group / "memory.max").write_text(f"{1000 << 20}\n")
    (group / "memory.current").write_text(f"{(anonymous + files) << 20}\n")
    rank_has(before)
    me = os.getpid()
    (proc / str(me)).symlink_to(proc / "self")
    with closing(HostUsage(HostLimit(1000 << 20, "the test", group), proc, [me])) as usage:
        assert usage.used_bytes() == max(anonymous, before) << 20
        rank_has(now)
        (group / "memory.current").write_text(f"{charged << 20}\n")
        assert usage.used_bytes() == expected << 20


def test_a_sum_of_groups_below_is_asked_for_by_what_the_ranks_did_not_take(tmp_path, monkeypatch):
    group, proc = tmp_path / "group", tmp_path / "proc"
    for folder in (group, proc / "self"):
        folder.mkdir(parents=True)
    (proc / str(os.getpid())).symlink_to(proc / "self")
    asked, now_s = [], 100.0
    monkeypatch.setattr(host, "_refresh_subgroup_sums", asked.append)
    monkeypatch.setattr(host.time, "monotonic", lambda: now_s)

    def now(charged_mib, ranks_mib):
        pages = (ranks_mib << 20) // os.sysconf("SC_PAGESIZE")
        (proc / "self" / "statm").write_text(f"{pages} {pages} 0 0 0 {pages} 0\n")
        (group / "memory.current").write_text(f"{charged_mib << 20}\n")

    def look(charged_mib, ranks_mib):
        now(charged_mib, ranks_mib)
        usage.used_bytes()
        return len(asked)

    (group / "memory.stat").write_text(f"active_anon {200 << 20}\n")
    (group / "memory.max").write_text(f"{1000 << 20}\n")
    limit = HostLimit(1000 << 20, "the test", group)
    now(200, 200)
    with closing(HostUsage(limit, proc, [os.getpid()])) as usage:
        assert look(200, 200) == 1, "the first sum is due"
        assert look(300, 300) == 1, "the ranks' own growth is known"
        assert look(320, 300) == 2, "others took 20 MiB"
        assert look(320, 300) == 2, "nothing has moved"
        now_s += 0.2
        assert look(999, 300) == 3, "others filled the group"
        assert [look(999, 300) for _ in range(3)] == [3, 3, 3], "full is no reason by itself"
        now_s += 0.6
        assert look(999, 300) == 4, "one is due by the clock"


def test_a_rank_with_a_group_of_its_own_does_not_count(tmp_path):
    group, proc = tmp_path / "group", tmp_path / "proc"
    for folder in (group, proc / "self", proc / "7", proc / "8"):
        folder.mkdir(parents=True)
        (folder / "statm").write_text("9 9 0 0 0 9 0\n")
    (group / "memory.stat").write_text("anon 0\nactive_anon 0\n")
    (group / "cgroup.procs").write_text("7\n")
    with closing(HostUsage(HostLimit(1 << 40, "the test", group), proc, [7, 8])) as usage:
        assert usage.used_bytes() == 9 * os.sysconf("SC_PAGESIZE")
