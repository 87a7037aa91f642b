"""The data of a run: prepare raw data, then verify and open prepared data."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from hpc_tune.checkpoint.state import RunState
from hpc_tune.checkpoint.store import read_state
from hpc_tune.config.data import DataConfig, DataForm, is_prepared
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.chats import find_answer_end_token
from hpc_tune.data.chunks import describe_unread_files, is_builtin, list_source_files
from hpc_tune.data.counts import Counters
from hpc_tune.data.files import Paths, as_list, describe_read_files, find_files, join_paths
from hpc_tune.data.hdf5_format import TokenStore, find_prepared_files
from hpc_tune.data.loader import Loader
from hpc_tune.data.order import PackedSampler, SampleOrder
from hpc_tune.data.packed_rows import MixedRows, PackedRows, sort_by_length
from hpc_tune.data.preferences import describe_label_imbalance, require_both_labels
from hpc_tune.data.prepare import PrepareSettings, PreparingRanks, cache_file_name, prepare_data
from hpc_tune.data.reading import ReadOptions, SplitPart
from hpc_tune.data.tokenizer import fingerprint, tokenizer_name
from hpc_tune.data.writer import VERIFIED_FILE, verify_content_once
from hpc_tune.errors import ConfigError, DataError, find_remedy
from hpc_tune.log import Progress, log
from hpc_tune.memory.policy import Phase
from hpc_tune.model.tokenizer import load_tokenizer, read_num_embeddings, stop_ids
from hpc_tune.plan.resolve import ResolvedLayout
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.sources import (
    OpenSource,
    SourceConfig,
    build_rows,
    check_source_repeats,
    limit_documents,
    list_eval_sources,
    list_training_sources,
    prefix_errors_with_source,
)
from hpc_tune.units import list_some
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class Data:
    """The data of a run, and the loader of this rank; ``held_out``: the evaluation data.

    ``template`` is the text of data.chat_template, if set. ``eval_references``: the reference
    log-probabilities of held-out preferences (train/reference.py), in the order of ``held_out``.
    """

    sources: Sequence[OpenSource]
    held_out: Sequence[OpenSource]
    loader: Loader
    total_steps: int
    template: str | None = None
    eval_references: Sequence[np.ndarray] = ()

    @property
    def mixture(self) -> MixedRows | None:
        """The rows of a mixture of sources; None if data.path is the only source."""
        stream = self.loader.stream
        return stream if isinstance(stream, MixedRows) else None

    @property
    def packed_sources(self) -> list[PackedRows]:
        """The rows of each source, in the order of ``sources``."""
        stream = self.loader.stream
        if isinstance(stream, MixedRows):
            return [stream.source_rows[stream.names.index(source.name)] for source in self.sources]
        assert isinstance(stream, PackedRows), f"{type(stream)} is neither MixedRows nor PackedRows"
        return [stream]

    @property
    def counters(self) -> Counters:
        """What happened to the examples of all sources."""
        total = Counters()
        for source in self.sources:
            total.add(source.store.attributes.counters)
        return total

    @property
    def loss_token_fraction(self) -> float:
        """The share of tokens that carry loss."""
        counters = self.counters
        return counters.loss_tokens / counters.tokens


class LazyTokenizer:
    """The tokenizer of a run. Rank 0 loads it at the start, other ranks only to prepare data."""

    def __init__(self, model_dir: Path, chat_template: str | None) -> None:
        self.model_dir, self._chat_template = model_dir, chat_template

    @cached_property
    def tokenizer(self) -> Any:
        """A fast transformers tokenizer; raises DataError if the model has none."""
        return load_tokenizer(self.model_dir, self._chat_template)

    @cached_property
    def fingerprint(self) -> str:
        """The tokenizer's fingerprint; takes half a second for 50,000 tokens."""
        return fingerprint(self.tokenizer)


def require_data(data: DataConfig, comm: Comm, run_dir: Path) -> None:
    """Check the data early, before links are measured and the model is planned. Collective.

    Raises:
        DataError: if a source is missing, damaged, of an unknown kind, or a mix of kinds.
    """
    cache = Path(data.cache or run_dir / "data")
    for source in (*list_training_sources(data), *list_eval_sources(data)):
        if source.part != "held-out":
            comm.run_on_rank_0(
                f"looking for {source.setting}", partial(_require_source, source, cache)
            )


