"""``prepare``: raw data -> one .h5 file, by all ranks that the launcher started. ``show``: print
data on the terminal, by one process."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_tune.config.data import DataForm, is_prepared
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.files import join_paths
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import warn_of_truncated_documents
from hpc_tune.data.show import (
    COLOR_STYLE,
    PLAIN_STYLE,
    TextStyle,
    show_documents,
    show_prepared_file,
)
from hpc_tune.data.tokenizer import fingerprint
from hpc_tune.errors import EXIT_DONE, ConfigError
from hpc_tune.log import log
from hpc_tune.model.builtin import BUILTIN_TINY_MODEL, write_tiny_model
from hpc_tune.model.config_json import refuse_weightless_shape
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.train.data import make_folder, preparation_settings, prepare_file
from hpc_tune.train.exit import join_world
from hpc_tune.train.model import prepare_model_dir
from hpc_tune.train.sources import SourceConfig, list_training_sources, prefix_errors_with_source
from hpc_tune.world.bootstrap import shutdown


def run_prepare(config: RunConfig, out: Path) -> int:
    """Write ``out`` from data.path with model.path's tokenizer; return the exit code."""
    if not is_prepared(str(out)):
        raise ConfigError(f"--out {out}: expected a name that ends in .h5")
    data, folder = config.data, out.absolute().parent
    if data.path is None:
        raise ConfigError(
            "prepare writes one file, and data.sources has several: prepare each separately, with "
            "data.path and its columns, data.chat_template and data.loss_on; a run prepares raw "
            "sources itself, once, into data.cache"
        )
    path = data.path
    with join_world(config.run, run_dir=None) as comm:
        comm.run_on_rank_0("making the output folder", lambda: make_folder(folder))
        directory = prepare_model_dir(config.model.path, comm, folder)
        tokenizer = comm.run_and_agree(
            "loading the tokenizer", lambda: load_tokenizer(directory, data.chat_template)
        )
        if not data.eval_fraction:
            prepare_file(path, out, data, tokenizer, comm, form=config.tune.form)
            out_files = [out]
            log.info("wrote %s. Use it with data.path=%s", out, out)
        else:
            held_out = out.with_stem(f"{out.stem}-held-out")
            out_files = [out, held_out]
            prepare_file(path, out, data, tokenizer, comm, "train", config.tune.form)
            prepare_file(path, held_out, data, tokenizer, comm, "held-out", config.tune.form)
            log.info("wrote %s and %s. Use them with:", out, held_out)
            log.info("data.path=%s data.eval_path=%s", out, held_out)
        for file in out_files if comm.is_rank_0 else ():
            warn_of_truncated_documents(TokenStore.open(file), data.seq_len)
        shutdown(comm)
    return EXIT_DONE


def run_show(config: RunConfig, num_rows: int) -> int:
    """Print data.path, or each source, as the model will see it; write nothing to disk."""
    style = COLOR_STYLE if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN_STYLE
    refuse_weightless_shape(config.model.path)
    for source in list_training_sources(config.data):
        if source.name:
            print(f"== {source.name}")
        with prefix_errors_with_source(source):
            tokenizer = _load_tokenizer(config.model.path, source.data.chat_template)
            for line in _preview_lines(source, tokenizer, config.tune.form, num_rows, style):
                print(line)
    return EXIT_DONE


def _preview_lines(
    source: SourceConfig, tokenizer: Any, form: DataForm, num_rows: int, style: TextStyle
) -> Iterator[str]:
    if is_prepared(source.path):
        store = TokenStore.open(join_paths(source.path))
        store.require_tokenizer(tokenizer, fingerprint(tokenizer))
        return show_prepared_file(store, tokenizer, num_rows, style)
    settings = preparation_settings(source.data, form=form)
    return show_documents(source.path, tokenizer, settings, num_rows, style)


def _load_tokenizer(model_path: str, chat_template: str | None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(model_path)
        if model_path == BUILTIN_TINY_MODEL:
            directory = Path(folder) / "builtin-tiny"
            write_tiny_model(directory)
        tokenizer = load_tokenizer(directory, chat_template)
    tokenizer.name_or_path = model_path
    return tokenizer
