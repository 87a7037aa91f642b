"""The model and the data of a run, made ready: builtins written, raw data prepared, shapes read."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_tune.checkpoint.locate import TEMPLATE_FILE
from hpc_tune.config.schema import DataConfig, RunConfig, is_prepared
from hpc_tune.data.content import VERIFIED_FILE, verify_once
from hpc_tune.data.files import Paths, find, say_left_out, say_read, shown
from hpc_tune.data.layout import TokenStore
from hpc_tune.data.prepare import cache_name, prepare
from hpc_tune.data.reading import Part, Reading
from hpc_tune.data.sources import files_of, is_builtin
from hpc_tune.data.tokenizer import fingerprint
from hpc_tune.errors import ConfigError, DataError, HpcTuneError
from hpc_tune.lean import import_transformers
from hpc_tune.log import Progress, log
from hpc_tune.model.build import BuiltModel, build, compute_dtype
from hpc_tune.model.builtin import BUILTIN_TINY, write_tiny
from hpc_tune.model.language import read_config
from hpc_tune.model.positions import scaled_by_length
from hpc_tune.model.shapes import refuse_shape
from hpc_tune.model.start import start_from
from hpc_tune.model.tokenizer import embedding_rows, load_tokenizer
from hpc_tune.plan.account import ModelSize
from hpc_tune.train.proof import prove
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class Inputs:
    """The model and the data of a run, ready to be used."""

    built: BuiltModel
    size: ModelSize
    store: TokenStore
    eval_store: TokenStore | None

    @property
    def loss_share(self) -> float:
        """Which share of the tokens carries loss."""
        counters = self.store.attributes.counters
        return counters.loss_tokens / counters.tokens


def prepare_model(
    config: RunConfig, comm: Comm, run_dir: Path, fresh: bool
) -> tuple[BuiltModel, RunConfig]:
    """Build the model on the meta device, a ``fresh`` run's from tune.init_from. Collective.

    Returns the settings too: without data.packing where the model cannot keep documents apart.

    Raises:
        ConfigError: if the settings are not for such a model.
        DataError: if a model of its kind would not be trained right.
    """
    import_transformers()
    model_dir = ready_model(config.model.path, comm, run_dir)
    dtype = compute_dtype(config.model.dtype, comm.device)

    def make() -> BuiltModel:
        built = build(model_dir, dtype, config.tune, config.train.seed)
        start = config.tune.init_from
        built = replace(built, seq_len=config.data.seq_len)
        return start_from(built, Path(start)) if start and fresh else built

    built = comm.together("building the model", make)
    if built.dropout:
        log.warning(
            "the model's own dropout is off (%s in its config.json): it would differ with the "
            "number of ranks; tune.dropout is for adapters",
            ", ".join(f"{name}={value:g}" for name, value in sorted(built.dropout.items())),
        )
    longest = getattr(built.config, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        log.warning(
            "data.seq_len=%d is longer than the model's %d positions; what is beyond them it has "
            "never seen: use %d or less, or a config.json that stretches them (rope_scaling)",
            *(config.data.seq_len, longest, longest),
        )
    if built.others:
        log.info(
            "the language model alone is trained; %s stay as they are, and data has text alone",
            ", ".join(built.others),
        )
    if scaled_by_length(built.config):
        log.info("rotary positions are scaled for texts of data.seq_len=%d", config.data.seq_len)
    return built, _as_proven(config, comm, built)


def _as_proven(config: RunConfig, comm: Comm, built: BuiltModel) -> RunConfig:
    """Return the settings that are right for the architecture, or refuse. Collective."""
    four_bits = config.tune.method == "qlora"
    proof = comm.on_rank_0(
        "trying the architecture", lambda: prove(read_config(built.directory), four_bits)
    )
    kind, parallel = built.config.model_type, config.parallel
    if proof.loss:
        raise DataError(
            f"{config.model.path}: a {kind} model would not be trained right: {proof.loss}"
        )
    for setting, size, why in (
        ("parallel.pipeline", parallel.pipeline, proof.pipeline),
        ("parallel.tensor", parallel.tensor, proof.tensor),
    ):
        if (size or 1) > 1 and why:
            raise ConfigError(
                f"{setting}={size}: a {kind} model would not be trained right: {why}; use "
                "parallel.shard"
            )
    if four_bits and proof.four_bits:
        raise ConfigError(
            f"tune.method=qlora: a {kind} model's base cannot be in 4 bits: {proof.four_bits}; "
            "use tune.method=lora"
        )
    if proof.attention:
        built.module.within_documents = False
    if not config.data.packing or not proof.packing:
        return config
    log.warning(
        "data.packing is off, one document per row, since for a %s model %s", kind, proof.packing
    )
    data = config.data.model_copy(update={"packing": False})
    return config.model_copy(update={"data": data})


class Tokenizing:
    """The tokenizer of a run. Rank 0 loads it at the start, another rank when it has to prepare."""

    def __init__(self, model_dir: Path, chat_template: str | None) -> None:
        self.model_dir, self._chat_template = model_dir, chat_template

    @cached_property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers; DataError if there is none."""
        return load_tokenizer(self.model_dir, self._chat_template)

    @cached_property
    def mark(self) -> str:
        """Its fingerprint: half a second for 50,000 tokens."""
        return fingerprint(self.tokenizer)


