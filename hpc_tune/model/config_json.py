"""config.json of a model directory as it is written: read once, however many ask."""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

from hpc_tune.errors import DataError

# Where config.json may name kernels of the hub, as OWNER/NAME.
_KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation")

_COUNT_KEY = re.compile(r"(layers?|experts|blocks|^depth)$")
MAX_PARTS = 10_000  # layers of a model, or experts of a layer; ten times what there is


def read_config_json(directory: Path) -> Any:
    """Return the content of a directory's config.json; not to be changed.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    file = directory / "config.json"
    return _read_cached(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_cached(file: Path, changed_ns: int) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def common_value(config: Any, name: str) -> Any:
    """Return a value of transformers' ``config`` that all layers have, None where they differ."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it is said for each layer, and transformers gives none for all
        return None


def has_router_losses(directory: Path) -> bool:
    """Whether config.json asks transformers for a loss of the routers."""
    settings = read_config_json(directory)
    parts = (settings, *settings.values())
    return any(isinstance(part, dict) and part.get("output_router_logits") for part in parts)


def refuse_huge_counts(directory: Path) -> None:
    """Refuse a number of layers or experts, one by one made, that no model has.

    Raises:
        DataError: which names it.
    """
    try:
        settings = read_config_json(directory)
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong
    parts = [settings, *settings.values()] if isinstance(settings, dict) else []
    counts = (part.items() for part in parts if isinstance(part, dict))
    for name, value in itertools.chain.from_iterable(counts):
        if _COUNT_KEY.search(name) and isinstance(value, int | float) and value > MAX_PARTS:
            raise DataError(
                f"{directory}/config.json cannot be used: {name}={value:,}, and no model has more "
                f"than {MAX_PARTS:,}; is the file damaged?"
            )


def refuse_hub_kernels(directory: Path) -> None:
    """Refuse a config.json that names code of the hub, which transformers would load and run."""
    settings = read_config_json(directory)
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    for key, name in ((key, str(part.get(key))) for part in parts for key in _KERNEL_KEYS):
        if "/" in name:
            raise DataError(
                f"{directory}/config.json: {key} is {name}, code of the Hugging Face hub, which is "
                f"not run; remove {key} from it"
            )
