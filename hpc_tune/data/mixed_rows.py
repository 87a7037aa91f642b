"""The rows of a mixture: each of one source, in the order that its phase says (mixture.py)."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpc_tune.config.data import Form
from hpc_tune.data.mixture import MixturePhase
from hpc_tune.data.packed_rows import PackedRows, ReadRow
from hpc_tune.errors import ConfigError


class MixedRows:
    """A stream of rows of several sources; ``phases``: those that a run has had, and its present.

    Rows before the present phase are over, and are never read again.
    """

    def __init__(self, sources: Mapping[str, PackedRows], phases: list[MixturePhase]) -> None:
        """``sources``: by name, as in the present phase, of one form and seq_len."""
        self.phase, self.phases = phases[-1], phases
        assert list(sources) == list(self.phase.parts), f"{[*sources]}, {[*self.phase.parts]}"
        self.packed, self.names = list(sources.values()), list(sources)
        self._before = [part.rows_before for part in self.phase.parts.values()]
        self._interleaving = self.phase.interleaving()
        self._num_rows = self.phase.num_rows
        self.form: Form = self.packed[0].form
        self.seq_len = self.packed[0].seq_len
        self.has_weights = any(rows.has_weights for rows in self.packed)

    @property
    def num_rows(self) -> int:
        """Rows of an epoch: see ``MixturePhase``."""
        return self._num_rows

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that packing leaves empty."""
        counts = self._interleaving.counts(self._num_rows)
        empty = sum(n * rows.padding for n, rows in zip(counts, self.packed, strict=True))
        return empty / self._num_rows

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""
        return self.phase.epoch_at(stream_row)

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream with which some epochs are over."""
        return self.phase.row_at(epochs)

    def place_of(self, stream_row: int) -> tuple[int, int]:
        """Return a row's source, by its number, and which row of its own stream it is."""
        place = stream_row - self.phase.first_row
        assert place >= 0, f"row {stream_row} is of an earlier phase"
        source, before = self._interleaving.at(place)
        return source, self._before[source] + before

    def read(self, stream_row: int) -> ReadRow:
        """Return a row's documents."""
        source, row = self.place_of(stream_row)
        return self.packed[source].read(row)

    def state(self) -> dict[str, Any]:
        """Return what a position in the stream is of."""
        return {"phases": [asdict(phase) for phase in self.phases]}

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Check that a position is one of this stream, or of one that this is to go on with.

        Raises:
            ConfigError: if it is of another. See ``determine_phases``, which decides.
        """
        saved, own = state.get("phases"), self.state()["phases"]
        if not saved or saved != own[: len(saved)]:
            raise ConfigError(
                "data.sources are not what this run was trained on. Give the old sources, or "
                "another run.dir"
            )
