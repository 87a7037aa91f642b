"""What a run says of itself before the expensive part begins."""

import torch

from hpc_tune.config.schema import RunConfig
from hpc_tune.data.loader import Loader
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.optim import for_batch
from hpc_tune.log import log
from hpc_tune.train.inputs import Inputs
from hpc_tune.units import format_count
from hpc_tune.world.bootstrap import Session
from hpc_tune.world.device import cpu_has_bf16


def describe(
    config: RunConfig,
    session: Session,
    inputs: Inputs,
    layout: Layout,
    why: str,
    loader: Loader,
    total_steps: int,
) -> None:
    """Print the world, the model, the data, the layout and the batch, a line each."""
    size, tune = inputs.size, config.tune
    adapter = f" r={tune.rank} alpha={tune.alpha:g}" if tune.method != "full" else ""
    log.info("world   %s, %s", session.world, session.device)
    log.info(
        "model   %s: %s parameters, %s trained (%s%s), %s",
        config.model.path,
        format_count(size.num_parameters),
        format_count(size.num_trained),
        tune.method,
        adapter,
        str(inputs.built.dtype).removeprefix("torch."),
    )
    if session.device.type == "cpu" and inputs.built.dtype == torch.bfloat16 and not cpu_has_bf16():
        log.warning(
            "model.dtype=bf16: this CPU has no products of bf16 (AVX512-BF16, AMX), and a step may "
            "take tens of times as long as with model.dtype=fp32"
        )
    log.info(
        "data    %s: %s documents in %s rows of %d tokens, %.1f%% padding",
        config.data.path,
        format_count(inputs.store.num_documents),
        format_count(loader.num_rows_per_epoch),
        config.data.seq_len,
        100 * loader.padding,
    )
    log.info("layout  %s: %s", layout, why)
    ranks = layout.data_size
    fewest, more = divmod(config.batch.global_size, ranks)
    uneven = f", {more} ranks one more: the others wait for them" if more else ""
    alone = ranks == session.world.size
    who, singular = ("ranks", "rank") if alone else ("groups of ranks", "group of ranks")
    log.info(
        "batch   %d rows per step over %d %s: %d each%s; %d steps = %.2f epochs",
        config.batch.global_size,
        ranks,
        who if ranks > 1 else singular,
        fewest,
        uneven,
        total_steps,
        loader.total_rows / loader.num_rows_per_epoch,
    )
    optim = config.optim
    if optim.reference_batch is not None:
        log.info(
            "rate    %.3g: optim.lr=%.3g is for %d rows per step (%s)",
            for_batch(optim, config.batch.global_size).lr,
            optim.lr,
            optim.reference_batch,
            optim.batch_scaling,
        )
    log.info("files   %s", config.run.dir)
