"""What links and ranks were measured to do, or what the data sheets of a named cluster say.

a run's measurement, `doctor --json`, or the data sheets of a cluster -> Measurements, Compute
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import ConfigError
from hpc_tune.plan.hardware import Cluster
from hpc_tune.plan.step_time import Compute
from hpc_tune.probe.links import CollectiveTime, Link, Links
from hpc_tune.step.size import ModelSize, flops_per_token

_SYNC_S = 50e-6
_REACHED_SHARE = 0.4  # of a data sheet's flops in training


@dataclass(frozen=True)
class Measurements:
    """The node of each rank, the links between them, and how fast they compute, if known."""

    nodes: tuple[int, ...]
    links: Links
    compute: Compute | None = None

    def to_json(self) -> str:
        """Return it for ``plan --measured``."""
        ranks = [{"node": node} for node in self.nodes]
        compute = asdict(self.compute) if self.compute else None
        return json.dumps({"ranks": ranks, "links": asdict(self.links), "compute": compute})

    def positions(self, ranks: Sequence[int]) -> list[int]:
        """Return the positions of these ranks in the order of ``links``."""
        order = self.links.order
        return list(ranks) if order is None else [order.index(rank) for rank in ranks]

    @classmethod
    def read(cls, path: Path) -> "Measurements":
        """Read what a run measured, or what ``doctor --json`` says.

        Raises:
            ConfigError: if it is neither.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            links = tree["links"]
            pairs = [
                Link(**{**p, "ranks": tuple(p["ranks"]), "nodes": tuple(p["nodes"])})
                for p in links["pairs"]
            ]
            links["pairs"] = tuple(pairs)
            links["collectives"] = tuple(CollectiveTime(**c) for c in links["collectives"])
            links["order"] = tuple(links["order"]) if links.get("order") else None
            compute = Compute(**tree["compute"]) if tree.get("compute") else None
            return cls(tuple(rank["node"] for rank in tree["ranks"]), Links(**links), compute)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--measured {path}: expected what `doctor --json` prints: {error!r}"
            ) from None


def measurements_from_data_sheet(cluster: Cluster, nodes: int, per_node: int) -> Measurements:
    """Return what a measurement would find there, but for compute."""
    ranks = tuple(rank // per_node for rank in range(nodes * per_node))
    pairs = []
    if per_node > 1:
        pairs.append(Link((0, 1), (0, 0), cluster.within_latency_s, cluster.within_bytes_per_s))
    if nodes > 1:
        first = Link((0, per_node), (0, 1), cluster.across_latency_s, cluster.across_bytes_per_s)
        pairs.append(first)
    return Measurements(ranks, Links(tuple(pairs), (), 0, cluster.lanes))


def compute_from_data_sheet(
    cluster: Cluster, size: ModelSize, model: Any, seq_len: int, recompute: bool
) -> Compute:
    """Return seconds per token of a block and of the head, at ``_REACHED_SHARE`` of the flops."""
    head = (6 if size.is_full else 4) * model.vocab_size * model.hidden_size
    whole = flops_per_token(size, model, seq_len)
    block = (whole - head) / size.blocks(model) * (4 / 3 if recompute else 1)
    speed = _REACHED_SHARE * cluster.flops
    # AdamW reads and writes some 28 bytes per value; devices of a petaflop move 3 TB/s.
    memory_s = 300 / cluster.flops  # per byte
    return Compute(block / speed, head / speed, 28 * memory_s, 3 * memory_s, _SYNC_S, overlaps=True)
