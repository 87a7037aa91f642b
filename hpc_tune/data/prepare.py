"""Raw data -> the file of prepared data: in parallel, the same bytes for any number of ranks.

    plan_preparation  every rank  path -> chunks, and a folder for parts beside the output
    tokenize_chunks   rank r      chunks r, r + num_ranks, ... -> one part file (.npz) each
    join_parts        rank 0      parts in order of the chunks -> the HDF5 file; removes the folder

If a step fails on one rank, all ranks raise (``PreparingRanks.run_and_agree``). The folder's
name holds a hash of the data and the settings, so that complete parts of a killed run are used by
the next one, on any number of ranks, and never by a run with other settings.

Memory: one line (or 4 MiB of plain text, or one Parquet batch) with its tokens, and one call of the
tokenizer (about 25 MB), whatever the file's size.
"""

import collections
import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpc_tune import __version__
from hpc_tune.data.chats import LossOn
from hpc_tune.data.chunks import Chunk, hash_file_ends, list_chunks, read_chunk, source_fingerprint
from hpc_tune.data.counts import ANSWER_BEYOND_SEQ_LEN, Counters, ReadFindings
from hpc_tune.data.encode import Encoder, PreferenceEncoder, make_encoder
from hpc_tune.data.files import Paths, as_list, join_paths
from hpc_tune.data.hdf5_format import PAIR_VERSION, VERSION, Attributes, TokenStore
from hpc_tune.data.reading import DEFAULT_READ_OPTIONS, ReadOptions, require_columns
from hpc_tune.data.tokenizer import (
    FastTokenizer,
    find_template_date,
    fingerprint,
    num_ids,
    tokenizer_name,
)
from hpc_tune.data.writer import Block, write_store
from hpc_tune.errors import DataError, HpcTuneError, find_remedy
from hpc_tune.files import replace_atomically
from hpc_tune.log import log
from hpc_tune.world.comm import RunAndAgree, run_on_single_rank

STALE_PARTS_S = 24 * 3600
_PART_SUMMARY_FILE = "facts.json"
# Versions of what is learned of a row: if they change, data is prepared again.
_ENCODING_VERSION, _LABELS_ENCODING_VERSION = 10, 11
ReportProgress = Callable[[int, int], None]
T = TypeVar("T")


@dataclass(frozen=True)
class PrepareSettings:
    """What determines, besides the tokenizer, which documents raw data becomes."""

    seq_len: int
    loss_on: LossOn = "answers"
    reading: ReadOptions = DEFAULT_READ_OPTIONS


@dataclass(frozen=True)
class PreparePlan:
    """What is to be prepared, and where its parts are kept meanwhile."""

    out: Path
    files: tuple[tuple[str, int, str], ...]
    chunks: tuple[Chunk, ...]
    settings: PrepareSettings
    attributes: Attributes
    parts_folder: Path

    def part_file(self, chunk_index: int) -> Path:
        """Return the file for a chunk's tokens."""
        return self.parts_folder / f"{chunk_index:08d}.part"


@dataclass(frozen=True)
class PreparingRanks:
    """The ranks that prepare together; by default this process alone.

    ``run_and_agree`` runs a step on every rank and raises everywhere if it fails on one; it also
    makes the ranks wait for each other, so its timeout must be longer than the time to tokenize.
    ``broadcast`` returns rank 0's value: its plan, since modification times, and so the names of
    parts, differ if each node has a copy of the source; and whether another job has written the
    file. ``threads`` is the number of cores that this rank may use for the tokenizer; None leaves
    that to the environment.
    """

    rank: int = 0
    num_ranks: int = 1
    run_and_agree: RunAndAgree = run_on_single_rank
    broadcast: Callable[[Any], Any] = lambda own: own
    threads: int | None = None

    def run_step(self, work: Callable[[], T]) -> T:
        """Run a step; an OSError becomes a DataError. Collective."""

        def step() -> T:
            try:
                return work()
            except OSError as error:
                raise DataError(f"{error}{find_remedy(error)}") from None

        return self.run_and_agree("preparing the data", step)


