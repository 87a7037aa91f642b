"""The model and the data of a run, made ready: builtins written, raw data prepared, shapes read."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_tune.checkpoint.locate import TEMPLATE_FILE
from hpc_tune.config.schema import DataConfig, RunConfig
from hpc_tune.data.content import VERIFIED_FILE, verify_once
from hpc_tune.data.layout import TokenStore
from hpc_tune.data.prepare import cache_name, prepare
from hpc_tune.data.sources import left_out
from hpc_tune.data.tokenizer import fingerprint
from hpc_tune.errors import ConfigError, DataError, HpcTuneError
from hpc_tune.lean import import_transformers
from hpc_tune.log import Progress, log
from hpc_tune.model.build import BuiltModel, build, compute_dtype, embedding_rows, load_tokenizer
from hpc_tune.model.builtin import BUILTIN_TINY, write_tiny
from hpc_tune.model.loss import can_pack
from hpc_tune.model.shapes import refuse_shape
from hpc_tune.model.start import start_from
from hpc_tune.plan.account import ModelSize
from hpc_tune.train.saving import on_rank_0, together
from hpc_tune.world.bootstrap import Session
from hpc_tune.world.collective import agree


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


def prepare_model(config: RunConfig, session: Session, run_dir: Path, fresh: bool) -> BuiltModel:
    """Build the model on the meta device, a ``fresh`` run's from tune.init_from. Collective.

    Raises:
        ConfigError: if the data's settings are not for such a model.
    """
    import_transformers()
    model_dir = ready_model(config.model.path, session, run_dir)
    dtype = compute_dtype(config.model.dtype, session.device)

    def make() -> BuiltModel:
        built = build(model_dir, dtype, config.tune, config.train.seed)
        start = config.tune.init_from
        return start_from(built, Path(start)) if start and fresh else built

    built = together(session, "building the model", make)
    if config.data.packing and not can_pack(built.config):
        raise ConfigError(
            f"data.packing=true: documents in one row of a {built.config.model_type} model would "
            "see each other; use data.packing=false"
        )
    longest = getattr(built.config, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        log.warning(
            "data.seq_len=%d is longer than the model's %d positions; what is beyond them it has "
            "never seen: use %d or less, or a config.json that stretches them (rope_scaling)",
            *(config.data.seq_len, longest, longest),
        )
    return built


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
    data: DataConfig, session: Session, run_dir: Path, model_dir: Path
) -> tuple[TokenStore, TokenStore | None]:
    """Open the data and the held-out data, prepared first if raw. Collective."""
    own = Tokenizing(model_dir, data.chat_template)
    if data.chat_template:  # exports carry it, and the user's file may be gone by then
        on_rank_0(
            session,
            "keeping the chat template",
            lambda: (run_dir / TEMPLATE_FILE).write_text(own.tokenizer.chat_template, "utf-8"),
        )
    store = ready_data(data.path, data, own, session, run_dir)
    eval_store = None
    if data.eval_path:
        eval_store = ready_data(data.eval_path, data, own, session, run_dir)
    return store, eval_store


def ready_model(path: str, session: Session, run_dir: Path) -> Path:
    """Return the model's directory; builtin:tiny is written into the run directory first."""
    refuse_shape(path)
    if path != BUILTIN_TINY:
        return Path(path)
    directory = run_dir / "builtin-tiny"
    on_rank_0(session, "writing builtin:tiny", lambda: write_tiny(directory))
    return directory


def ready_data(
    path: str, data: DataConfig, own: Tokenizing, session: Session, run_dir: Path
) -> TokenStore:
    """Open prepared data; raw data is prepared by all ranks first, once for all later starts."""

    def open_it(file: Path, is_new: bool = False) -> TokenStore:
        store = TokenStore.open(file)
        if session.world.rank == 0:
            store.require_tokenizer(own.tokenizer, own.mark)
            if (rows := embedding_rows(own.model_dir)) is not None:
                highest = own.tokenizer.convert_ids_to_tokens(store.attributes.highest_token)
                store.require_embeddings(rows, highest)
            verify_once(store, run_dir / VERIFIED_FILE, is_new)
        return store

    if path.endswith((".h5", ".hdf5")):
        store = together(session, "opening the data", lambda: open_it(Path(path)))
        if store.attributes.loss_on != data.loss_on:
            raise DataError(
                f"data.loss_on={data.loss_on}, but {path} was prepared with data.loss_on="
                f"{store.attributes.loss_on}: prepare it again, or set that"
            )
        return store
    folder = Path(data.cache) if data.cache else run_dir / "data"

    def place() -> Path:
        return folder / cache_name(path, own.mark, seq_len=data.seq_len, loss_on=data.loss_on)

    out = on_rank_0(session, "looking at the data", place)
    found = on_rank_0(session, "looking for prepared data", out.exists)
    if not found:
        on_rank_0(session, "making the data folder", lambda: make_folder(folder))
        tokenizer = together(session, "loading the tokenizer", lambda: own.tokenizer)
        prepare_file(path, out, data, tokenizer, session)
    return together(session, "opening the data", lambda: open_it(out, is_new=not found))


def prepare_file(path: str, out: Path, data: DataConfig, tokenizer: Any, session: Session) -> None:
    """Tokenise raw data into ``out``, each rank its part. Collective.

    Raises:
        DataError: on every rank, if the data of one cannot be used.
    """
    world = session.world
    if world.rank == 0 and (files := left_out(path)):
        log.warning(
            "%s: left out %s, by name a split to be held out; data.eval_path takes such a file",
            *(path, ", ".join(file.name for file in files)),
        )
    progress = Progress(f"tokenising {path}", 1, enabled=world.rank == 0)

    def agree_or_raise(error: BaseException | None) -> None:
        known = DataError(str(error)) if isinstance(error, OSError) else error
        assert known is None or isinstance(known, HpcTuneError)
        agree(session, known, "preparing the data")

    counters = prepare(
        path,
        out,
        tokenizer,
        seq_len=data.seq_len,
        loss_on=data.loss_on,
        rank=world.rank,
        size=world.size,
        agree=agree_or_raise,
        threads=session.threads,
        report=progress.show,
    )
    progress.close()
    log.info("prepared %s: %s", path, counters)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents.

    Raises:
        ConfigError: if the file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from None
