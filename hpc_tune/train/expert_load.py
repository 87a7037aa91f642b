"""experts.jsonl: how many tokens each expert of a mixture had; and which experts starve."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_tune.log import log
from hpc_tune.model.balance import Router, RouterSums
from hpc_tune.rundir.json_lines import EXPERTS, Events, JsonLines, drop_after

# An expert starves with less than this share of its layer's mean, where chance would give it more.
_STARVING_SHARE, _MIN_MEAN = 0.01, 100
_MAX_SHOWN = 8


class ExpertLoad:
    """Adds steps up until it is time to write them: at an evaluation, and at the end."""

    def __init__(
        self, run_dir: Path, start_step: int, routers: Sequence[Router], events: Events
    ) -> None:
        """Write into ``run_dir``, from ``start_step`` on. For rank 0 alone.

        Raises:
            OSError: if the file cannot be made.
        """
        self._layers, self._events = [router.layer for router in routers], events
        self._counts = [[0] * router.num_experts for router in routers]
        self._since = self._step = start_step
        self._last_warned: Mapping[int, list[int]] = {}
        path = run_dir / EXPERTS if routers else None
        if path is not None:
            drop_after(path, start_step)
        self._lines = JsonLines(path)

    def add(self, step: int, routers: RouterSums) -> None:
        """Add the tokens of a step."""
        self._step = step
        for row, more in zip(self._counts, routers.counts, strict=True):
            row[:] = [count + int(new) for count, new in zip(row, more, strict=True)]

    def write(self) -> None:
        """Write a line with what was added since the line before, and warn of what starves."""
        if self._step == self._since:
            return
        what = {"since": self._since, "layers": self._layers, "tokens": self._counts}
        self._lines.write(step=self._step, **what)
        starved = find_starving(self._layers, self._counts)
        if starved and starved != self._last_warned:
            message = describe_starving(starved, self._since, self._step)
            log.warning("%s", message)
            self._events.write("warning", self._step, message=message)
        self._last_warned, self._since = starved, self._step
        self._counts = [[0] * len(row) for row in self._counts]

    def close(self) -> None:
        """Write what is left, and close the file."""
        self.write()
        self._lines.close()


def find_starving(layers: Sequence[int], counts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the experts with next to no tokens, by the number of their layer."""
    found = {}
    for layer, row in zip(layers, counts, strict=True):
        mean = sum(row) / len(row)
        few = [expert for expert, count in enumerate(row) if count < _STARVING_SHARE * mean]
        if few and mean >= _MIN_MEAN:
            found[layer] = few
    return found


def describe_starving(starved: Mapping[int, Sequence[int]], since: int, step: int) -> str:
    """Return the warning of experts that starve, a few of them by name."""
    each = [
        f"layer {layer}: {_list_some([str(expert) for expert in few])}"
        for layer, few in starved.items()
    ]
    return (
        f"experts starve, with less than a hundredth of an even share of the tokens in steps "
        f"{since + 1} to {step}: {_list_some(each, '; ')}. tune.router_aux_loss spreads tokens"
    )


def _list_some(words: Sequence[str], between: str = ", ") -> str:
    more = len(words) - _MAX_SHOWN
    return between.join(words[:_MAX_SHOWN]) + (f"{between}{more} more" if more > 0 else "")
