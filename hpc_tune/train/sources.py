"""The sources of a run's data, by name: data.path alone, or the sources of a mixture.

settings -> SourceConfig, each with its own data section -> prepared, opened -> OpenSource
OpenSource, the checkpoint's phases -> MixtureSource -> MixturePhase (data/order.py) -> rows
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hpc_tune.config.data import DataConfig, HeldOutSource, TrainingSource, is_prepared
from hpc_tune.config.schema import TrainConfig
from hpc_tune.data.files import Paths, join_paths
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import warn_of_truncated_documents
from hpc_tune.data.order import (
    MixturePhase,
    MixtureSource,
    SampleOrder,
    compute_progress,
    phases_from_json,
    rows_before,
    source_seed,
)
from hpc_tune.data.packed_rows import MixedRows, PackedRows, Rows, count_learned_tokens
from hpc_tune.data.reading import SplitPart
from hpc_tune.errors import CheckpointError, ConfigError, DataError
from hpc_tune.log import log
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class SourceConfig:
    """A source as given in the settings; ``data``: the data section for this source alone.

    ``name`` is empty if sources have no names. ``setting``: how messages name the source.
    """

    name: str
    setting: str
    data: DataConfig
    part: SplitPart = "all"
    limit: int | None = None

    @property
    def path(self) -> Paths:
        """Where the source's data is."""
        assert self.data.path is not None, "checked by config/constraints.py"
        return self.data.path


@dataclass(frozen=True)
class OpenSource:
    """A prepared, open source. ``limit``: how many of its documents are used, None for all."""

    name: str
    setting: str
    store: TokenStore
    limit: int | None = None


def list_training_sources(data: DataConfig) -> list[SourceConfig]:
    """Return the sources to train on."""
    part: SplitPart = "train" if data.eval_fraction else "all"
    if data.sources is None:
        return [SourceConfig("", "data.path", data, part)]
    return [_source_config("data.sources", data, source, part) for source in data.sources]


def list_eval_sources(data: DataConfig) -> list[SourceConfig]:
    """Return the held-out sources."""
    if data.eval_fraction:
        training_sources = list_training_sources(data)
        return [replace(source, part="held-out", limit=None) for source in training_sources]
    if data.eval_path:
        eval_data = data.model_copy(update={"path": data.eval_path})
        return [SourceConfig("", "data.eval_path", eval_data)]
    by_label = {source.label: source for source in data.sources or []}
    return [
        _source_config(
            "data.eval_sources",
            data.with_source(by_label[source.label]) if source.label in by_label else data,
            source,
        )
        for source in data.eval_sources or []
    ]


def _source_config(
    setting: str, data: DataConfig, source: HeldOutSource, part: SplitPart = "all"
) -> SourceConfig:
    source_data = data.with_source(source)
    return SourceConfig(source.label, f"{setting}: {source.label}", source_data, part, source.limit)


@contextmanager
def prefix_errors_with_source(source: SourceConfig | OpenSource) -> Iterator[None]:
    """Prefix an error in the block with the source's name, if sources have names."""
    try:
        yield
    except DataError as error:
        if not source.name:
            raise
        raise DataError(f"{source.setting}: {error}") from None


def limit_documents(source: SourceConfig, store: TokenStore, warns: bool = True) -> OpenSource:
    """Return a source with its limit of documents; warn if it has fewer documents."""
    limit, num = source.limit, store.num_documents
    if limit is not None and limit > num and warns:
        log.warning("%s: limit=%d, but it has only %d documents", source.setting, limit, num)
    uses_all = limit is None or limit >= num
    return OpenSource(source.name, source.setting, store, None if uses_all else limit)


