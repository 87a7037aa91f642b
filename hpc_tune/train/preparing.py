"""``prepare``: raw data -> one .h5 file, by all ranks that the launcher started."""

from functools import partial
from pathlib import Path

from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_DONE, ConfigError
from hpc_tune.log import configure, log
from hpc_tune.model.build import load_tokenizer
from hpc_tune.train.ending import fail
from hpc_tune.train.inputs import make_folder, prepare_file, ready_model
from hpc_tune.train.saving import on_rank_0, together
from hpc_tune.world.bootstrap import bootstrap, shutdown


def run_prepare(config: RunConfig, out: Path) -> int:
    """Write ``out`` from data.path with model.path's tokenizer; return the exit code."""
    session = None
    try:
        if out.suffix not in (".h5", ".hdf5"):
            raise ConfigError(f"--out {out}: expected a name that ends in .h5")
        session = bootstrap(config.run, partial(fail, run_dir=None))
        configure(session.world.rank)
        on_rank_0(session, "making the output folder", lambda: make_folder(out.absolute().parent))
        directory = ready_model(config.model.path, session, out.absolute().parent)
        tokenizer = together(
            session,
            "loading the tokenizer",
            lambda: load_tokenizer(directory, config.data.chat_template),
        )
        data = config.data
        if not data.eval_fraction:
            prepare_file(data.path, out, data, tokenizer, session)
            log.info("wrote %s. Use it with data.path=%s", out, out)
        else:
            held_out = out.with_stem(f"{out.stem}-held-out")
            prepare_file(data.path, out, data, tokenizer, session, "train")
            prepare_file(data.path, held_out, data, tokenizer, session, "held-out")
            log.info("wrote %s and %s. Use them with", out, held_out)
            log.info("data.path=%s data.eval_path=%s", out, held_out)
        shutdown(session)
        return EXIT_DONE
    except (Exception, KeyboardInterrupt) as error:
        fail(session, error, None)
