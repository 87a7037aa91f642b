"""The reference of preferences: the log-probabilities of all answers before the first step.

    load_engine -> a file beside the prepared data, or one forward pass over all rows, cached there
    -> loader, held-out data -> resume

One number per answer replaces a second model and a second forward pass in each step. The file's
name has a hash of everything that the numbers depend on, so it is never used for another model.
"""

import hashlib
import io
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import RunState
from hpc_tune.config.section import flatten_settings
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import HeldOutRows
from hpc_tune.data.order import SampleOrder
from hpc_tune.engine.base import Engine, StepResult
from hpc_tune.errors import ConfigError, DataError, HpcTuneError, find_remedy
from hpc_tune.files import write_file
from hpc_tune.log import Progress, log
from hpc_tune.memory.policy import Phase
from hpc_tune.model.float8 import explain_missing_float8_matmuls
from hpc_tune.model.kernels import multiplies_in_tf32
from hpc_tune.model.objective import AnswerLogProbabilities, PreferenceSums
from hpc_tune.model.rotary import has_length_dependent_scaling
from hpc_tune.model.weights import ADAPTER_FILE
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.sources import OpenSource
from hpc_tune.train.startup.micro_size import decide_micro_size
from hpc_tune.units import format_seconds
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import find_architecture

_DIGEST_BYTES = 32  # at the end of a file: SHA-256 of the bytes before
_BATCHES_PER_READ = 16  # micro-batches, whose results are small
_MAX_VALUES_PER_MESSAGE = 1 << 16  # values in one message
_CACHE_VERSION = 2  # raised when the same rows and model get other values; 1 summed tokens in fp32
# By dtype size in bytes: the relative difference of log-probabilities allowed between two passes,
# whose matmuls have other rows. A wrong mask, template or base differs by more than a tenth.
_TOLERANCE_BY_ITEMSIZE = {4: 1e-3, 2: 3e-2}


def attach_reference(job: Job, model: Model, plan: StepPlan, data: Data, engine: Engine) -> Data:
    """Return the data with the reference of all answers, computed if not cached. Collective.

    ``engine`` must hold the weights that the run begins with.

    Raises:
        DataError: if a cached file is damaged or unreadable, or a new one cannot be written.
    """
    if not model.config.tune.has_reference:
        return data
    for source, rows in zip(data.sources, data.packed_sources, strict=True):
        rows.set_reference_log_probs(_load_or_compute_reference(job, model, plan, source, engine))
    data.loader.discard_prefetched_steps()
    references = [
        _load_or_compute_reference(job, model, plan, source, engine) for source in data.held_out
    ]
    return replace(data, eval_references=references)


def _load_or_compute_reference(
    job: Job, model: Model, plan: StepPlan, source: OpenSource, engine: Engine
) -> np.ndarray:
    """Return log-probabilities, fp32 [num_documents, 2]."""
    comm, config, store = job.setup_comm, model.config, source.store
    folder = Path(config.data.cache) if config.data.cache else job.dir / "data"
    file = comm.run_on_rank_0(
        "looking for the reference",
        lambda: folder / f"reference-{_cache_key(model, store, comm.device)}.npy",
    )
    cached_values = comm.run_on_rank_0(
        "reading the reference", partial(_read_reference, file, store.num_documents)
    )
    if cached_values is not None:
        log.info("reference of %s: %s", source.setting, file)
        return np.asarray(cached_values)
    began_s = time.monotonic()
    job.monitor.enter(Phase.REFERENCE, "computing the reference", writes_heartbeat=True)
    reference = _compute_reference(job, model, plan, store, engine)
    comm.run_on_rank_0("keeping the reference", partial(_write_reference, file, reference))
    log.info(
        "reference of %s: computed the log-probabilities of %d rows in %s, saved them in %s",
        *(source.setting, store.num_documents, format_seconds(time.monotonic() - began_s), file),
    )
    return reference