def prepare_data(
    data: DataConfig, comm: Comm, run_dir: Path, model_dir: Path
) -> tuple[TokenStore, TokenStore | None]:
    """Open the data and the held-out data, prepared first if raw. Collective."""
    own = Tokenizing(model_dir, data.chat_template)
    if data.chat_template:  # exports carry it, and the user's file may be gone by then
        comm.on_rank_0(
            "keeping the chat template",
            lambda: (run_dir / TEMPLATE_FILE).write_text(own.tokenizer.chat_template, "utf-8"),
        )
    if data.eval_path:
        comm.on_rank_0("looking at the data", lambda: _warn_of_overlap(data))
    part: Part = "train" if data.eval_fraction else "all"
    store = ready_data(data.path, data, own, comm, run_dir, part)
    if data.eval_fraction:
        return store, ready_data(data.path, data, own, comm, run_dir, "held-out")
    if data.eval_path:
        return store, ready_data(data.eval_path, data, own, comm, run_dir)
    return store, None


def _warn_of_overlap(data: DataConfig) -> None:
    """Say which files are both learned from and evaluated on."""
    assert data.eval_path is not None
    same = sorted(files_of(data.path) & files_of(data.eval_path))
    if same:
        log.warning(
            "data.eval_path and data.path both read %s%s: its loss tells nothing about new data. "
            "Name the held-out split, or use data.eval_fraction",
            *(same[0], f" and {len(same) - 1} more" if len(same) > 1 else ""),
        )


def ready_model(path: str, comm: Comm, run_dir: Path) -> Path:
    """Return the model's directory; builtin:tiny is written into the run directory first."""
    refuse_shape(path)
    if path != BUILTIN_TINY:
        return Path(path)
    directory = run_dir / "builtin-tiny"
    comm.on_rank_0("writing builtin:tiny", lambda: write_tiny(directory))
    return directory


def ready_data(
    path: Paths,
    data: DataConfig,
    own: Tokenizing,
    comm: Comm,
    run_dir: Path,
    part: Part = "all",
) -> TokenStore:
    """Open prepared data; raw data is prepared by all ranks first, once for all later starts."""

    def open_it(file: Path, is_new: bool = False) -> TokenStore:
        store = TokenStore.open(file)
        if comm.is_rank_0:
            store.require_tokenizer(own.tokenizer, own.mark)
            if (rows := embedding_rows(own.model_dir)) is not None:
                highest = own.tokenizer.convert_ids_to_tokens(store.attributes.highest_token)
                store.require_embeddings(rows, highest)
            verify_once(store, run_dir / VERIFIED_FILE, is_new)
        return store

    if is_prepared(path):
        store = comm.together("opening the data", lambda: open_it(Path(shown(path))))
        if store.attributes.loss_on != data.loss_on:
            raise DataError(
                f"data.loss_on={data.loss_on}, but {path} was prepared with data.loss_on="
                f"{store.attributes.loss_on}: prepare it again, or set that"
            )
        return store
    folder = Path(data.cache) if data.cache else run_dir / "data"

    def place() -> Path:
        reading = reading_of(data, part)
        return folder / cache_name(
            path, own.mark, seq_len=data.seq_len, loss_on=data.loss_on, reading=reading
        )

    out = comm.on_rank_0("looking at the data", place)
    found = comm.on_rank_0("looking for prepared data", out.exists)
    if not found:
        comm.on_rank_0("making the data folder", lambda: make_folder(folder))
        tokenizer = comm.together("loading the tokenizer", lambda: own.tokenizer)
        prepare_file(path, out, data, tokenizer, comm, part)
    return comm.together("opening the data", lambda: open_it(out, is_new=not found))


def reading_of(data: DataConfig, part: Part = "all") -> Reading:
    """Return how data is read by its settings."""
    held_out = data.eval_fraction if part != "all" else 0.0
    return Reading(tuple(data.columns.items()), data.bad_rows, held_out, part)


def prepare_file(
    path: Paths,
    out: Path,
    data: DataConfig,
    tokenizer: Any,
    comm: Comm,
    part: Part = "all",
) -> None:
    """Tokenise raw data into ``out``, each rank its part. Collective.

    Raises:
        DataError: on every rank, if the data of one cannot be used.
    """
    world = comm.world
    name = f"{shown(path)}{'' if part == 'all' else f' ({part} part)'}"
    progress = Progress(f"tokenising {name}", 1, enabled=world.rank == 0)

    def agree_or_raise(error: BaseException | None) -> None:
        known = DataError(str(error)) if isinstance(error, OSError) else error
        assert known is None or isinstance(known, HpcTuneError)
        comm.agree(known, "preparing the data")

    counters = prepare(
        path,
        out,
        tokenizer,
        seq_len=data.seq_len,
        loss_on=data.loss_on,
        reading=reading_of(data, part),
        rank=world.rank,
        size=world.size,
        agree=agree_or_raise,
        share=lambda own: comm.broadcast(own),
        threads=comm.threads,
        report=progress.show,
    )
    progress.close()
    if world.rank == 0 and part != "held-out" and not is_builtin(shown(path)):
        found = find(path)
        if len(found.files) > 1:
            log.info("%s: %s", shown(path), say_read(found))
        for line in say_left_out(found):
            log.warning("%s: %s", shown(path), line)
    log.info("prepared %s: %s", name, counters)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents.

    Raises:
        ConfigError: if the file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from None
