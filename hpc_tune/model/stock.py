"""The reference for an architecture: transformers' own losses and gradients of a small model of it.

write_small_model     the architecture of a config, made small, with random values, as a directory
compute_stock_losses  the loss of each document in transformers' model, and their sum's gradient
compute_reference     both, with values for which rounding chooses no expert
"""

import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_tune.errors import DataError, first_line
from hpc_tune.lazy_imports import fast_imports
from hpc_tune.model.experts import CORRECTION_BIASES
from hpc_tune.model.language import language_config, read_config, stock_class
from hpc_tune.model.own_functions import use_plain_functions_on_cpu
from hpc_tune.model.shrink import FEWER, OTHER_FACTORS, list_shrink_factors, shrink_whole_config
from hpc_tune.model.transformers_versions import keep_capped_scores

MAX_VALUES = 64_000_000
_STANDARD_DEVIATION = 0.03  # noise on all first values, so that none is zero or one
_MAX_DRAWS = 5  # of values, at most; the last are taken as they are
_ADAPTER_PACKAGES = ("peft", "bitsandbytes")
_TIE_SHARE = 2e-6  # of the largest score: rounding moves fp32 scores of such models by half as much


class NoTrial(Exception):
    """No small model of this architecture can be made; the reason is its text."""


class TopKChoices(TorchDispatchMode):
    """Notes how near two scores were of which torch.topk took one and left the other.

    ``nearest``: by how much of the largest score they differed, at least.
    """

    def __init__(self) -> None:
        """Note the choices within this context."""
        super().__init__()
        self.nearest = float("inf")

    @property
    def is_tied(self) -> bool:
        """Whether rounding may have decided a choice: another order of a sum makes another."""
        return self.nearest < _TIE_SHARE

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute as without this, and look at the scores."""
        if func is torch.ops.aten.topk.default and self._is_choice(*args[:3]):
            scores, count = args[0].detach(), args[1]
            best = scores.topk(count + 1, dim=-1).values
            gaps = (best[..., -2] - best[..., -1]) / best[..., 0].abs()
            self.nearest = min([self.nearest, *gaps[gaps.isfinite()].tolist()])
        return func(*args, **(kwargs or {}))

    def _is_choice(self, scores: torch.Tensor, count: int, dim: int = -1) -> bool:
        is_last = dim in (-1, scores.dim() - 1)
        return scores.is_floating_point() and is_last and 0 < count < scores.shape[-1]


def write_small_model(config: Any, directory: Path, seed: int = 0) -> None:
    """Write a small model of the architecture of ``config`` with random values into ``directory``.

    Raises:
        NoTrial: if transformers can make none, or none of less than ``MAX_VALUES`` values.
    """
    with fast_imports():
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        why, text = "", language_config(config, directory)
    except DataError as error:
        raise NoTrial(str(error).removeprefix(f"{directory}: ")) from None
    others = (1,) if text is config else OTHER_FACTORS
    for sizes in itertools.product(FEWER, (False, True), list_shrink_factors(text), others):
        fewer, all_layers, factor, of_others = sizes
        try:
            small = shrink_whole_config(config, factor, all_layers, fewer, of_others)
            with torch.device("meta"):
                model = stock_class(config).from_config(small, dtype=torch.float32)
            if (values := sum(p.numel() for p in model.parameters())) > MAX_VALUES:
                why = why or f"the smallest has {values:,} values"
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = stock_class(config).from_config(small, dtype=torch.float32)
                with torch.no_grad():
                    for values in _find_saved_tensors(model):
                        values.add_(torch.randn(values.shape), alpha=_STANDARD_DEVIATION)
            use_plain_functions_on_cpu(model)
            _loss(model.eval(), torch.arange(3, 12))
            _save(model, directory)
        except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
            why = f"{type(error).__name__}: {first_line(error)}"
            continue
        return
    raise NoTrial(why)


def _find_saved_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what a checkpoint has values of: parameters, and the biases of routers' choices."""
    yield from (p for p in model.parameters() if p.is_floating_point())
    for module in model.modules():
        yield from (b for n, b in module.named_buffers(recurse=False) if n in CORRECTION_BIASES)


def compute_stock_losses(
    directory: Path, documents: Sequence[torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the loss sum of each document of T tokens, by itself, and their summed gradient.

    The model is what ``from_pretrained`` makes of the directory, the loss what it returns.

    Raises:
        NoTrial: if that fails.
    """
    try:
        model = (
            stock_class(read_config(directory))
            .from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
            .eval()
        )
        use_plain_functions_on_cpu(model)
        keep_capped_scores(model)
        losses = []
        for tokens_T in documents:
            total = _loss(model, tokens_T)
            total.backward()
            losses.append(total.item())
    except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
        why = f"{type(error).__name__}: {first_line(error)}"
        raise NoTrial(f"transformers' own training step fails with {why}") from None
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compute_reference(
    config: Any, directory: Path, documents: Sequence[torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Write a small model into ``directory`` and return ``compute_stock_losses`` of it.

    Where two experts have one score but for rounding, another order of a sum chooses the other,
    and the loss is another though nothing is wrong: such a model is drawn anew.

    Raises:
        NoTrial: as both do.
    """
    for seed in range(_MAX_DRAWS):
        write_small_model(config, directory, seed)
        with TopKChoices() as choices:
            found = compute_stock_losses(directory, documents)
        if not choices.is_tied:
            break
    return found


def _save(model: Any, directory: Path) -> None:
    """Do what ``save_pretrained`` does, without the packages that it would import into a rank."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    tensors = revert_weight_conversion(
        model, remove_tied_weights_from_state_dict(model.state_dict(), model)
    )
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)


def _loss(model: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of a document, as transformers itself has it."""
    tokens_BT = tokens_T.unsqueeze(0)
    mean: torch.Tensor = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    return mean * (len(tokens_T) - 1)


def software() -> str:
    """Return the versions that a trial's outcome depends on."""
    with fast_imports():
        import transformers

    versions = [f"transformers {transformers.__version__}, torch {torch.__version__}"]
    for package in _ADAPTER_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)