SINGLE_RANK = PreparingRanks()


def cache_file_name(paths: Paths, tokenizer: str, settings: PrepareSettings) -> str:
    """Return a file name for data prepared from ``paths``; ``tokenizer``: its fingerprint.

    The name changes if the source, the settings, the tokenizer or hpc_tune's version change.
    """
    first, *other_paths = as_list(paths)
    stem = re.sub(r"[^\w.-]+", "-", Path(first).stem).strip("-") or "data"
    stem += f"-and-{len(other_paths)}" if other_paths else ""
    return f"{stem}-{_cache_key(paths, tokenizer, settings)}.h5"


def plan_preparation(
    paths: Paths, out: str | Path, tokenizer: FastTokenizer, settings: PrepareSettings
) -> PreparePlan:
    """List what has to be done; reads only the files' ends and their indexes, and writes nothing.

    Raises:
        DataError: if the source is missing, empty or of no known kind, or the tokenizer is not a
            fast one.
    """
    out, tokenizer_hash = Path(out), fingerprint(tokenizer)
    attributes = Attributes(
        tokenizer=tokenizer_name(tokenizer),
        tokenizer_fingerprint=tokenizer_hash,
        vocab_size=num_ids(tokenizer),
        seq_len=settings.seq_len,
        loss_on=settings.loss_on,
        template_date=find_template_date(tokenizer),
        source=join_paths(paths),
        hpc_tune_version=__version__,
        form=settings.reading.form,
    )
    parts_folder = out.with_name(f".{out.name}.{_cache_key(paths, tokenizer_hash, settings)}.parts")
    chunks = tuple(list_chunks(paths))
    return PreparePlan(out, hash_file_ends(paths), chunks, settings, attributes, parts_folder)


def tokenize_chunks(
    plan: PreparePlan,
    tokenizer: FastTokenizer,
    ranks: PreparingRanks = SINGLE_RANK,
    report: ReportProgress | None = None,
) -> None:
    """Write the parts of this rank's chunks; complete parts of an earlier run are kept.

    ``report(done, total)`` is called after each chunk of this rank.

    Raises:
        DataError: for raw data that cannot be used, saying where it is.
    """
    plan.parts_folder.mkdir(parents=True, exist_ok=True)
    numbers = range(ranks.rank, len(plan.chunks), ranks.num_ranks)
    settings = plan.settings
    with _limit_tokenizer_threads(ranks.threads):
        for num_done, number in enumerate(numbers, 1):
            if not zipfile.is_zipfile(plan.part_file(number)):
                encoder = make_encoder(
                    settings.reading.form, tokenizer, settings.seq_len, settings.loss_on
                )
                _write_part(plan, number, encoder)
            if report is not None:
                report(num_done, len(numbers))


def join_parts(plan: PreparePlan) -> Counters:
    """Join all parts into ``plan.out`` and remove them; for one rank, after all have tokenized.

    Raises:
        DataError: if parts are missing or damaged, or no example is left.
    """
    counters, findings, histogram = Counters(), ReadFindings(), collections.Counter[int]()
    num_tokens = 0
    for number in range(len(plan.chunks)):
        with _open_part(plan, number) as part:
            facts = json.loads(part[_PART_SUMMARY_FILE])
        counters.add(Counters(**facts["counters"]))
        findings.add(ReadFindings(**facts["findings"]))
        histogram.update(dict(facts["sizes"]))
        num_tokens += facts["tokens"]
    _check_counters(plan, counters, findings)
    attributes = replace(plan.attributes, counters=counters)
    write_store(plan.out, _read_blocks(plan), histogram, attributes, num_tokens)
    shutil.rmtree(plan.parts_folder, ignore_errors=True)
    _remove_stale_parts(plan.out)
    return counters


