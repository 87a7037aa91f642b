"""What links and ranks were measured to do, or what the data sheets of a named cluster say.

a run's measurement, `doctor --json`, or HARDWARE[name] -> Measured, Compute
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import ConfigError
from hpc_tune.plan.messages import flops_per_token
from hpc_tune.plan.model_size import ModelSize
from hpc_tune.plan.step_time import Compute
from hpc_tune.probe.links import Collective, Links, Pair

_SYNC_S = 50e-6
_REACHED = 0.4  # of a data sheet's flops in training


@dataclass(frozen=True)
class Measured:
    """The node of each rank, the links between them, and how fast they compute, if known."""

    nodes: tuple[int, ...]
    links: Links
    compute: Compute | None = None

    def to_json(self) -> str:
        """Return it for ``plan --measured``."""
        ranks = [{"node": node} for node in self.nodes]
        compute = asdict(self.compute) if self.compute else None
        return json.dumps({"ranks": ranks, "links": asdict(self.links), "compute": compute})

    def places(self, ranks: Sequence[int]) -> list[int]:
        """Return where these ranks stand in the order of ``links``."""
        order = self.links.order
        return list(ranks) if order is None else [order.index(rank) for rank in ranks]

    @classmethod
    def read(cls, path: Path) -> "Measured":
        """Read what a run measured, or what ``doctor --json`` says.

        Raises:
            ConfigError: if it is neither.
        """
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            links = told["links"]
            pairs = [
                Pair(**{**p, "ranks": tuple(p["ranks"]), "nodes": tuple(p["nodes"])})
                for p in links["pairs"]
            ]
            collectives = [Collective(**one) for one in links["collectives"]]
            order = tuple(links["order"]) if links.get("order") else None
            found = Links(tuple(pairs), tuple(collectives), links["skipped"], links["lanes"], order)
            compute = Compute(**told["compute"]) if told.get("compute") else None
            return cls(tuple(rank["node"] for rank in told["ranks"]), found, compute)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--measured {path}: expected what `doctor --json` prints: {error!r}"
            ) from None


@dataclass(frozen=True)
class Hardware:
    """A kind of cluster by its data sheets: flops and bytes per second of a rank's device and link.

    ``lanes``: network cards of a node.
    """

    flops: float
    within_bytes_per_s: float
    across_bytes_per_s: float
    lanes: int
    within_latency_s: float = 10e-6
    across_latency_s: float = 20e-6

    def measured(self, nodes: int, per_node: int) -> Measured:
        """Return what a measurement would find there, but for compute."""
        ranks = tuple(rank // per_node for rank in range(nodes * per_node))
        pairs = []
        if per_node > 1:
            pairs.append(Pair((0, 1), (0, 0), self.within_latency_s, self.within_bytes_per_s))
        if nodes > 1:
            first = Pair((0, per_node), (0, 1), self.across_latency_s, self.across_bytes_per_s)
            pairs.append(first)
        return Measured(ranks, Links(tuple(pairs), (), 0, self.lanes))

    def compute(self, size: ModelSize, model: Any, seq_len: int, recompute: bool) -> Compute:
        """Return seconds per token of a block and of the head, at ``_REACHED`` of the flops."""
        head = (4 if size.num_frozen else 6) * model.vocab_size * model.hidden_size
        whole = flops_per_token(size, model, seq_len)
        block = (whole - head) / model.num_hidden_layers * (4 / 3 if recompute else 1)
        speed = _REACHED * self.flops
        # AdamW reads and writes some 28 bytes per value; devices of a petaflop move 3 TB/s.
        memory_s = 300 / self.flops  # per byte
        return Compute(
            block / speed, head / speed, 28 * memory_s, 3 * memory_s, _SYNC_S, overlaps=True
        )


# From the vendors' data sheets: dense bf16; one direction of NVLink or PCIe; a network card.
HARDWARE = {
    "h100-ib400": Hardware(989e12, 370e9, 48e9, 8),
    "a100-ib200": Hardware(312e12, 240e9, 24e9, 4),
    "l40s-pcie-ethernet": Hardware(362e12, 20e9, 2.9e9, 1),
    "a100-pcie-10g": Hardware(312e12, 20e9, 1.1e9, 1, across_latency_s=60e-6),
}
