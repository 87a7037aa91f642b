"""Raw data -> the file of prepared data: in parallel, the same bytes for any number of ranks.

    plan       every rank   path -> chunks, and a folder for parts beside the output
    tokenize   rank r       chunks r, r + size, ... -> one part file each
    assemble   rank 0       parts in the order of the chunks -> the HDF5 file; the folder is removed

The caller waits and agrees on errors between the steps; nothing here waits for another rank. The
folder's name holds a hash of the data and the settings, so that a killed run's finished parts are
used by the next one, on whatever number of ranks, and never by a run with other settings.

Memory: one line (or 4 MiB of plain text, or one Parquet batch) with its tokens, and one call of the
tokenizer (about 25 MB), whatever the file's size.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpc_tune import __version__
from hpc_tune.atomic_file import replacing
from hpc_tune.data.chats import template_date_of
from hpc_tune.data.encode import Encoder, LossOn
from hpc_tune.data.files import Paths, as_list, shown
from hpc_tune.data.hdf5_format import VERSION, Attributes, Counters, TokenStore
from hpc_tune.data.reading import PLAIN, Findings, Reading, require_columns
from hpc_tune.data.sources import Chunk, ends_of_files, identity, list_chunks, read_chunk
from hpc_tune.data.tokenizer import FastTokenizer, describe, fingerprint
from hpc_tune.data.writer import Block, token_dtype, write_store
from hpc_tune.errors import DataError, HpcTuneError
from hpc_tune.log import log

STALE_S = 24 * 3600
_PART_END = b"hpctpart"
_HEADER = np.dtype([("documents", "<i8"), ("tokens", "<i8")])
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """What is to be prepared, and where its parts are kept meanwhile."""

    source: str
    out: Path
    files: tuple[tuple[str, int, str], ...]
    chunks: tuple[Chunk, ...]
    reading: Reading
    seq_len: int
    loss_on: LossOn
    fingerprint: str
    tokenizer: str
    vocab_size: int
    template_date: str
    parts: Path

    def part(self, number: int) -> Path:
        """Return the place of a chunk's tokens."""
        return self.parts / f"{number:08d}.part"


def cache_name(
    paths: Paths,
    mark: str,
    *,
    seq_len: int,
    loss_on: LossOn = "answers",
    reading: Reading = PLAIN,
) -> str:
    """Return a file name for data prepared from ``paths`` by the tokenizer of fingerprint ``mark``.

    It is another one if the source, the settings or the tokenizer change.
    """
    first, *others = as_list(paths)
    stem = re.sub(r"[^\w.-]+", "-", Path(first).stem).strip("-") or "data"
    stem += f"-and-{len(others)}" if others else ""
    return f"{stem}-{_key(paths, mark, seq_len, loss_on, reading)}.h5"


def plan(
    paths: Paths,
    out: str | Path,
    tokenizer: FastTokenizer,
    *,
    seq_len: int,
    loss_on: LossOn = "answers",
    reading: Reading = PLAIN,
) -> Plan:
    """Look at the source and say what has to be done; reads ends of files and writes nothing.

    Raises:
        DataError: if the source is missing, empty or of no known kind, or the tokenizer is not a
        fast one.
    """
    out, mark = Path(out), fingerprint(tokenizer)
    key = _key(paths, mark, seq_len, loss_on, reading)
    return Plan(
        source=shown(paths),
        out=out,
        files=ends_of_files(paths),
        chunks=tuple(list_chunks(paths)),
        reading=reading,
        seq_len=seq_len,
        loss_on=loss_on,
        fingerprint=mark,
        tokenizer=describe(tokenizer),
        vocab_size=len(tokenizer),
        template_date=template_date_of(tokenizer),
        parts=out.with_name(f".{out.name}.{key}.parts"),
    )


def tokenize(
    work: Plan,
    tokenizer: FastTokenizer,
    rank: int = 0,
    size: int = 1,
    *,
    threads: int | None = None,
    report: Report | None = None,
) -> None:
    """Write the parts of this rank's chunks; parts that are there already are kept.

    ``threads`` is the number of cores that this rank may use for the tokenizer; None leaves that to
    the environment. ``report(done, total)`` is called after each chunk of this rank.

    Raises:
        DataError: for raw data that cannot be used, with its place.
    """
    work.parts.mkdir(parents=True, exist_ok=True)
    mine = range(rank, len(work.chunks), size)
    with _tokenizer_threads(threads):
        for done, number in enumerate(mine, 1):
            if not _is_complete(work.part(number)):
                _write_part(work, number, Encoder(tokenizer, work.seq_len, work.loss_on))
            if report is not None:
                report(done, len(mine))