def _compute_reference(
    job: Job, model: Model, plan: StepPlan, store: TokenStore, engine: Engine
) -> np.ndarray:
    comm, config = job.setup_comm, model.config
    data_rank = plan.layout.coordinates(comm.world.rank).data
    order = SampleOrder(config.data.seq_len, config.data.packing, seed=0)
    rows = HeldOutRows(store, order, rank=data_rank, size=plan.layout.data_parallel_size)
    micro_size = decide_micro_size(job, model, plan, engine, None)
    comm.begin("computing the reference")
    reference = np.zeros((store.num_documents, 2), dtype=np.float64)
    progress = Progress("reference", rows.num_batches(micro_size), enabled=comm.is_rank_0)

    def batches(yields_mismatched: bool) -> Iterator[Batch]:
        for number, batch in enumerate(rows.batches(micro_size), 1):
            yield batch.mismatched_batch if yields_mismatched and batch.mismatched_batch else batch
            progress.update(number)

    for is_mismatched in (False, True) if store.form == "labels" else (False,):
        for documents, sums_M2 in _group_results(
            (rows.documents_in(batch), log_probs)
            for batch, log_probs in engine.objective_sums(
                batches(is_mismatched), AnswerLogProbabilities()
            )
        ):
            np.add.at(reference, documents, sums_M2)
    progress.close()
    flat = reference.reshape(-1)
    for start in range(0, len(flat), _MAX_VALUES_PER_MESSAGE):
        flat[start : start + _MAX_VALUES_PER_MESSAGE] = comm.sum(
            flat[start : start + _MAX_VALUES_PER_MESSAGE].tolist()
        )
    return reference.astype(np.float32)


