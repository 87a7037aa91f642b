"""The documents that tools/bench.py train gives to all contenders: read, spread, tokenised once."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_watch import watched

from hpc_tune.data.chunks import list_pydocs_modules, read_pydocs_module
from hpc_tune.data.raw_files import is_array, line_number, read_array, read_lines
from hpc_tune.data.records import WrongRecord
from hpc_tune.errors import DataError


def read_records(path: Path | None) -> list[Any]:
    """Return the objects of a JSON array or of JSON lines; without a file those of builtin:pydocs.

    Raises:
        DataError: if the file holds anything else, or nothing.
    """
    if path is None:
        pairs = [
            pair for module in list_pydocs_modules(False) for pair in read_pydocs_module(module)
        ]
        return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    in_array = is_array(path)
    rows = read_array(path) if in_array else read_lines(path, 0, path.stat().st_size)
    records = []
    for position, value in rows:
        if not isinstance(value, dict):
            where = f"element {position}" if in_array else f"line {line_number(path, position)}"
            found = value if isinstance(value, WrongRecord) else f"found {json.dumps(value)[:40]}"
            raise DataError(f"{path}, {where}: {found}; expected one JSON object per row")
        records.append(value)
    if not records:
        raise DataError(f"{path} is empty; expected one JSON object per row")
    return records


def prepare(asked: argparse.Namespace, examples: list[Any], folder: Path) -> tuple[Path, Path]:
    """Tokenise ``examples`` once for all; return hpc_tune's file and the peers'."""
    from hpc_tune.batch import IGNORED_LABEL  # they import torch
    from hpc_tune.data.hdf5_format import TokenStore

    # Spread over the whole, so that a file that is ordered gives a fair part of itself.
    examples = examples[:: max(1, len(examples) // asked.examples)][: asked.examples]
    if not asked.ragged:  # one long text is cut into rows, of which the last alone is shorter
        examples = [{"text": "\n\n".join(word for one in examples for word in _words(one))}]
    raw, prepared, tokens = folder / "raw.jsonl", folder / "data.h5", folder / "tokens.json"
    raw.write_text("".join(json.dumps(e) + "\n" for e in examples), encoding="utf-8")
    command = [sys.executable, "-m", "hpc_tune", "prepare", "--out", str(prepared)]
    words = [
        f"model.path={asked.model.resolve()}",
        f"data.path={raw}",
        f"data.seq_len={asked.seq_len}",
    ]
    watched([*command, *words], folder, "cpu")
    store = TokenStore.open(prepared)
    documents = []
    for number in range(store.num_documents):
        ids, learned = store.document(number)
        kept = list(zip(ids.tolist(), learned.tolist(), strict=True))
        labels = [token if is_learned else IGNORED_LABEL for token, is_learned in kept]
        documents.append((ids.tolist(), labels))
    tokens.write_text(json.dumps(documents), encoding="utf-8")
    return prepared, tokens


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _words(inner)