def _require_source(source: SourceConfig, cache: Path) -> None:
    paths = source.path
    with prefix_errors_with_source(source):
        if is_prepared(paths):
            TokenStore.open(Path(join_paths(paths)))
            return
        try:
            list_source_files(paths)
        except DataError as error:
            if any(Path(path).exists() for path in as_list(paths)):
                raise
            prepared_files = find_prepared_files(paths, [cache, Path(as_list(paths)[0]).parent])
            if not prepared_files:
                raise
            setting = "path" if source.name else source.setting
            raise DataError(
                f"{error}; {prepared_files[-1]} was prepared from it: use that, as in "
                f"{setting}={prepared_files[-1]}"
            ) from None


def open_data(
    job: Job, model: Model, resolved_layout: ResolvedLayout, checkpoint: Path | None = None
) -> Data:
    """Open the data for this rank's part of each step; prepare it first if raw. Collective.

    Without train.max_steps, a run that resumes ``checkpoint`` ends with its last epoch, even if an
    earlier end of the run had a last step of fewer rows.
    """
    config, comm = model.config, job.setup_comm
    job.monitor.enter(Phase.DATA, "preparing the data", writes_heartbeat=True)
    comm.begin("preparing the data")
    lazy_tokenizer = LazyTokenizer(model.built.directory, config.data.chat_template)
    sources, held_out = open_sources(config.data, comm, job.dir, lazy_tokenizer, config.tune.form)
    comm.run_on_rank_0("looking at the labels", lambda: _check_labels(sources, config.tune))
    order = SampleOrder(config.data.seq_len, config.data.packing, config.train.seed)
    step, position = comm.run_on_rank_0(
        "looking at the data", lambda: _read_data_position(checkpoint)
    )
    rows = build_rows(config.data, sources, order, position, comm)
    size = config.batch.global_size
    loader = Loader(
        rows,
        order,
        global_size=size,
        rank=resolved_layout.coordinates.data,
        size=resolved_layout.layout.data_parallel_size,
    )
    # If ranks share rows, only parts are pinned.
    if comm.device.type == "cuda" and resolved_layout.layout.context == 1:
        loader.pin_batches(comm.device)
    if (total_steps := config.train.max_steps) is not None:
        loader.total_rows = total_steps * size
    else:
        loader.total_rows = rows.row_at(config.train.epochs or 1)
        consumed_rows = (position or {}).get("rows", 0)
        total_steps = step + math.ceil(max(0, loader.total_rows - consumed_rows) / size)
    data = Data(sources, held_out, loader, total_steps)
    if data.mixture is not None:
        check = partial(check_source_repeats, config.data.sources or (), data.mixture.phases)
        for line in comm.run_on_rank_0("counting passes", lambda: [*check(loader.total_rows)]):
            if comm.is_rank_0:
                log.warning("%s", line)
    require = partial(_require_loss_tokens, data, order, config.train.eval_rows)
    comm.run_on_rank_0("looking at the data", require)
    comm.run_on_rank_0(
        "looking at the chat template",
        partial(_warn_unknown_stop_token, lazy_tokenizer, data.counters),
    )
    template = comm.run_on_rank_0(
        "looking at the chat template",
        lambda: lazy_tokenizer.tokenizer.chat_template if config.data.chat_template else None,
    )
    return replace(data, template=template)


def _warn_unknown_stop_token(lazy_tokenizer: LazyTokenizer, counters: Counters) -> None:
    """Warn if answers end with a token at which other tools would not stop."""
    has_prompts = counters.loss_tokens < counters.tokens - counters.documents
    if has_prompts and (
        warning := describe_unknown_stop_token(lazy_tokenizer.tokenizer, lazy_tokenizer.model_dir)
    ):
        log.warning("%s", warning)


def describe_unknown_stop_token(tokenizer: Any, model_dir: Path) -> str | None:
    """Return a warning if no tool but hpc_tune stops at the token that ends answers, else None."""
    end = find_answer_end_token(tokenizer)
    stops = stop_ids(tokenizer, model_dir)
    if end is None or tokenizer.convert_tokens_to_ids(end) in stops:
        return None
    stop_tokens = ", ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(stops)))) or "nothing"
    return (
        f"answers end with {end}, but by the model's files generation ends with {stop_tokens}: "
        f"other tools will not stop after an answer. Add {end}, "
        f"{tokenizer.convert_tokens_to_ids(end)}, to eos_token_id in generation_config.json of "
        "model.path, which exports copy, or set it in the tool (hpc_tune generate stops there)"
    )