def _group_results(
    results: Iterable[tuple[list[int], torch.Tensor]],
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield documents and their sums, M x 2, for many micro-batches at a time.

    Reading sums makes the host wait for the device, so they are not read after each micro-batch.
    """
    pending_results: list[tuple[list[int], torch.Tensor]] = []
    for documents, log_probs in results:
        # A row whose answers have no mismatched ones has no tokens, and so no documents.
        if documents:
            pending_results.append((documents, log_probs.reshape(-1, 2)))
        if len(pending_results) == _BATCHES_PER_READ:
            yield _copy_to_host(pending_results)
            pending_results.clear()
    if pending_results:
        yield _copy_to_host(pending_results)


def _copy_to_host(
    pending_results: list[tuple[list[int], torch.Tensor]],
) -> tuple[list[int], np.ndarray]:
    values_M2 = torch.cat([values for _, values in pending_results]).double().cpu().numpy()
    return [number for documents, _ in pending_results for number in documents], values_M2


def hash_init_adapter(tune: TuneConfig) -> str | None:
    """Return a hash of the reference's initial adapter; "" if the reference is the base model.

    None if the objective uses no reference.

    Raises:
        DataError: if the adapter cannot be read.
    """
    if not tune.has_reference:
        return None
    if tune.init_from is None:
        return ""
    try:
        weights = (Path(tune.init_from) / ADAPTER_FILE).read_bytes()
    except OSError as error:
        raise DataError(
            f"tune.init_from={tune.init_from} is the reference of this run, and {ADAPTER_FILE} "
            f"in it cannot be read ({error.strerror}{find_remedy(error)}); restore it"
        ) from None
    return hashlib.sha256(weights).hexdigest()


def require_same_init_adapter(saved_state: RunState, tune: TuneConfig) -> None:
    """Check that a resumed run uses the same reference model as before.

    Raises:
        ConfigError: if the reference differs. DataError: see ``hash_init_adapter``.
    """
    init_hash = hash_init_adapter(tune)
    if init_hash is None or saved_state.start in (None, init_hash):
        return
    origin, path = flatten_settings(saved_state.config).get("tune.init_from"), tune.init_from
    diff = f"{path} has other weights than in the checkpoint's run"
    if origin != path:
        diff = f"the run started from {origin or 'no adapter'}, but {path or 'none'} is given now"
    raise ConfigError(
        f"tune.init_from: with tune.objective={tune.objective} answers are compared with the model "
        f"as it was at the start, and {diff}. Give the old adapter, or another run.dir"
    )


def _cache_key(model: Model, store: TokenStore, device: torch.device) -> str:
    """Return a hash of everything that log-probabilities computed on ``device`` depend on."""
    tune, train = model.config.tune, model.config.train
    facts = [
        _CACHE_VERSION,
        store.attributes.content,
        store.attributes.tokenizer_fingerprint,
        model.built.architecture_hash,
        model.weights_fingerprint,
        hash_init_adapter(tune),
        str(model.built.dtype),
        tune.base_dtype or tune.method == "qlora",
        train.float8,
        model.built.seq_len if has_length_dependent_scaling(model.built.config) else None,
    ]
    if tune.init_from is not None:  # these scale its weights, and equal the adapter's own settings
        facts += [tune.rank, tune.alpha, tune.rslora, tune.alpha_pattern, tune.expert_rank]
    if tune.base_dtype and not explain_missing_float8_matmuls(device, model.built.dtype):
        facts.append("float8 products")
    if multiplies_in_tf32(train, model.built.dtype, find_architecture(device)):
        facts.append("tf32")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read_reference(file: Path, num_documents: int) -> np.ndarray | None:
    if not file.exists():
        return None
    try:
        content = file.read_bytes()
        values, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(values).digest() != digest:
            raise ValueError("its bytes are not those that were written")
        reference: np.ndarray = np.load(io.BytesIO(values), allow_pickle=False)
    except PermissionError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}{find_remedy(error)}") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{file} is damaged ({error}); remove it, and it is computed again"
        ) from None
    if reference.shape != (num_documents, 2):
        raise DataError(f"{file} is of other data; remove it, and it is computed again")
    return reference


def _write_reference(file: Path, reference: np.ndarray) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        np.save(content, reference)
        values = content.getvalue()
        write_file(file, values + hashlib.sha256(values).digest())  # np.load ignores the digest
    except OSError as error:
        raise DataError(
            f"{file} cannot be written: {error.strerror or error}{find_remedy(error)}"
        ) from None


class KlTerms(NamedTuple):
    """The summed differences of mismatched answers from their reference, and their number."""

    log_prob_change_sum: float = 0.0
    num_answers: float = 0.0


def sum_kl_terms(
    engine: Engine, mismatched_batches: Iterable[Batch], is_within_step: bool = False
) -> KlTerms:
    """Return this rank's part of a step's KL estimate, from its mismatched answers.

    The host waits for the device only once, at the end.
    """
    all_pairs, results = [], []
    for batch, log_probs in engine.objective_sums(
        mismatched_batches, AnswerLogProbabilities(), is_within_step
    ):
        if batch.pairs is not None and len(batch.pairs.num_loss_tokens_P2):
            all_pairs.append(batch.pairs)
            results.append(log_probs)
    if not results:
        return KlTerms()
    change_P = torch.cat(results).view(-1, 2)[:, 1].cpu()
    change_P = change_P - torch.cat([pairs.reference_log_probs_P2[:, 1] for pairs in all_pairs])
    has_answer_P = torch.cat([pairs.num_loss_tokens_P2[:, 1] for pairs in all_pairs]) > 0
    change_P = torch.where(has_answer_P, change_P, 0.0)
    return KlTerms(float(change_P.double().sum()), int(has_answer_P.sum()))


def clamped_mean_kl(log_prob_change_sum: float, num_answers: float) -> float:
    """Return the mean difference of all ranks' mismatched answers, clamped at 0 from below."""
    return max(0.0, log_prob_change_sum / max(1.0, num_answers))


def mean_kl(engine: Engine, mismatched_batches: Iterable[Batch], comm: Comm) -> float:
    """Return the mean of mismatched answers' log-probabilities minus the reference's. Collective.

    It is at least 0, and covers all mismatched answers of a step: it does not depend on ranks or
    micro-batches.
    """
    return clamped_mean_kl(*comm.sum([*sum_kl_terms(engine, mismatched_batches)]))


def require_matching_reference(result: StepResult, plan: StepPlan) -> None:
    """Check in the first step that the model equals its reference: nothing has been learned yet.

    Raises:
        HpcTuneError: if their log-probabilities differ by more than rounding.
    """
    sums = PreferenceSums(*result.sums)
    change = sums.log_prob_change / max(1.0, sums.reference_magnitude)
    if change > _TOLERANCE_BY_ITEMSIZE[plan.itemsize]:
        raise HpcTuneError(
            f"step 1: the answers' log-probabilities differ by {change:.2%} from the reference's, "
            "and should be the same before anything is learned. The reference is not of this model "
            "or of these rows: remove reference-*.npy from the folder of prepared data "
            "(data.cache) and start again; if the error recurs, report it with the model's "
            "config.json"
        )
