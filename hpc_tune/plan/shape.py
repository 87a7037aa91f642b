"""A model known by its config.json alone, and built without a byte of weights."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import DTYPES, BuiltModel, build
from hpc_tune.model.builtin import BUILTIN_TINY, write_tiny
from hpc_tune.model.language import read_config, read_language_config
from hpc_tune.model.shapes import find_nearest_shape, shape_directory, shape_names
from hpc_tune.model.shrink import LAYERS


@dataclass(frozen=True)
class ModelShape:
    """What a model is built from: ``directory`` holds a config.json; weights are not looked at."""

    directory: Path
    dtype: torch.dtype
    tune: TuneConfig
    seed: int

    def build(self) -> BuiltModel:
        """Build the model on the meta device."""
        return build(self.directory, self.dtype, self.tune, self.seed, weights=False)

    @property
    def num_blocks(self) -> int:
        """Its decoder blocks."""
        return _find_num_blocks(read_language_config(self.directory))[1]

    def with_blocks(self, num_blocks: int, directory: Path) -> "ModelShape":
        """Return such a model with another number of blocks; ``directory`` gets its config.json.

        What the configuration lists for each block, such as kinds of attention, is repeated or cut.
        """
        config = read_config(self.directory)
        text = config.get_text_config()
        written: dict[str, Any] = json.loads((self.directory / "config.json").read_text("utf-8"))
        inside = [name for name in config.sub_configs if getattr(config, name, None) is text]
        part = next((written[n] for n in inside if isinstance(written.get(n), dict)), written)
        name, before = _find_num_blocks(text)
        for key, value in list(part.items()):
            if key in LAYERS:  # another name of the same number
                del part[key]
            elif isinstance(value, list) and len(value) == before:
                part[key] = [value[n % before] for n in range(num_blocks)]
        part[name] = num_blocks
        (directory / "config.json").write_text(json.dumps(written), encoding="utf-8")
        return replace(self, directory=directory)


def _find_num_blocks(config: Any) -> tuple[str, int]:
    """Return how a language model's configuration calls the number of its blocks, and that.

    What is stored counts blocks; ``num_hidden_layers`` may be twice that (LongCat's have two), and
    is stored too by transformers before 5.18.
    """
    fields = config.to_dict()
    names = ("num_layers", *LAYERS)
    return next((name, fields[name]) for name in names if isinstance(fields.get(name), int))


def planned_dtype(name: str, on_gpu: bool) -> torch.dtype:
    """Return the dtype that ``model.dtype`` is planned with: auto is bf16 on a GPU, else fp32."""
    return DTYPES[("bf16" if on_gpu else "fp32") if name == "auto" else name]


@contextlib.contextmanager
def open_shape(path: str, dtype: torch.dtype, tune: TuneConfig, seed: int) -> Iterator[ModelShape]:
    """Yield the shape of ``model.path``; builtin:tiny is written for it.

    Raises:
        ConfigError: if there is no such shape.
    """
    if path != BUILTIN_TINY:
        directory = shape_directory(path)
        if not directory.is_dir():
            raise ConfigError(
                f"model.path={path}: no such directory here. A plan needs its config.json alone; "
                f"without that, plan a published model like it: "
                f"model.path={find_nearest_shape(path)} "
                f"(known: {', '.join(shape_names())})"
            )
        yield ModelShape(directory, dtype, tune, seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "tiny")
        yield ModelShape(Path(folder) / "tiny", dtype, tune, seed)