def _read_data_position(checkpoint: Path | None) -> tuple[int, dict[str, Any] | None]:
    """Return a checkpoint's step and its position in the data; (0, None) without one."""
    if checkpoint is None:
        return 0, None
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    return (state.step, state.loader) if isinstance(state.loader.get("rows"), int) else (0, None)


def _require_loss_tokens(data: Data, order: SampleOrder, eval_rows: int | None) -> None:
    """Refuse data without a learned (or, if held out, measured) token in the rows that are read.

    Sources of a mixture were checked when its phases were determined.
    """
    if data.mixture is None:
        (source,) = data.sources
        _require_source_loss_tokens(source, order, data.loader.total_rows, "learned")
    for source in data.held_out:
        with prefix_errors_with_source(source):
            _require_source_loss_tokens(source, replace(order, seed=0), eval_rows, "measured")


def _require_source_loss_tokens(
    source: OpenSource, order: SampleOrder, max_rows: int | None, verb: str
) -> None:
    """Refuse data if none of the first ``max_rows`` rows has a token that carries loss.

    This can happen with data prepared for a longer seq_len: all answers may lie beyond the run's.

    Raises:
        DataError: if no token carries loss.
    """
    store = source.store
    rows = PackedSampler(*sort_by_length(store, source.limit), order)
    num_rows = min(max_rows or rows.num_rows, rows.num_rows)
    documents = (d for row in range(num_rows) for d in rows.documents_of(row))
    if not any(store.document(d)[1][1 : order.seq_len].any() for d in documents):
        raise DataError(
            f"{'' if source.name else source.setting + '='}{store.path}: none of its {num_rows:,} "
            f"rows of data.seq_len={order.seq_len} has a token that is {verb}; all answers lie "
            f"beyond that length (it was prepared with seq_len {store.attributes.seq_len}). Raise "
            "data.seq_len, or prepare data with shorter prompts"
        )


def open_sources(
    data: DataConfig,
    comm: Comm,
    run_dir: Path,
    lazy_tokenizer: LazyTokenizer,
    form: DataForm = "answers",
) -> tuple[list[OpenSource], list[OpenSource]]:
    """Open the training and held-out sources; prepare raw ones first. Collective."""
    training, held_out = list_training_sources(data), list_eval_sources(data)
    separate_sources = [] if data.eval_fraction else held_out
    comm.run_on_rank_0("looking at the data", partial(_warn_overlap, training, separate_sources))
    tokenizers = {data.chat_template: lazy_tokenizer}

    def open_source(source: SourceConfig) -> OpenSource:
        template = source.data.chat_template
        lazy = tokenizers.setdefault(template, LazyTokenizer(lazy_tokenizer.model_dir, template))
        arguments = source.path, source.data, lazy, comm, run_dir, source.part, form
        with prefix_errors_with_source(source):
            return limit_documents(source, open_or_prepare_store(*arguments), warns=comm.is_rank_0)

    return [*map(open_source, training)], [*map(open_source, held_out)]


def _check_labels(sources: Sequence[OpenSource], tune: TuneConfig) -> None:
    """Refuse data with only one kind of label; warn if the two kinds have unequal weight."""
    labels = [s.store.labels[:] for s in sources if s.store.labels is not None]
    if not labels:
        return
    num_desirable = sum(int(np.count_nonzero(source_labels)) for source_labels in labels)
    num_undesirable = sum(map(len, labels)) - num_desirable
    require_both_labels(
        num_desirable, num_undesirable, ", ".join(s.store.attributes.source for s in sources)
    )
    weights = tune.coefficients["desirable_weight"], tune.coefficients["undesirable_weight"]
    if warning := describe_label_imbalance(num_desirable, num_undesirable, *weights):
        log.warning("%s", warning)