def _check_counters(plan: PreparePlan, counters: Counters, findings: ReadFindings) -> None:
    """Log what was found in the data; refuse data without an example to learn from."""
    reading, source = plan.settings.reading, plan.attributes.source
    if counters.documents:
        require_columns(source, reading, findings)
    for line in findings.lines() if reading.part != "held-out" else ():
        log.info("%s: %s", source, line)
    if counters.documents:
        return
    if reading.part != "all" and findings.num_elsewhere:
        raise DataError(
            f"data.eval_fraction={reading.held_out:g} leaves no example of {source} for the "
            f"{reading.part} part; choose another fraction, or set data.eval_path"
        )
    if list(counters.dropped) == [ANSWER_BEYOND_SEQ_LEN] and not (
        findings.num_bad or findings.num_marked
    ):
        raise DataError(
            f"{source}: all {counters.dropped[ANSWER_BEYOND_SEQ_LEN]} answers begin after token "
            f"{plan.settings.seq_len}: raise data.seq_len"
        )
    reasons = [f"{n} dropped: {reason}" for reason, n in counters.dropped.items()]
    reasons += [f"{findings.num_bad} bad rows skipped"] if findings.num_bad else []
    reasons += [f"{findings.num_marked} left out, as marked"] if findings.num_marked else []
    raise DataError(
        f"{source} gives no example to learn from"
        f" ({'; '.join(reasons) or 'it holds no records'}); expected at least one"
    )


def _require_same_files(own_plan: PreparePlan, plan: PreparePlan) -> None:
    """Check that this rank sees the files of rank 0: each node may have copies."""
    for files in zip_longest(own_plan.files, plan.files):
        if files[0] != files[1]:
            here, there = (f"{f[0]} of {f[1]:,} bytes" if f else "no such file" for f in files)
            raise DataError(
                f"{own_plan.attributes.source} is not the same on all nodes: {here} on this one, "
                f"{there} on rank 0's (or other content); copy it to each again, or to a folder "
                "that they share"
            )


def prepare_data(
    paths: Paths,
    out: str | Path,
    tokenizer: FastTokenizer,
    settings: PrepareSettings,
    ranks: PreparingRanks = SINGLE_RANK,
    report: ReportProgress | None = None,
) -> Counters:
    """Plan, tokenize and join the parts; every rank calls it and gets the counters.

    Several jobs may prepare the same file at once: a job that comes late finds its parts gone and
    uses the file that the first one wrote.

    Raises:
        DataError: if a rank cannot use or write the data; other ranks then raise a RemoteError.
    """
    old_stamp = _file_stamp(Path(out), ranks)
    own_plan = ranks.run_step(lambda: plan_preparation(paths, out, tokenizer, settings))
    plan: PreparePlan = ranks.broadcast(own_plan)

    def tokenize_own_chunks() -> None:
        _require_same_files(own_plan, plan)
        tokenize_chunks(plan, tokenizer, ranks, report)

    failure: HpcTuneError | None = None
    try:
        ranks.run_step(tokenize_own_chunks)
    except HpcTuneError as error:  # on all ranks; the parts may be gone
        failure = error
    is_there: bool = ranks.broadcast(_file_stamp(plan.out, ranks) != old_stamp)
    if failure is not None and not is_there:
        raise failure

    def join() -> None:
        if ranks.rank != 0:
            return
        try:
            if not is_there:
                join_parts(plan)
        except (HpcTuneError, OSError):
            if _file_stamp(plan.out, ranks) == old_stamp:
                raise
        shutil.rmtree(plan.parts_folder, ignore_errors=True)

    ranks.run_step(join)
    return TokenStore.open(plan.out).attributes.counters