def assemble(work: Plan) -> Counters:
    """Join all parts into ``work.out`` and remove them; for one rank, after all have tokenised.

    Raises:
        DataError: if parts are missing, or no example is left.
    """
    counters, histogram = Counters(), np.zeros(work.seq_len + 1, dtype=np.int64)
    findings = Findings()
    for number in range(len(work.chunks)):
        of_part, found = _scan_part(_open_part(work, number), histogram)
        counters.add(of_part)
        findings.add(found)
    _check(work, counters, findings)
    attributes = Attributes(
        content="",
        tokenizer=work.tokenizer,
        tokenizer_fingerprint=work.fingerprint,
        vocab_size=work.vocab_size,
        highest_token=0,
        seq_len=work.seq_len,
        loss_on=work.loss_on,
        template_date=work.template_date,
        source=work.source,
        counters=counters,
        hpc_tune_version=__version__,
    )
    lengths = np.flatnonzero(histogram)
    counts = dict(zip(lengths.tolist(), histogram[lengths].tolist(), strict=True))
    write_store(work.out, _all_blocks(work), counts, attributes)
    shutil.rmtree(work.parts, ignore_errors=True)
    _remove_stale(work.out)
    return counters


def _check(work: Plan, counters: Counters, findings: Findings) -> None:
    """Say what was found in the data; refuse what nothing can be learned from."""
    reading = work.reading
    if counters.documents:
        require_columns(work.source, reading, findings)
    for line in findings.lines() if reading.part != "held-out" else ():
        log.info("%s: %s", work.source, line)
    if counters.documents:
        return
    if reading.part != "all" and findings.num_elsewhere:
        raise DataError(
            f"data.eval_fraction={reading.held_out:g} leaves no example of {work.source} for the "
            f"{reading.part} part; choose another fraction, or set data.eval_path"
        )
    reasons = [f"{n} dropped: {why}" for why, n in counters.dropped.items()]
    reasons += [f"{findings.num_bad} bad rows skipped"] if findings.num_bad else []
    reasons += [f"{findings.num_marked} left out, as marked"] if findings.num_marked else []
    raise DataError(
        f"{work.source} gives no example to learn from"
        f" ({'; '.join(reasons) or 'it holds no records'}); expected at least one"
    )


def _require_copy(own: Plan, work: Plan) -> None:
    """Check that this rank sees the files of rank 0: on its node they may be copies."""
    for mine, its in zip_longest(own.files, work.files):
        if mine != its:
            found = f"{mine[0]} of {mine[1]:,} bytes" if mine else "no such file"
            there = f"{its[0]} of {its[1]:,} bytes" if its else "no such file"
            raise DataError(
                f"{work.source} is not the same on all nodes: {found} on this one, {there} on rank "
                "0's (or another content); copy it anew to each, or to a folder that they share"
            )


def raise_it(error: BaseException | None) -> None:
    """Agree with nobody: what a world of one rank does with an error."""
    if error is not None:
        raise error


def prepare(
    paths: Paths,
    out: str | Path,
    tokenizer: FastTokenizer,
    *,
    seq_len: int,
    loss_on: LossOn = "answers",
    reading: Reading = PLAIN,
    rank: int = 0,
    size: int = 1,
    agree: Callable[[BaseException | None], None] = raise_it,
    share: Callable[[Plan], Plan] = lambda own: own,
    threads: int | None = None,
    report: Report | None = None,
) -> Counters:
    """Do all three steps; every rank calls it and gets the counters.

    ``agree(error)`` is called by every rank after each step, and must raise everywhere if any rank
    brings an error; it is also what makes the ranks wait for each other, so its time-out must be
    longer than the tokenising. ``share`` returns the plan of rank 0: times of change, and so the
    names of parts, differ where each node has a copy of the source. Several jobs may prepare the
    same file at once: who is late finds his parts gone and takes the file of the first.
    """
    own: Plan | None = None
    error: BaseException | None = None
    before = _stamp(Path(out))
    try:
        own = plan(paths, out, tokenizer, seq_len=seq_len, loss_on=loss_on, reading=reading)
    except (HpcTuneError, OSError) as caught:
        error = caught
    agree(error)
    assert own is not None, "agree() must raise when a rank brings an error"
    work = share(own)
    try:
        _require_copy(own, work)
        tokenize(work, tokenizer, rank, size, threads=threads, report=report)
    except (HpcTuneError, OSError) as caught:
        error = None if _stamp(work.out) != before else caught
    agree(error)
    try:
        if rank == 0 and _stamp(work.out) == before:
            assemble(work)
    except (HpcTuneError, OSError) as caught:
        error = caught if _stamp(work.out) == before else None
    if rank == 0 and error is None:
        shutil.rmtree(work.parts, ignore_errors=True)
    agree(error)
    return TokenStore.open(work.out).attributes.counters