def _warn_overlap(training: Sequence[SourceConfig], held_out: Sequence[SourceConfig]) -> None:
    """Warn of files that are both trained and evaluated on, or that several sources read."""
    for one, other in itertools.combinations(training, 2):
        if files := sorted(list_source_files(one.path) & list_source_files(other.path)):
            log.warning(
                "%s and %s both read %s: it is learned twice", one.setting, other.setting, files[0]
            )
    for one, other in itertools.product(training, held_out):
        if files := sorted(list_source_files(one.path) & list_source_files(other.path)):
            log.warning(
                "%s and %s both read %s: held-out loss on training data says nothing about new "
                "data. Name the held-out split, or use data.eval_fraction",
                other.setting,
                one.setting,
                list_some(files, 1),
            )


def open_or_prepare_store(
    path: Paths,
    data: DataConfig,
    lazy_tokenizer: LazyTokenizer,
    comm: Comm,
    run_dir: Path,
    part: SplitPart = "all",
    form: DataForm = "answers",
) -> TokenStore:
    """Open prepared data. All ranks prepare raw data first; later starts reuse the result."""

    def open_store(file: Path, is_new: bool = False) -> TokenStore:
        store = TokenStore.open(file)
        store.require_form(form)
        if comm.is_rank_0:
            store.require_tokenizer(lazy_tokenizer.tokenizer, lazy_tokenizer.fingerprint)
            if (rows := read_num_embeddings(lazy_tokenizer.model_dir)) is not None:
                highest = lazy_tokenizer.tokenizer.convert_ids_to_tokens(
                    store.attributes.highest_token
                )
                store.require_embeddings(rows, highest)
            verify_content_once(store, run_dir / VERIFIED_FILE, is_new)
        return store

    if is_prepared(path):
        store = comm.run_and_agree("opening the data", lambda: open_store(Path(join_paths(path))))
        if store.attributes.loss_on != data.loss_on:
            raise DataError(
                f"data.loss_on={data.loss_on}, but {path} was prepared with data.loss_on="
                f"{store.attributes.loss_on}: prepare it again, or use that value"
            )
        return store
    folder = Path(data.cache) if data.cache else run_dir / "data"
    settings = preparation_settings(data, part, form)
    out = comm.run_on_rank_0(
        "looking at the data",
        lambda: folder / cache_file_name(path, lazy_tokenizer.fingerprint, settings),
    )
    was_prepared = comm.run_on_rank_0("looking for prepared data", out.exists)
    if not was_prepared:
        comm.run_on_rank_0("making the data folder", lambda: make_folder(folder))
        tokenizer = comm.run_and_agree("loading the tokenizer", lambda: lazy_tokenizer.tokenizer)
        prepare_file(path, out, data, tokenizer, comm, part, form)
    return comm.run_and_agree("opening the data", lambda: open_store(out, is_new=not was_prepared))


def preparation_settings(
    data: DataConfig, part: SplitPart = "all", form: DataForm = "answers"
) -> PrepareSettings:
    """Return the preparation settings that follow from the settings of a run."""
    held_out = data.eval_fraction if part != "all" else 0.0
    read_options = ReadOptions(tuple(data.columns.items()), data.bad_rows, held_out, part, form)
    return PrepareSettings(data.seq_len, data.loss_on, read_options)


def prepare_file(
    path: Paths,
    out: Path,
    data: DataConfig,
    tokenizer: Any,
    comm: Comm,
    part: SplitPart = "all",
    form: DataForm = "answers",
) -> None:
    """Tokenize raw data into ``out``, each rank its part. Collective.

    Raises:
        DataError: on every rank, if the data of any rank cannot be used.
    """
    world = comm.world
    name = f"{join_paths(path)}{'' if part == 'all' else f' ({part} part)'}"
    progress = Progress(f"tokenizing {name}", 1, enabled=world.rank == 0)
    ranks = PreparingRanks(world.rank, world.size, comm.run_and_agree, comm.broadcast, comm.threads)
    settings = preparation_settings(data, part, form)
    counters = prepare_data(path, out, tokenizer, settings, ranks, progress.show)
    progress.close()
    if world.rank == 0 and part != "held-out" and not is_builtin(join_paths(path)):
        listing = find_files(path)
        if len(listing.files) > 1:
            log.info("%s: %s", join_paths(path), describe_read_files(listing))
        for line in describe_unread_files(listing, tokenizer_name(tokenizer)):
            log.warning("%s: %s", join_paths(path), line)
    log.info("prepared %s: %s", name, counters)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents.

    Raises:
        ConfigError: if the file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}{find_remedy(error)}") from None
