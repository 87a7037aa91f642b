"""The sources of a run's data, by name: data.path alone, or those of a mixture.

settings -> Wanted, each with the section as it is for it alone -> prepared, opened -> Opened
Opened, the checkpoint's phases -> Parts -> Phase (data/mixture.py) -> the rows of the run
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hpc_tune.config.data import DataConfig, is_prepared
from hpc_tune.config.schema import TrainConfig
from hpc_tune.config.sources import HeldOutSource, TrainedSource
from hpc_tune.data.files import Paths, shown
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import warn_of_cuts
from hpc_tune.data.mixed_rows import MixedRows
from hpc_tune.data.mixture import Part as MixturePart
from hpc_tune.data.mixture import Phase, phases_from_json, reached, rows_before
from hpc_tune.data.packed_rows import PackedRows, Rows
from hpc_tune.data.reading import Part
from hpc_tune.data.sampler import SampleOrder, seed_of
from hpc_tune.data.subset import learned_tokens
from hpc_tune.errors import CheckpointError, ConfigError, DataError
from hpc_tune.log import log
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class Wanted:
    """A source as the settings name it: ``data`` as it is for it alone, ``part`` of it.

    ``name`` is empty where there are no names. ``setting``: what the user calls it.
    """

    name: str
    setting: str
    data: DataConfig
    part: Part = "all"
    limit: int | None = None

    @property
    def path(self) -> Paths:
        """Where it is."""
        assert self.data.path is not None, "checked by config/constraints.py"
        return self.data.path


@dataclass(frozen=True)
class Opened:
    """A source that is prepared and open. ``limit``: how many of its documents, None for all."""

    name: str
    setting: str
    store: TokenStore
    limit: int | None = None


def wanted_for_training(data: DataConfig) -> list[Wanted]:
    """Return what is learned."""
    part: Part = "train" if data.eval_fraction else "all"
    if data.sources is None:
        return [Wanted("", "data.path", data, part)]
    return [_wanted("data.sources", data, source, part) for source in data.sources]


def wanted_for_evaluation(data: DataConfig) -> list[Wanted]:
    """Return what is held out."""
    if data.eval_fraction:
        wanted = wanted_for_training(data)
        return [replace(source, part="held-out", limit=None) for source in wanted]
    if data.eval_path:
        alone = data.model_copy(update={"path": data.eval_path})
        return [Wanted("", "data.eval_path", alone)]
    of_name = {source.called: source for source in data.sources or []}
    return [
        _wanted(
            "data.eval_sources",
            data.of_source(of_name[source.called]) if source.called in of_name else data,
            source,
        )
        for source in data.eval_sources or []
    ]


def _wanted(setting: str, data: DataConfig, source: HeldOutSource, part: Part = "all") -> Wanted:
    alone = data.of_source(source)
    return Wanted(source.called, f"{setting}: {source.called}", alone, part, source.limit)


@contextmanager
def naming(source: Wanted | Opened) -> Iterator[None]:
    """Say of which source of several an error is."""
    try:
        yield
    except DataError as error:
        if not source.name:
            raise
        raise DataError(f"{source.setting}: {error}") from None


def with_limit(wanted: Wanted, store: TokenStore, tells: bool = True) -> Opened:
    """Return a source with the documents that it is limited to; say it where it has fewer."""
    limit, num = wanted.limit, store.num_documents
    if limit is not None and limit > num and tells:
        log.warning("%s: limit=%d, and it has %d documents", wanted.setting, limit, num)
    whole = limit is None or limit >= num
    return Opened(wanted.name, wanted.setting, store, None if whole else limit)


def rows_of(
    data: DataConfig, sources: Sequence[Opened], order: SampleOrder, saved: Any, comm: Comm
) -> Rows:
    """Return the rows that are learned; ``saved``: a checkpoint's position in them. Collective.

    Raises:
        ConfigError: if the checkpoint's run had other sources. DataError: if one has nothing to
        learn.
    """
    for source in sources if comm.is_rank_0 else ():
        warn_of_cuts(source.store, order.seq_len)
    if data.sources is None:
        return PackedRows(sources[0].store, order)
    packed = {}
    for source in sources:
        own = replace(order, seed=seed_of(order.seed, source.name))
        with naming(source):
            packed[source.name] = PackedRows(source.store, own, source.limit)
    settings = data.sources

    def count() -> list[Phase]:
        return phases_of(saved, _parts(settings, sources, packed), data.new_mixture)

    phases = comm.on_rank_0("counting learned tokens", count)
    return MixedRows({name: packed[name] for name in phases[-1].parts}, phases)


def _parts(
    settings: Sequence[TrainedSource], sources: Sequence[Opened], packed: Mapping[str, PackedRows]
) -> dict[str, MixturePart]:
    """Return what a phase says of each source, before anything of it is consumed."""
    parts = {}
    for setting, source in zip(settings, sources, strict=True):
        rows, store = packed[source.name], source.store
        with naming(source):
            if not (learned := learned_tokens(store, rows.seq_len, source.limit)):
                raise DataError(
                    f"{store.path}: none of its tokens within data.seq_len={rows.seq_len} is "
                    "learned; raise data.seq_len, or prepare data with shorter prompts"
                )
        parts[source.name] = MixturePart(
            store.attributes.content,
            source.limit,
            rows.num_rows,
            learned,
            setting.weight,
            setting.epochs,
        )
    return dict(sorted(parts.items()))


def phases_of(
    saved: Mapping[str, Any] | None, parts: dict[str, MixturePart], new_mixture: bool
) -> list[Phase]:
    """Return the phases of a run: its present one is that of ``parts``.

    ``saved``: a checkpoint's position, None for a fresh run. ``new_mixture``: it may have had other
    weights before, or fewer or more sources.

    Raises:
        ConfigError: if it had others and may not, or other data. CheckpointError: if it says none.
    """
    if saved is None:
        return [Phase(parts)]
    if "phases" not in saved:
        raise ConfigError(
            "the checkpoint is of a run on data.path, and data.sources are set: give its data.path,"
            " or another run.dir with checkpoint.resume=none and tune.init_from"
        )
    try:
        phases, row = phases_from_json(saved["phases"]), int(saved["rows"])
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint's mixture cannot be used: {reason}") from None
    last, known = phases[-1], _last_parts(phases)
    for name in sorted(parts.keys() & known.keys()):
        if what := _other_data(known[name], parts[name]):
            raise ConfigError(
                f"data.sources: {name} {what}. Give the old data, or another run.dir; or another "
                "name, with data.new_mixture=true, to go on with it as a source of its own"
            )
    changes = _changes(phases, parts)
    if not changes:
        return phases
    is_of_weights = all(p.weight is not None for p in (*last.parts.values(), *parts.values()))
    if not is_of_weights or not new_mixture:
        remedy = "or another run.dir"
        if is_of_weights:
            remedy = "or set data.new_mixture=true to go on with the new ones from here, " + remedy
        raise ConfigError(
            f"data.sources: the mixture is another than that of the checkpoint "
            f"({'; '.join(changes)}). Give the old values, {remedy}"
        )
    before = rows_before(phases, row)
    after = {name: replace(p, rows_before=before.get(name, 0)) for name, p in parts.items()}
    return [*phases, Phase(after, row, last.epoch_at(row))]


def changes_since(saved: Mapping[str, Any], phases: Sequence[Phase]) -> str:
    """Return in words what is another than at a checkpoint's position, or nothing."""
    before = phases_from_json(saved["phases"])
    return "; ".join(_changes(before, phases[-1].parts)) if len(before) < len(phases) else ""


