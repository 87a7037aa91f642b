"""Under NCCL's rules, when a pipeline's ranks post their receives, and beside what these wait.

On a GPU a receive is a kernel that takes processors of the card until its data come. Passes here
take 4 ms and compute next to nothing; clocks of one host are compared.
"""

import itertools
import json

import pytest

from tests.ranks.test_nccl_rules import END, MODES, START
from tests.support.nccl_rules import LIMIT, MODE
from tests.support.ranks import mpirun

MICRO = 8
# For each number of stages per rank and each lookahead, prints what every rank did: of receives the
# pass, when they were posted, over and awaited; of passes when they began and ended; of messages
# when they were sent.
PROGRAM = """
import itertools, json, threading, time
from hpc_tune.batch import costliest_batch
from hpc_tune.engine import pipeline_parallel
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.pipeline_parallel import Pipeline, connect_stages
from hpc_tune.step.layout import Layout

layout, now = Layout(1, 1, 1, size), time.monotonic
irecv, isend, post = dist.irecv, dist.isend, pipeline_parallel._InputReceiver.post_receives

class Received:
    def __init__(self, work, row):
        self.work, self.row = work, row
        threading.Thread(target=self.note, daemon=True).start()
    def note(self):
        self.work.over.wait()
        self.row["over"] = now()
    def wait(self):
        self.work.wait()
        self.row["awaited"] = now()

def receiving(buffer, source, group):
    row = {"posted": now(), "over": None, "edge": [source, me, names[group]]}
    done["receives"].append(row)
    return Received(irecv(buffer, source, group), row)

def sending(wire, target, group):
    done["sends"].append({"at": now(), "edge": [me, target, names[group]]})
    return isend(wire, target, group)

def computed(row, out):
    time.sleep(0.004)
    done["passes"].append([row, now()])
    return out

def forward(chunk, batch, hidden):
    began = now()
    if hidden is None:
        hidden = torch.ones(1, 4, 8, requires_grad=True)
    is_last = me == size - 1 and chunk == chunks - 1
    out = (2 * hidden).sum().reshape(1) if is_last else 2 * hidden
    total[0] += float(out) if is_last else 0.0
    return computed(began, out)

def backward(chunk, is_last, out, grad):
    began = now()
    out.backward(grad)
    computed(began, None)

dist.irecv, dist.isend = receiving, sending
batches = [costliest_batch(1, 4) for _ in range(MICRO)]
collectives = CountedCollectives(comm.device)
for chunks, ahead in itertools.product((1, 2), (0, 2)):
    edges = connect_stages(layout, chunks > 1, comm.device)
    names = {group: f"{first} {kind}" for (first, kind), group in edges.items()}
    pipeline_parallel.LOOKAHEAD["cpu"] = ahead
    pipeline = Pipeline([None] * chunks, layout, edges, comm.device, 8, torch.float32, collectives)
    done, total = {"receives": [], "sends": [], "passes": []}, [0.0]
    comm.barrier("all")
    pipeline.train(batches, forward, backward)
    comm.barrier("all")
    time.sleep(0.05)  # the noting threads
    row = {"chunks": chunks, "ahead": ahead, "ranks": comm.gather(done), "sum": comm.sum(total)}
    if me == 0:
        print(json.dumps(row), flush=True)
"""


def beside(rank):
    """Return how many receives are under way while their rank computes, counted for each pass."""
    return sum(
        begin < min(row["over"], row["awaited"]) and row["posted"] < end
        for row in rank["receives"]
        for begin, end in rank["passes"]
    )


def unsent(ranks):
    """Return how many receives were posted before their data had been sent."""
    sent = {}
    for row in itertools.chain.from_iterable(rank["sends"] for rank in ranks):
        sent.setdefault(tuple(row["edge"]), []).append(row["at"])
    early = 0
    for rank in ranks:
        for edge, rows in itertools.groupby(
            sorted(rank["receives"], key=lambda row: row["edge"]), key=lambda row: row["edge"]
        ):
            posted = [row["posted"] for row in rows]
            assert len(posted) == len(sent[tuple(edge)]), "what is sent is received"
            early += sum(p < s for p, s in zip(posted, sent[tuple(edge)], strict=True))
    return early


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.full)])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_a_receive_is_posted_when_its_data_are_due_and_never_waits_beside_a_pass(size, mode):
    program = START + f"MICRO = {MICRO}\n" + PROGRAM + END
    done = mpirun(size, ["-c", program], timeout=240, env={MODE: mode, LIMIT: "60"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["chunks"], row["ahead"]) for row in rows] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    for row in rows:
        ranks, stages = row["ranks"], size * row["chunks"]
        assert row["sum"] == [MICRO * 32 * 2.0**stages], "what the stages compute arrives"
        receives = sum(len(rank["receives"]) for rank in ranks)
        # Forward into all stages but the first, backward into all but the last.
        assert receives == 2 * MICRO * (stages - 1)
        assert all(len(rank["passes"]) == 2 * MICRO * row["chunks"] for rank in ranks)
        counts = [beside(rank) for rank in ranks]
        print(
            f"\n{mode}, {size} ranks of {row['chunks']} stages, {row['ahead']} passes ahead: "
            f"{receives} receives, {unsent(ranks)} before their data were sent, beside passes "
            f"{counts}"
        )
        if row["ahead"] == 0:  # as on GPUs
            assert counts == [0] * size
        else:  # on CPUs, where it costs nothing
            assert sum(counts) > 0