def _stamp(file: Path) -> tuple[int, int] | None:
    """Tell a file from the one that takes its place; None where there is none."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _key(paths: Paths, mark: str, seq_len: int, loss_on: str, reading: Reading) -> str:
    facts = [VERSION, __version__, identity(paths), mark, seq_len, loss_on, asdict(reading)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _tokenizer_threads(threads: int | None) -> Iterator[None]:
    """Give the tokenizer its share of the cores: ranks with all cores each would fight for them.

    The size of its thread pool is read once in the life of a process, TOKENIZERS_PARALLELISM at
    each call.
    """
    if threads is None:
        yield
        return
    wanted = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
    if threads > 1 and "RAYON_NUM_THREADS" not in os.environ:
        wanted["RAYON_NUM_THREADS"] = str(threads)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _write_part(work: Plan, number: int, encoder: Encoder) -> None:
    """Write a chunk as blocks (header, lengths, tokens, mask), and what was found at the end."""
    part, findings = work.part(number), Findings()
    examples = read_chunk(work.chunks[number], work.reading, findings)
    with replacing(part) as temporary, temporary.open("wb") as file:
        for block in encoder.encode(examples):
            header = np.array([(len(block.lengths), len(block.tokens))], dtype=_HEADER)
            file.write(header.tobytes())
            file.write(block.lengths.astype("<i8").tobytes())
            file.write(block.tokens.tobytes())
            file.write(block.loss_mask.tobytes())
        encoder.counters.bad_rows = findings.num_bad
        facts = json.dumps([asdict(encoder.counters), asdict(findings)]).encode()
        file.write(np.array([(-1, len(facts))], dtype=_HEADER).tobytes())
        file.write(facts + _PART_END)


def _is_complete(part: Path) -> bool:
    try:
        with part.open("rb") as file:
            file.seek(-len(_PART_END), os.SEEK_END)
            return file.read() == _PART_END
    except OSError:
        return False


def _open_part(work: Plan, number: int) -> "_Part":
    if not _is_complete(work.part(number)):
        raise DataError(
            f"the tokens of chunk {number + 1} of {len(work.chunks)} are missing in {work.parts};"
            " the folder of the prepared file must be on a file system that all nodes share. Set"
            " data.cache to such a folder"
        )
    return _Part(work.part(number), token_dtype(work.vocab_size))


@dataclass(frozen=True)
class _Part:
    path: Path
    dtype: np.dtype

    def blocks(self) -> Iterator[Block]:
        with self.path.open("rb") as file:
            while (header := _read(file, _HEADER, 1)[0])["documents"] >= 0:
                lengths = _read(file, np.dtype("<i8"), header["documents"])
                tokens = _read(file, self.dtype, header["tokens"])
                yield Block(lengths, tokens, _read(file, np.dtype(np.uint8), header["tokens"]))


def _scan_part(part: _Part, histogram: np.ndarray) -> tuple[Counters, Findings]:
    """Add a part's lengths to the histogram, passing over its tokens; return what it tells."""
    with part.path.open("rb") as file:
        while (header := _read(file, _HEADER, 1)[0])["documents"] >= 0:
            lengths = _read(file, np.dtype("<i8"), header["documents"])
            histogram += np.bincount(lengths, minlength=len(histogram))
            file.seek(int(header["tokens"]) * (part.dtype.itemsize + 1), os.SEEK_CUR)
        counters, findings = json.loads(file.read(int(header["tokens"])))
        return Counters(**counters), Findings(**findings)


def _all_blocks(work: Plan) -> Iterator[Block]:
    for number in range(len(work.chunks)):
        yield from _open_part(work, number).blocks()


def _read(file: BinaryIO, dtype: np.dtype, count: int) -> np.ndarray:
    data = file.read(int(count) * dtype.itemsize)
    if len(data) < int(count) * dtype.itemsize:
        raise DataError(f"{file.name} is cut off; remove its folder and prepare again")
    return np.frombuffer(data, dtype=dtype)


def _remove_stale(out: Path) -> None:
    """Remove the parts that killed runs with other settings left here a day ago or more."""
    for folder in out.parent.glob(f".{out.name}.*.parts"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