def _other_data(saved: MixturePart, now: MixturePart) -> str:
    if saved.content != now.content:
        return "is not the data this run was trained on, or it was prepared in another way"
    if saved.limit != now.limit:
        before, after = (p.limit or "no limit" for p in (saved, now))
        return f"has limit={after}, and {before} in the checkpoint"
    return ""


def _last_parts(phases: Sequence[Phase]) -> dict[str, MixturePart]:
    """Return each source that a run has had, as it was in the last phase that had it."""
    return {name: part for phase in phases for name, part in phase.parts.items()}


def _changes(phases: Sequence[Phase], parts: Mapping[str, MixturePart]) -> list[str]:
    """Return in which ways a mixture is another than that of the last phase."""
    last, known = phases[-1], _last_parts(phases)
    changes = [f"{name} left out" for name in last.parts if name not in parts]
    for name, part in parts.items():
        if (before := last.parts.get(name)) is None:
            changes.append(f"{name} {'back' if name in known else 'new'}, with {part.asked}")
        elif (before.weight, before.epochs) != (part.weight, part.epochs):
            changes.append(f"{name} {before.asked}, now {part.asked}")
    return changes


def planned_sources(data: DataConfig, train: TrainConfig, global_size: int) -> Iterator[str]:
    """Yield what a run will have of each source, where all are prepared; else when that is known.

    Raises:
        DataError: if one cannot be opened. ConfigError: if it would be repeated too often.
    """
    if data.sources is None:
        return
    wanted = wanted_for_training(data)
    if raw := [source.name for source in wanted if not is_prepared(source.path)]:
        yield (
            f"sources {len(wanted)}, of which {', '.join(raw)} not prepared yet: their rows, "
            "learned tokens and passes are said by the run, before its first step"
        )
        return
    order, sources, packed = SampleOrder(data.seq_len, data.packing, train.seed), [], {}
    for source in wanted:
        with naming(source):
            opened = with_limit(source, TokenStore.open(shown(source.path)))
            packed[source.name] = PackedRows(opened.store, order, opened.limit)
            sources.append(opened)
    phases = [Phase(_parts(data.sources, sources, packed))]
    total_rows = phases[0].row_at(train.epochs or 1)
    if train.max_steps is not None:
        total_rows = train.max_steps * global_size
    for line in reached(phases, total_rows):
        yield f"source  {line}"
    yield from check_passes(data.sources, phases, total_rows)


def check_passes(
    sources: Sequence[TrainedSource], phases: Sequence[Phase], total_rows: int
) -> Iterator[str]:
    """Yield a warning for each source that a run of ``total_rows`` repeats.

    Raises:
        ConfigError: if that is more often than its max_epochs.
    """
    passes = {source.name: source.passes for source in reached(phases, total_rows)}
    too_many = [
        f"{source.called} {passes[source.called]:.2f} times (max_epochs={source.max_epochs:g})"
        for source in sources
        if passes[source.called] > source.max_epochs
    ]
    if too_many:
        raise ConfigError(
            f"data.sources: the run would pass over {', '.join(too_many)}. Lower its weight or "
            "epochs, make the run shorter (train.max_steps, train.epochs), add documents, or raise "
            "its max_epochs if it is to be learned that often"
        )
    if repeated := {name: times for name, times in passes.items() if times > 1}:
        each = ", ".join(f"{name} {times:.2f} times" for name, times in repeated.items())
        yield f"data.sources: the run passes over {each}; what is repeated is learned by heart"
