"""Which model a directory holds: by the names and shapes of its tensors, and by some of its values.

A model and its instruct version have the same names, shapes and config.json.
"""

import hashlib
import json
from pathlib import Path

import torch

from hpc_tune.model.config_json import read_config_json
from hpc_tune.model.shapes import ShapeIndex
from hpc_tune.model.weights import TensorIndex

_IGNORED_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_MAX_TENSORS = 1024  # a second on a parallel file system
_VALUES = 64  # of each: versions that were trained further differ in nearly all of them


def hash_model(directory: Path, index: TensorIndex | ShapeIndex) -> str:
    """Return a hash over names and shapes of a model's tensors and its config.json."""
    shapes = sorted((name, list(index.shapes[name])) for name in index.stored)
    config = read_config_json(directory)
    kept = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    return hashlib.sha256(json.dumps([shapes, kept], sort_keys=True).encode()).hexdigest()


def fingerprint_weights(index: TensorIndex) -> str:
    """Return a hash over some values of each of a model's tensors, of 1,024 where it has more.

    It does not depend on the files that they lie in, and is the same for a copy in bf16.

    Raises:
        DataError: if they cannot be read.
    """
    chosen = sorted(index.stored, key=_draw_key)[:_MAX_TENSORS]
    by_file = sorted(chosen, key=lambda name: str(index.pieces[name][0].file))
    sampled = {name: _hash_middle(index, name) for name in by_file}
    whole = hashlib.sha256()
    for name in sorted(sampled):
        whole.update(f"{name} {sampled[name]}\n".encode())
    return whole.hexdigest()


def _draw_key(name: str) -> str:
    """Return what tensors are drawn by, so that all kinds of layers are among them."""
    return hashlib.sha256(name.encode()).hexdigest()


def _hash_middle(index: TensorIndex, name: str) -> str:
    """Return a hash over values in the middle of a tensor, as bf16."""
    shape = index.shapes[name]
    if not all(shape):
        return "empty"
    box = [1] * len(shape)
    if shape:
        box[-1] = min(shape[-1], _VALUES)
    values = torch.empty(box, dtype=torch.float32)
    offset = tuple((size - taken) // 2 for size, taken in zip(shape, box, strict=True))
    index.fill(values, name, offset)

    return hashlib.sha256(
        values.bfloat16().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
