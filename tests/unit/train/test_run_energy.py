"""What the nodes of a run take together, over its starts."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.probe.gpu_state import EnergyCounter, PartEnergy
from hpc_tune.rundir.facts import read_energy, sum_energy
from hpc_tune.train import energy as train_energy
from hpc_tune.train import run as train_run
from hpc_tune.train.energy import RunEnergyMeter, sum_node_energy
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events

WHY = "/sys/class/powercap: the kernel shows no RAPL counter there"
DENIED = "intel-rapl:0/energy_uj: Permission denied"
KWH = 3.6e6


def node(**parts):
    """A node's parts: (joules, counted, total, why)."""
    return {name: PartEnergy(*part) for name, part in parts.items()}


def told(*nodes, are_exclusive=True, tokens=2_000_000):
    energy = sum_energy(
        [{"kind": "energy", "step": 7, "tokens": tokens, **sum_node_energy(nodes, are_exclusive)}]
    )
    assert energy is not None
    return energy.full_text


def test_parts_of_nodes_are_added_up():
    gpus, cpus = (KWH, 4, 4), (0.2 * KWH, 2, 2)
    assert told(node(GPUs=gpus, CPUs=cpus), node(GPUs=gpus, CPUs=cpus)) == (
        "2.40 kWh (GPUs 2.00 kWh, CPUs 400 Wh): 1.20 kWh per million tokens"
    )


def test_what_is_missing_is_named_and_not_estimated():
    gpus, cpus = (KWH, 4, 4), (0.2 * KWH, 2, 2)
    denied = (0.1 * KWH, 1, 2, DENIED)
    text = told(
        node(GPUs=gpus, CPUs=cpus),
        node(GPUs=gpus, CPUs=denied),
        node(GPUs=gpus, CPUs=denied),
        node(GPUs=(KWH / 2, 2, 4, "GPU 0000:17:00.0: its counter stood still"), CPUs=cpus),
    )
    assert text == (
        "3.90 kWh (GPUs 3.50 kWh, CPUs 400 Wh): 1.95 kWh per million tokens; "
        "not known: 2 of 16 GPUs (GPU 0000:17:00.0: its counter stood still); "
        f"not known: CPUs of 2 of 4 nodes ({DENIED})"
    )


def test_a_node_with_its_own_counter_is_that_and_lacks_nothing():
    text = told(node(GPUs=(KWH, 4, 4), CPUs=(0, 0, 2, DENIED), node=(2 * KWH, 1, 1)))
    assert text == ("2.00 kWh (whole nodes 2.00 kWh, GPUs 1.00 kWh): 1.00 kWh per million tokens")


def test_a_node_whose_own_counter_fails_is_its_parts():
    text = told(node(CPUs=(KWH, 1, 1), node=(0, 0, 1, "its counter went backwards")))
    assert text == (
        "1.00 kWh (CPUs 1.00 kWh): 500 Wh per million tokens; "
        "not known: the whole node (its counter went backwards)"
    )


def test_nothing_is_known_where_no_counter_tells():
    assert told(node(CPUs=(0.0, 0, 1, WHY))) == f"not known: CPUs ({WHY})"


@pytest.mark.parametrize(
    ("parts", "are_exclusive", "is_said"),
    [
        ({"CPUs": (KWH, 1, 1)}, False, True),
        ({"CPUs": (KWH, 1, 1)}, True, False),
        ({"GPUs": (KWH, 1, 1), "CPUs": (0, 0, 1, WHY)}, False, False),
        ({"node": (KWH, 1, 1)}, False, True),
    ],
)
def test_other_jobs_on_the_nodes_are_said_where_they_may_be_counted(parts, are_exclusive, is_said):
    text = told(node(**parts), are_exclusive=are_exclusive)
    assert ("other jobs on these nodes, if any, included" in text) == is_said


def test_starts_add_up_and_those_that_told_nothing_are_counted():
    of_a_start = {"kind": "energy", "joules": {"GPUs": KWH}, "total_j": KWH, "tokens": 1_000_000}
    start = {"kind": "start"}
    energy = sum_energy([start, of_a_start, start, {"kind": "stop"}, start, of_a_start])
    assert energy.full_text == (
        "2 starts: 2.00 kWh (GPUs 2.00 kWh): 1.00 kWh per million tokens; "
        "not known for 1 of 3 starts, which were killed, failed, or are not over"
    )
    assert sum_energy([start, {"kind": "stop"}]) is None
    assert sum_energy([start, of_a_start, start]).num_unknown_starts == 1


def test_events_of_any_content_are_read(tmp_path):
    lines = ["[1]", "{", '{"kind": "energy", "joules": [], "missing": 3, "total_j": "x"}']
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert read_energy(tmp_path).full_text == "not known"
    assert read_energy(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("rank", "expected"), [(0, ["a", "b"]), (1, None), (2, ["c"]), (3, None)])
def test_the_first_rank_of_a_node_reads_its_gpus_each_once(monkeypatch, rank, expected):
    ranks = [(0, "a"), (0, "b"), (1, "c"), (1, "c")]  # the last two have slices of one
    comm = SimpleNamespace(
        device=torch.device("cuda"),
        world=SimpleNamespace(rank=rank, node=ranks[rank][0]),
        gather=lambda own: ranks,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(train_energy, "pci_address", lambda gpu: ranks[rank][1])
    assert train_energy._gpu_addresses_of_node(comm) == expected


def test_a_run_tells_what_it_took_in_its_log_events_report_and_card(tmp_path, monkeypatch, capfd):
    """Each reading is 1.8 kJ further on: two starts, each of a reading before and one after."""
    used = iter(range(0, 10**6, 1800))
    counters = [EnergyCounter("CPUs", "a package", lambda: float(next(used)))]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(
        train_run, "RunEnergyMeter", partial(RunEnergyMeter, find_counters=lambda g: counters)
    )
    words = [*SMALL, f"data.path={_rows(tmp_path)}", f"run.dir={tmp_path / 'run'}"]
    words += [f"data.cache={tmp_path / 'data'}", "train.max_steps=4", "run.report=true"]
    config = load_config(None, words)
    assert train_run.run(config, StopAfter(2)) == 75
    assert train_run.run(config, StopAfter(None)) == 0
    found = events(tmp_path / "run", "energy")
    assert [(event["total_j"], event["step"]) for event in found] == [(1800, 2), (1800, 4)]
    energy = read_energy(tmp_path / "run")
    assert energy.tokens == sum(event["tokens"] for event in found) > 0
    assert energy.full_text.startswith("2 starts: 1.00 Wh (CPUs 1.00 Wh): ")
    assert f"energy  {energy.full_text}\n" in capfd.readouterr().err
    card = (tmp_path / "run" / "export" / "adapter" / "README.md").read_text()
    assert f"| energy of training | {energy.full_text}; up to step 4 |" in card
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count(energy.short_text) >= 2
    starts = events(tmp_path / "run", "start")
    assert [(start["job"], start["scheduler"]) for start in starts] == [("7", "Slurm")] * 2
    assert "Slurm was not asked, since" in page, "the job is not over"


def _rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = ({"prompt": f"what {n}", "completion": f"is {n} " * (n % 5 + 1)} for n in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