def build_rows(
    data: DataConfig,
    sources: Sequence[OpenSource],
    order: SampleOrder,
    saved_state: Any,
    comm: Comm,
) -> Rows:
    """Return the rows to train on; ``saved_state``: a checkpoint's position in them. Collective.

    Raises:
        ConfigError, CheckpointError: see ``determine_phases``. DataError: if a source has nothing
        to learn.
    """
    for source in sources if comm.is_rank_0 else ():
        warn_of_truncated_documents(source.store, order.seq_len)
    if data.sources is None:
        return PackedRows(sources[0].store, order)
    rows_by_source = {}
    for source in sources:
        source_order = replace(order, seed=source_seed(order.seed, source.name))
        with prefix_errors_with_source(source):
            rows_by_source[source.name] = PackedRows(source.store, source_order, source.limit)
    settings = data.sources

    def compute_phases() -> list[MixturePhase]:
        return determine_phases(
            saved_state, _mixture_parts(settings, sources, rows_by_source), data.new_mixture
        )

    phases = comm.run_on_rank_0("counting learned tokens", compute_phases)
    return MixedRows({name: rows_by_source[name] for name in phases[-1].parts}, phases)


def _mixture_parts(
    settings: Sequence[TrainingSource],
    sources: Sequence[OpenSource],
    rows_by_source: Mapping[str, PackedRows],
) -> dict[str, MixtureSource]:
    """Return each source's part in a phase, before any of its rows is consumed."""
    parts = {}
    for setting, source in zip(settings, sources, strict=True):
        rows, store = rows_by_source[source.name], source.store
        with prefix_errors_with_source(source):
            if not (num_learned := count_learned_tokens(store, rows.seq_len, source.limit)):
                raise DataError(
                    f"{store.path}: none of its tokens within data.seq_len={rows.seq_len} is "
                    "learned; raise data.seq_len, or prepare data with shorter prompts"
                )
        parts[source.name] = MixtureSource(
            store.attributes.content,
            source.limit,
            rows.num_rows,
            num_learned,
            setting.weight,
            setting.epochs,
        )
    return dict(sorted(parts.items()))


def determine_phases(
    saved_state: Mapping[str, Any] | None, parts: dict[str, MixtureSource], new_mixture: bool
) -> list[MixturePhase]:
    """Return the phases of a run; the last one has ``parts``.

    ``saved_state``: a checkpoint's position, None for a fresh run. ``new_mixture``: the mixture may
    differ from the checkpoint's in its weights and sources.

    Raises:
        ConfigError: if the mixture differs, unless ``new_mixture`` is set and all sources have
            weights; if a source has other data; if the checkpoint's run had data.path.
        CheckpointError: if the checkpoint's mixture cannot be read.
    """
    if saved_state is None:
        return [MixturePhase(parts)]
    if "phases" not in saved_state:
        raise ConfigError(
            "the checkpoint is from a run with data.path, but this run sets data.sources: set that "
            "run's data.path again, or start a new run from its adapter (another run.dir, "
            "checkpoint.resume=none, tune.init_from)"
        )
    try:
        phases, row = phases_from_json(saved_state["phases"]), int(saved_state["rows"])
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the checkpoint's mixture cannot be used: {reason}") from None
    last, known_parts = phases[-1], _newest_part_by_source(phases)
    for name in sorted(parts.keys() & known_parts.keys()):
        if change := _describe_data_change(known_parts[name], parts[name]):
            raise ConfigError(
                f"data.sources: {name} {change}. Give the old data, or another run.dir; or another "
                "name, with data.new_mixture=true, to continue with it as a separate source"
            )
    changes = _list_changes(phases, parts)
    if not changes:
        return phases
    is_of_weights = all(p.weight is not None for p in (*last.parts.values(), *parts.values()))
    if not is_of_weights or not new_mixture:
        remedy = "or another run.dir"
        if is_of_weights:
            remedy = "or set data.new_mixture=true to continue with the new ones, " + remedy
        raise ConfigError(
            f"data.sources: the mixture differs from that of the checkpoint "
            f"({'; '.join(changes)}). Give the old values, {remedy}"
        )
    used_rows = rows_before(phases, row)
    new_parts = {name: replace(p, rows_before=used_rows.get(name, 0)) for name, p in parts.items()}
    return [*phases, MixturePhase(new_parts, row, last.epoch_at(row))]