def _file_stamp(file: Path, ranks: PreparingRanks) -> tuple[int, int] | None:
    """Return a stamp that differs between a file and one that replaces it; None without a file.

    Only rank 0 looks: if a rank on another node has looked in vain, NFS may keep telling it that
    there is no file for up to a minute after rank 0 has written it.
    """
    if ranks.rank != 0:
        return None
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _cache_key(paths: Paths, tokenizer: str, settings: PrepareSettings) -> str:
    values, version = asdict(settings), PAIR_VERSION
    if settings.reading.form == "answers":
        version = VERSION
        del values["reading"]["form"]
    encoding = _LABELS_ENCODING_VERSION if settings.reading.form == "labels" else _ENCODING_VERSION
    facts = [version, encoding, __version__, source_fingerprint(paths), tokenizer, *values.values()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _limit_tokenizer_threads(threads: int | None) -> Iterator[None]:
    """Limit the tokenizer to ``threads``, this rank's share of the cores; None changes nothing.

    The size of its thread pool is read once per process, TOKENIZERS_PARALLELISM at each call.
    """
    if threads is None:
        yield
        return
    variables = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
    if threads > 1 and "RAYON_NUM_THREADS" not in os.environ:
        variables["RAYON_NUM_THREADS"] = str(threads)
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _write_part(plan: PreparePlan, chunk_index: int, encoder: Encoder | PreferenceEncoder) -> None:
    """Write a chunk as numpy's .npz: the arrays of each block in turn, then facts about all."""
    findings, histogram = ReadFindings(), np.zeros(plan.settings.seq_len + 1, dtype=np.int64)
    num_tokens = 0
    examples = read_chunk(plan.chunks[chunk_index], plan.settings.reading, findings)
    with (
        replace_atomically(plan.part_file(chunk_index)) as temporary,
        zipfile.ZipFile(temporary, "w") as part,
    ):
        for index, block in enumerate(encoder.encode(examples)):
            for name, array in block.arrays.items():
                with part.open(f"{index}/{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array)
            histogram += np.bincount(block.packed_lengths, minlength=len(histogram))
            num_tokens += len(block.tokens)
        encoder.counters.bad_rows = findings.num_bad
        packed_lengths = np.flatnonzero(histogram)
        facts = {
            "counters": asdict(encoder.counters),
            "findings": asdict(findings),
            "tokens": num_tokens,
            "sizes": [
                *zip(packed_lengths.tolist(), histogram[packed_lengths].tolist(), strict=True)
            ],
        }
        part.writestr(_PART_SUMMARY_FILE, json.dumps(facts))


@contextlib.contextmanager
def _open_part(plan: PreparePlan, chunk_index: int) -> Iterator[Any]:
    """Open a part to read arrays from it by name; each array's CRC is checked as it is read.

    Raises:
        DataError: if the part is missing or may not be read, or what the ``with`` block reads of it
            is damaged.
    """
    try:
        with np.load(plan.part_file(chunk_index), allow_pickle=False) as part:
            yield part
    except FileNotFoundError:
        raise DataError(
            f"the tokens of chunk {chunk_index + 1} of {len(plan.chunks)} are missing in "
            f"{plan.parts_folder}; the folder of the prepared file must be on a file system that "
            "all nodes share. Set data.cache to such a folder"
        ) from None
    except PermissionError as error:
        raise DataError(f"{error}{find_remedy(error)}") from None
    except (OSError, ValueError, EOFError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{plan.part_file(chunk_index)} is damaged ({error}); remove its folder and prepare "
            "again"
        ) from error


def _read_blocks(plan: PreparePlan) -> Iterator[Block]:
    for number in range(len(plan.chunks)):
        with _open_part(plan, number) as part:
            part_names = frozenset(part.files)
            for index in count():
                names = [f.name for f in fields(Block) if f"{index}/{f.name}" in part_names]
                if not names:
                    break
                yield Block(**{name: part[f"{index}/{name}"] for name in names})


def _remove_stale_parts(out: Path) -> None:
    """Remove the parts that killed runs with other settings left here a day ago or more."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*.parts"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_PARTS_S:
                shutil.rmtree(folder, ignore_errors=True)
