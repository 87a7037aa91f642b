"""Read config.json of a model directory, or of a published model without weights (shape:NAME)."""

import difflib
import functools
import itertools
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from hpc_tune.errors import ConfigError, DataError
from hpc_tune.files import raise_if_too_many_open_files

# Keys of config.json that may name a kernel of the hub, as OWNER/NAME.
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")

_COUNT_KEY = re.compile(r"(layers?|experts|blocks|^depth)$")
# Layers of a model, or experts of a layer: ten times what any model has.
MAX_LAYERS_OR_EXPERTS = 10_000


def read_config_json(directory: Path) -> Any:
    """Return the content of a directory's config.json. It is cached: do not modify it.

    Raises:
        OSError, ValueError, RecursionError: if it cannot be read.
    """
    file = directory / "config.json"
    return _read_json_cached(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_json_cached(file: Path, mtime_ns: int) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def try_read_config_json(directory: Path) -> dict[str, Any]:
    """Call ``read_config_json``, but return {} if the file cannot be read or holds no object.

    Raises:
        OSError: if no more files can be opened.
    """
    try:
        config = read_config_json(directory)
    except (OSError, ValueError, RecursionError) as error:
        raise_if_too_many_open_files(error)
        return {}
    return config if isinstance(config, dict) else {}


def config_parts(settings: Any) -> list[dict[str, Any]]:
    """Return the content of a config.json and the dicts in it: its language model's, and others."""
    several = [settings, *settings.values()] if isinstance(settings, dict) else []
    return [part for part in several if isinstance(part, dict)]


def value_shared_by_layers(config: Any, name: str) -> Any:
    """Return a value of transformers' ``config`` that all layers share; None if they differ."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it is set per layer, so transformers has no common value
        return None


def config_enables_router_loss(directory: Path) -> bool:
    """Whether config.json turns on transformers' own loss for the routers."""
    parts = config_parts(read_config_json(directory))
    return any(part.get("output_router_logits") for part in parts)


def refuse_huge_layer_counts(directory: Path) -> None:
    """Refuse more layers or experts than any model has: they would be built one by one.

    Raises:
        DataError: if config.json has more; it names the setting and its value.
    """
    settings = try_read_config_json(directory)  # transformers reports an unreadable file
    counts = (part.items() for part in config_parts(settings))
    for name, value in itertools.chain.from_iterable(counts):
        is_count = _COUNT_KEY.search(name) and isinstance(value, int | float)
        if is_count and value > MAX_LAYERS_OR_EXPERTS:
            raise DataError(
                f"{directory}/config.json cannot be used: {name}={value:,}, and no model has more "
                f"than {MAX_LAYERS_OR_EXPERTS:,}; is the file damaged?"
            )


def refuse_hub_kernels(directory: Path) -> None:
    """Refuse a config.json that names code on the hub, which transformers would load and run."""
    parts = config_parts(read_config_json(directory))
    for key, name in ((key, str(part.get(key))) for part in parts for key in _KERNEL_KEYS):
        if "/" in name:
            raise DataError(
                f"{directory}/config.json: {key} is {name}, code of the Hugging Face hub, which is "
                f"not run; remove {key} from it"
            )


# -- shape:NAME, the config.json of a published model without its weights: for planning and tracing.
#
# The files are in ``hpc_tune/shapes``. A ``ShapeIndex`` takes the place of a ``TensorIndex``: it
# knows every name and shape, and no values.


SHAPE_PREFIX = "shape:"


def model_shape_names() -> list[str]:
    """Return the names of the shapes that come with the package, in order."""
    return sorted(folder.name for folder in _shapes_directory().iterdir() if folder.is_dir())


def resolve_model_directory(path: str) -> Path:
    """Return the directory that holds the config.json of ``model.path``, a shape or a directory.

    Raises:
        ConfigError: if no shape has this name.
    """
    if not path.startswith(SHAPE_PREFIX):
        return Path(path)
    name = path.removeprefix(SHAPE_PREFIX)
    names = model_shape_names()
    if name not in names:
        choices = difflib.get_close_matches(name, names, n=3) or names
        raise ConfigError(f"model.path={path}: no such shape; available: {', '.join(choices)}")
    return _shapes_directory() / name


def find_nearest_model_shape(path: str) -> str:
    """Return the shape whose name is closest to that of a model, such as shape:llama3-8b."""
    name = re.sub(r"[._\s]+", "-", Path(path).name.lower()).replace("llama-3", "llama3")
    size = re.search(r"\d+b", name)
    names = model_shape_names()
    candidates = [shape for shape in names if size and shape.endswith(f"-{size[0]}")]
    return SHAPE_PREFIX + difflib.get_close_matches(name, candidates or names, 1, cutoff=0)[0]


def refuse_weightless_shape(path: str) -> None:
    """Refuse a shape where weights are needed.

    Raises:
        ConfigError: if ``path`` is a shape.
    """
    if path.startswith(SHAPE_PREFIX):
        raise ConfigError(
            f"model.path={path} has no weights; it can be planned and traced, but training and "
            "generating need a Hugging Face model directory"
        )


class ShapeIndex:
    """The names, shapes and dtypes of a ``TensorIndex``, without files."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take names, shapes and dtypes from a model, which may be on the meta device."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, tensor in tensors:
            self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype

    @property
    def stored_names(self) -> list[str]:
        """Names of the tensors."""
        return list(self.shapes)

    def fill(self, local_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Leave ``local_tensor`` as it is."""

    def require_finite(self, *_: Any) -> None:
        """Accept whatever is in memory."""

    def map_pages(self, name: str, dtype: torch.dtype) -> None:
        """Return None: there are no pages."""


def _shapes_directory() -> Path:
    return Path(str(files("hpc_tune"))) / "shapes"