def describe_mixture_changes(saved_state: Mapping[str, Any], phases: Sequence[MixturePhase]) -> str:
    """Describe how the mixture differs from a checkpoint's, "" if it does not."""
    saved_phases = phases_from_json(saved_state["phases"])
    return (
        "; ".join(_list_changes(saved_phases, phases[-1].parts))
        if len(saved_phases) < len(phases)
        else ""
    )


def _describe_data_change(saved_part: MixtureSource, current_part: MixtureSource) -> str:
    if saved_part.content != current_part.content:
        return "is not the data this run was trained on, or it was prepared in another way"
    if saved_part.limit != current_part.limit:
        old_limit, new_limit = (p.limit or "no limit" for p in (saved_part, current_part))
        return f"has limit={new_limit}, but {old_limit} in the checkpoint"
    return ""


def _newest_part_by_source(phases: Sequence[MixturePhase]) -> dict[str, MixtureSource]:
    """Return every source that a run has had, as in its last phase with that source."""
    return {name: part for phase in phases for name, part in phase.parts.items()}


def _list_changes(phases: Sequence[MixturePhase], parts: Mapping[str, MixtureSource]) -> list[str]:
    last, history = phases[-1], _newest_part_by_source(phases)
    lines = [f"{name} left out" for name in last.parts if name not in parts]
    for name, part in parts.items():
        if (old_part := last.parts.get(name)) is None:
            lines.append(f"{name} {'back' if name in history else 'new'}, with {part.amount_text}")
        elif (old_part.weight, old_part.epochs) != (part.weight, part.epochs):
            lines.append(f"{name} {old_part.amount_text}, now {part.amount_text}")
    return lines


def describe_planned_sources(
    data: DataConfig, train: TrainConfig, global_size: int
) -> Iterator[str]:
    """Yield a line per source on its share of the run; if some are not prepared, say so instead.

    Raises:
        DataError: if a source cannot be opened. ConfigError: if it would be repeated too often.
    """
    if data.sources is None:
        return
    configs = list_training_sources(data)
    if unprepared := [source.name for source in configs if not is_prepared(source.path)]:
        yield (
            f"sources {len(configs)}, of which {', '.join(unprepared)} not prepared yet: the run "
            "reports their rows, learned tokens and passes before its first step"
        )
        return
    order, sources, rows_by_source = SampleOrder(data.seq_len, data.packing, train.seed), [], {}
    for source in configs:
        with prefix_errors_with_source(source):
            open_source = limit_documents(source, TokenStore.open(join_paths(source.path)))
            rows_by_source[source.name] = PackedRows(open_source.store, order, open_source.limit)
            sources.append(open_source)
    phases = [MixturePhase(_mixture_parts(data.sources, sources, rows_by_source))]
    total_rows = phases[0].row_at(train.epochs or 1)
    if train.max_steps is not None:
        total_rows = train.max_steps * global_size
    for line in compute_progress(phases, total_rows):
        yield f"source  {line}"
    yield from check_source_repeats(data.sources, phases, total_rows)


def check_source_repeats(
    sources: Sequence[TrainingSource], phases: Sequence[MixturePhase], total_rows: int
) -> Iterator[str]:
    """Yield a warning that names the sources that a run of ``total_rows`` repeats.

    Raises:
        ConfigError: if a source would be repeated more often than its max_epochs.
    """
    passes = {source.name: source.passes for source in compute_progress(phases, total_rows)}
    too_many = [
        f"{source.label} {passes[source.label]:.2f} times (max_epochs={source.max_epochs:g})"
        for source in sources
        if passes[source.label] > source.max_epochs
    ]
    if too_many:
        raise ConfigError(
            f"data.sources: the run would pass over {', '.join(too_many)}. Lower its weight or "
            "epochs, make the run shorter (train.max_steps, train.epochs), add documents, or raise "
            "its max_epochs if it is to be learned that often"
        )
    if repeats := {name: times for name, times in passes.items() if times > 1}:
        text = ", ".join(f"{name} {times:.2f} times" for name, times in repeats.items())
        yield f"data.sources: the run passes over {text}; repeated documents are memorized"
