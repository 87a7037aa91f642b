"""Checks on a small model, before the run begins, that an architecture is trained correctly.

    config -> a small model of its kind -> the loss of three documents in transformers itself
           -> in hpc_tune: alone, as rows of one batch, in one row, in two stages, in two slices

A list of unsupported architectures would never be complete: transformers adds new ones each month,
and changes old ones. So the model at hand is tested, in seconds, on a CPU, and the result is cached
for its configuration and this software.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_tune.batch import Batch
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.context_parallel import parallelize_attention
from hpc_tune.engine.pipeline_parallel import split_into_stages
from hpc_tune.engine.tensor_parallel import TensorAxis, slice_model
from hpc_tune.errors import ConfigError, HpcTuneError, first_line
from hpc_tune.files import write_file
from hpc_tune.log import log
from hpc_tune.model.balance import ScoreFunction, find_router_score_function
from hpc_tune.model.build import BuiltModel, build
from hpc_tune.model.config_json import value_shared_by_layers
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.lora_linear import use_lora_linear
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.quantized_base import require_bitsandbytes, unpack_linears
from hpc_tune.model.shared_rows import (
    RankAttention,
    RowShard,
    join_head_tail,
    repeat_kv_heads,
    shard_batch_to_rank,
)
from hpc_tune.model.stock_reference import (
    UncheckableArchitecture,
    compute_reference_losses,
    software_versions,
)
from hpc_tune.model.weights import ADAPTER_PREFIX, adapted_layer
from hpc_tune.packages import collect_frozen_garbage, fast_imports
from hpc_tune.step.layout import Layout, pipeline_problems
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.slices import slicing_problems

# -- Two slices of a model in two threads of one process, which stand for the two ranks of an axis.


class ThreadAxis(TensorAxis):
    """An axis whose two ranks are two threads."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        object.__setattr__(self, "_at", (rank, slots, barrier))

    @property
    def rank(self) -> int:
        """The number of this thread."""
        rank: int = self.__dict__["_at"][0]
        return rank

    @property
    def size(self) -> int:
        """How many threads there are."""
        return 2

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        rank, slots, barrier = self.__dict__["_at"]
        slots[rank] = x.detach().clone()
        barrier.wait()
        both = list(slots)
        barrier.wait()
        return both

    def all_reduce(self, x: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum or the maximum of both threads' values."""
        one, other = self._exchange(x)
        return one + other if op == torch.distributed.ReduceOp.SUM else torch.maximum(one, other)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return both threads' values, in order."""
        return torch.cat(self._exchange(x), dim=-1)


def merge_gradients(models: list[Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of the whole model from the gradients of its two slices."""
    (model, partial), (other_model, _) = models
    other_parameters, gradients = dict(other_model.module.named_parameters()), {}
    for name, parameter in model.module.named_parameters():
        first, second = parameter.grad, other_parameters[name].grad
        if first is None or second is None:
            continue
        if cut := model.slices.get(name):
            parts = zip(*(g.chunk(cut.num_parts, cut.dim) for g in (first, second)), strict=True)
            gradients[name] = torch.cat([piece for pair in parts for piece in pair], dim=cut.dim)
        else:
            gradients[name] = first + second if name in partial else first
    return gradients


def find_differing_gradient(models: list[Any]) -> str:
    """Return the first parameter that both slices hold whole but whose gradients differ, or ""."""
    (model, partial), (other_model, _) = models
    other_parameters = dict(other_model.module.named_parameters())
    for name, parameter in model.module.named_parameters():
        first, second = parameter.grad, other_parameters[name].grad
        if first is None or second is None or name in model.slices or name in partial:
            continue
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-5):
            return name
    return ""


# -- Both parts of shared rows as rows of one batch, instead of one part on each of two ranks.


class StackedSharedRows:
    """Ranks that share one row, simulated as the rows of a batch; see ``model/shared_rows.py``."""

    def __init__(self, size: int, is_head_tail: bool = False) -> None:
        self.part = RowShard(0, size, is_head_tail)
        self.ranks: Sequence[int] = range(size)
        self.uses_eager, self.kernel_supports_parts = False, True

    def attend(self, attention: RankAttention, *inputs_CHSD: torch.Tensor) -> torch.Tensor:
        """Return the attention of all parts, CSHD, computed separately for each rank."""
        if self.part.is_head_tail:
            query_CHSD, *keys_CKSD = inputs_CHSD
            keys = [self._join_shards(x) for x in keys_CKSD]
            return torch.cat([attention(n, query_CHSD[n : n + 1], *keys) for n in self.ranks])
        rows = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in inputs_CHSD]
        size = self.part.size
        by_rank = zip(*(x.chunk(size, 1) for x in repeat_kv_heads(rows, size)), strict=True)
        out_1THD = torch.cat([attention(n, *heads) for n, heads in enumerate(by_rank)], 2)
        return out_1THD.squeeze(0).unflatten(0, (size, -1))

    def _join_shards(self, x_CKSD: torch.Tensor) -> torch.Tensor:
        """Return the keys or values of the whole row in order, 1KTD."""
        parts_C1SF = x_CKSD.transpose(1, 2).flatten(2).unsqueeze(1)
        return join_head_tail(parts_C1SF).unflatten(-1, (x_CKSD.shape[1], -1)).transpose(1, 2)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``: a sum over the batch's rows already includes all parts."""
        return x


def stack_shards(shards: Sequence[Batch]) -> Batch:
    """Return the parts of one row as rows of a batch."""
    tokens_CS, labels_CS, positions_CS = (
        torch.cat(tensors) for tensors in zip(*(part.tensors for part in shards), strict=True)
    )
    return replace(
        shards[0],
        tokens_BT=tokens_CS,
        labels_BT=labels_CS,
        positions_BT=positions_CS,
        num_loss_tokens=sum(part.num_loss_tokens for part in shards),
    )


# -- The small model, and the checks on it.


# Tokens of the documents: no length divides another, and each is longer than a window.
DOCUMENT_LENGTHS = (24, 40, 17)
LOSS_TOLERANCE = 1e-5  # relative to a loss sum in fp32, whose own rounding is ten times smaller
GRADIENT_TOLERANCE = 1e-3  # relative to a gradient's norm
FULL_TUNING = TuneConfig(method="full")
_ATTENTION_KERNEL_CASES = (True, True), (True, False), (False, False)


class _ErrorText(str):
    """The text of an exception that ended a check; it may be temporary (memory, a library)."""


@dataclass(frozen=True)
class ArchitectureCheck:
    """What fails with an architecture, in words; each field is "" if nothing fails.

    ``loss``: training at all. ``attention``: attention document by document. ``kernel``: a GPU's
    attention kernel, which is told where documents begin. ``packing``: more than one document per
    row. ``pipeline``, ``tensor``, ``context``: layouts with that axis. ``adapters``: the configured
    adapters, or adapters on a packed base. ``untrained``: a line for each trained tensor, or layer
    with an adapter, that gets no gradient, with * for the number of a block. ``score``: not a
    failure, but the function by which the routers of a mixture weigh experts, "" if the routers
    cannot be watched.
    """

    loss: str = ""
    attention: str = ""
    kernel: str = ""
    packing: str = ""
    pipeline: str = ""
    tensor: str = ""
    context: str = ""
    adapters: str = ""
    untrained: str = ""
    score: ScoreFunction = ""


def check_architecture_cached(config: Any, tune: TuneConfig = FULL_TUNING) -> ArchitectureCheck:
    """Return the result of checking the architecture of ``config``, cached if possible.

    Of ``tune``, only the method, the base's dtype and the targets matter.
    """
    file = trial_cache_file(config, tune)
    try:
        return ArchitectureCheck(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    log.info("comparing a small %s model with transformers' own", config.model_type)
    result = check_architecture(config, tune)
    collect_frozen_garbage()  # small models in reference cycles: up to hundreds of MB
    if any(isinstance(text, _ErrorText) for text in vars(result).values()):
        return result  # not cached: the next start may succeed
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps(asdict(result)))
    except OSError as error:
        log.debug("%s cannot be written, so the next start repeats the trial: %s", file, error)
    return result


def check_architecture(config: Any, tune: TuneConfig = FULL_TUNING) -> ArchitectureCheck:
    """Check the architecture of ``config``; takes seconds on one core."""
    if tune.method == "qlora":  # before fast_imports, which would hide bitsandbytes
        require_bitsandbytes()
    with fast_imports(), tempfile.TemporaryDirectory(prefix="hpc_tune-trial-") as folder:
        directory = Path(folder)
        try:
            documents = _random_documents()
            losses, gradients = compute_reference_losses(config, directory, documents)
        except UncheckableArchitecture as reason:
            return ArchitectureCheck(
                loss=_ErrorText(f"no small model of this kind could be tried: {reason}")
            )
        trial = _Trial(directory, documents, losses, gradients)
        try:
            built = _load(trial.build())
        except HpcTuneError as error:
            text = str(error).replace(str(directory), "a small model of this kind")
            return ArchitectureCheck(loss=_ErrorText(text))
        except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
            return ArchitectureCheck(loss=_describe_error(error))
        attention = ""
        if (loss := _run_check(trial.check_loss, built)) and built.module.uses_document_attention:
            built.module.uses_document_attention = trial.uses_document_attention = False
            attention, loss = loss, _run_check(trial.check_loss, built)
        if loss:
            return ArchitectureCheck(loss=loss)
        untrained = _format_untrained_names(built)
        packing = _run_check(trial.check_packing, built)
        adapters = ""
        if tune.method != "full":
            adapters, untrained = trial.check_adapters(tune)
        return ArchitectureCheck(
            attention=attention,
            kernel="" if packing else _run_check(trial.check_document_starts, built),
            packing=packing,
            pipeline=_run_check(trial.check_stages),
            tensor=_run_check(trial.check_slices),
            context=_run_check(trial.check_shared_rows),
            adapters=adapters,
            untrained=untrained,
            score=trial.router_score_function(built),
        )


def _run_check(check: Callable[..., str], *arguments: Any) -> str:
    try:
        return check(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
        return _describe_error(error)


def _describe_error(error: Exception) -> str:
    message = f"{type(error).__name__}: {first_line(error)}"
    return _ErrorText(f"a small model of this kind fails with {message}")


def _random_documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (length,), generator=generator) for length in DOCUMENT_LENGTHS]


def _make_batch(
    rows: Sequence[Sequence[torch.Tensor]], loss_documents: Sequence[int] | None = None
) -> Batch:
    """Return a batch of rows of documents; all carry loss, or only those of ``loss_documents``."""
    number = 0
    masked_rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for row in rows:
        masked_rows.append([])
        for tokens_T in row:
            mask_T = np.full(len(tokens_T), loss_documents is None or number in loss_documents)
            masked_rows[-1].append((tokens_T.numpy(), mask_T))
            number += 1
    return make_batch(masked_rows, sum(DOCUMENT_LENGTHS), 0)


def _load(built: BuiltModel) -> BuiltModel:
    """Allocate and load a model; values that nothing fills stay nan, which reaches the loss."""
    allocate(built.module, torch.device("cpu"))
    with torch.no_grad():
        for tensor in (*built.module.parameters(), *built.module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    load_weights(built)
    return built


def _is_different(actual: float, expected: float) -> bool:
    return not abs(actual - expected) <= LOSS_TOLERANCE * abs(expected)


@dataclass
class _Trial:
    """A small model in ``directory``, with the losses and gradients that transformers computes."""

    directory: Path
    documents: list[torch.Tensor]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    uses_document_attention: bool = True

    def build(self) -> BuiltModel:
        built = build(self.directory, torch.float32, FULL_TUNING, 0)
        blocks, cpu = list(find_blocks(built.module)), torch.device("cpu")
        use_faster_layers(built.module, blocks, False, built.dtype, cpu)
        built.module.uses_document_attention &= self.uses_document_attention
        return built

    def expected_gradients(self, built: BuiltModel) -> dict[str, torch.Tensor]:
        """Return transformers' gradients under our parameter names, if there is such a name."""
        keys = {built.names.whole_model_name(n.removeprefix("model.")): n for n in built.base_names}
        return {keys.get(name, name): gradient for name, gradient in self.gradients.items()}

    def check_loss(self, built: BuiltModel) -> str:
        module = built.module
        module.zero_grad()
        for tokens_T, stock in zip(self.documents, self.losses, strict=True):
            loss = module(_make_batch([[tokens_T]])).item()
            if _is_different(loss, stock):
                return f"a document's loss is {loss:.6g} here and {stock:.6g} in transformers"
        total = module(_make_batch([[tokens_T] for tokens_T in self.documents]))
        if _is_different(total.item(), sum(self.losses)):
            return (
                f"three documents of unequal length have the loss {total.item():.6g} in one batch "
                f"and {sum(self.losses):.6g} one by one"
            )
        total.backward()
        if problem := _compare_gradients(
            {name: p.grad for name, p in module.named_parameters() if p.grad is not None},
            self.expected_gradients(built),
        ):
            return problem
        document = self.documents[1]
        changed_document = torch.cat([document[:-1], (document[-1:] + 1) % 256])
        loss_mask_T = np.arange(len(document)) < len(document) - 1
        losses = [
            module(make_batch([[(tokens_T.numpy(), loss_mask_T)]], len(document), 0)).item()
            for tokens_T in (document, changed_document)
        ]
        if _is_different(*losses):
            return "the prediction of a token depends on later tokens: this is no causal LM"
        with torch.no_grad():  # with a frozen head, the loss is computed in another way
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            frozen = module(_make_batch([self.documents[:1]])).item()
            for parameter in module.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
        if _is_different(frozen, self.losses[0]):
            return (
                f"with the head frozen, a document's loss is {frozen:.6g}, not {self.losses[0]:.6g}"
            )
        return ""

    def check_packing(self, built: BuiltModel) -> str:
        loss = built.module(_make_batch([self.documents])).item()
        if _is_different(loss, sum(self.losses)):
            return (
                f"three documents in one row have the loss {loss:.6g}, each in its own "
                f"{sum(self.losses):.6g}"
            )
        other_documents = [(self.documents[0] + 7) % 256, *self.documents[1:]]
        losses = [
            built.module(_make_batch([row], loss_documents=(1, 2))).item()
            for row in (self.documents, other_documents)
        ]
        if _is_different(*losses):
            return (
                "a document in a row sees the one before it: with another one there its loss is "
                f"{losses[1]:.6g} instead of {losses[0]:.6g}"
            )
        return ""

    def check_document_starts(self, built: BuiltModel) -> str:
        """Check packing with document starts given to layers as on a GPU, but with a mask in place
        of the GPU's kernel, which takes no fp32.
        """
        built.module.has_varlen_kernel = built.module.kernel_has_windows = True
        try:
            return self.check_packing(built)
        finally:
            built.module.has_varlen_kernel = False

    def router_score_function(self, built: BuiltModel) -> ScoreFunction:
        return find_router_score_function(
            built.module, lambda: built.module(_make_batch([self.documents]))
        )

    def check_stages(self) -> str:
        built = self.build()
        blocks, layers = len(list(find_blocks(built.module))), built.config.num_hidden_layers
        if pipeline_problems(built.config, layers, 2, 1):
            return ""  # refused elsewhere, with a reason
        if blocks != layers:  # LongCat's blocks have two layers each
            return f"it has {blocks} decoder blocks where its configuration says {layers} layers"
        plan = StepPlan.for_model(built, Layout(1, 1, pipeline=2), ParallelConfig())
        batch = _make_batch([[tokens_T] for tokens_T in self.documents])
        out: Any = None  # hidden states, then the loss
        for rank in range(2):
            (stage,) = split_into_stages(built, plan, rank)
            out = _load(stage).module(batch, out)
        loss: float = out.item()
        if _is_different(loss, sum(self.losses)):
            return f"in two stages the loss is {loss:.6g}, not {sum(self.losses):.6g}"
        return ""

    def check_adapters(self, tune: TuneConfig) -> tuple[str, str]:
        """Return what fails with adapters, and which adapters get no gradient."""
        try:
            trial_tune = TuneConfig(
                method=tune.method, base_dtype=tune.base_dtype, targets=tune.targets
            )
            built = _load(build(self.directory, torch.float32, trial_tune, 0))
            built.module.uses_document_attention &= self.uses_document_attention
            use_lora_linear(find_blocks(built.module))  # peft's DoRA would multiply packed bytes
            loss = built.module(_make_batch([self.documents[:1]]))
            loss.backward()
        except ConfigError:  # the full model raises it too, or has targets that a small one lacks
            return "", ""
        except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
            return _describe_error(error), ""
        untrained = _format_untrained_names(built)
        if not loss.isfinite():
            return f"a document's loss is {loss.item()}", untrained
        return self._check_packed_weights(built) if tune.base_format else "", untrained

    def _check_packed_weights(self, built: BuiltModel) -> str:
        """Return the difference in loss if a model's own code mistakes packed bytes for weights."""
        batch = _make_batch([[tokens_T] for tokens_T in self.documents])
        packed: float = built.module(batch).item()
        plain: float = unpack_linears(built.module)(batch).item()
        text = f"with packed weights the loss is {packed:.6g}, of the same values {plain:.6g}"
        return text if _is_different(packed, plain) else ""

    def check_slices(self) -> str:
        if slicing_problems(self.build().config, 2):
            return ""  # refused elsewhere, with a reason
        slots: list[Any] = [None, None]
        barrier = threading.Barrier(2, timeout=60)
        batch = _make_batch([[tokens_T] for tokens_T in self.documents])
        losses, errors = [0.0, 0.0], []
        models: list[tuple[BuiltModel, frozenset[str]] | None] = [None, None]

        def work(rank: int) -> None:
            try:
                sliced, partial = slice_model(self.build(), ThreadAxis(rank, slots, barrier))
                sliced.module.uses_document_attention = False  # its state is shared by all threads
                loss = _load(sliced).module(batch)
                loss.backward()
                models[rank], losses[rank] = (sliced, partial), loss.item()
            except Exception as error:  # noqa: BLE001 - raised in a thread: raised again below
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        # Both threads set and reset one shared state, in any order: give it the value of both.
        with batch_context.use_batch(MicroBatch(batch.rows, positions_BT=batch.positions_BT)):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        if any(_is_different(loss, sum(self.losses)) for loss in losses):
            return f"in two slices the loss is {losses[0]:.6g}, not {sum(self.losses):.6g}"
        if name := find_differing_gradient(models):
            return f"the gradient of {name} differs between slices; transformers' plan sums none"
        return _compare_gradients(merge_gradients(models), self.expected_gradients(self.build()))

    def check_shared_rows(self) -> str:
        """Return what fails if a row is cut for two ranks, and only attention sees all of it.

        Both parts are rows of one batch. So this check cannot notice values that a family derives
        from all positions of a batch, as some rotary embeddings do.
        """
        built, row_sharing, batch = (
            _load(self.build()),
            StackedSharedRows(2),
            _make_batch([self.documents]),
        )
        module = built.module
        try:
            parallelize_attention(module, row_sharing)
            # Keys are gathered; heads are exchanged only if two ranks divide them. Each way as on a
            # GPU whose kernel takes windows, on one whose kernel does not, and as here on a CPU.
            is_odd = (value_shared_by_layers(built.config, "num_attention_heads") or 1) % 2
            head_tail_cases = (True,) if is_odd else (True, False)
            for (has_varlen_kernel, has_windows), is_head_tail in itertools.product(
                _ATTENTION_KERNEL_CASES, head_tail_cases
            ):
                row_sharing.part = RowShard(0, 2, is_head_tail)
                parts = [
                    shard_batch_to_rank(batch, replace(row_sharing.part, rank=rank))
                    for rank in row_sharing.ranks
                ]
                module.has_varlen_kernel, module.kernel_has_windows = has_varlen_kernel, has_windows
                loss = module(stack_shards(parts))
                if _is_different(loss.item(), sum(self.losses)):
                    return (
                        f"a row in two parts has the loss {loss.item():.6g}, not "
                        f"{sum(self.losses):.6g}: tokens are mixed outside of attention"
                    )
        except ConfigError as error:
            return str(error)
        loss.backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return _compare_gradients(gradients, self.expected_gradients(built))


def _format_untrained_names(built: BuiltModel) -> str:
    """Return the trained tensors without a gradient, a line each; see ``ArchitectureCheck``."""
    parameters = built.module.named_parameters()
    names = [built.saved_names[n] for n, p in parameters if p.requires_grad and p.grad is None]
    return "\n".join(dict.fromkeys(wildcard_name(name) for name in names))


def wildcard_name(saved_name: str) -> str:
    """Return the name in ``untrained`` of the tensor that checkpoints call ``saved_name``."""
    layer = adapted_layer(saved_name) or saved_name.removeprefix(ADAPTER_PREFIX)
    return re.sub(r"\.\d+\.", ".*.", layer)


def _compare_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    for name, gradient in expected.items():
        if name not in actual:
            return f"{name} gets no gradient"
        norm, gap = gradient.norm(), (actual[name] - gradient).norm()
        if not gap <= GRADIENT_TOLERANCE * norm + 1e-6:
            return f"the gradient of {name} is off by {gap / norm:.1e} of its norm"
    return ""


def trial_cache_file(config: Any, tune: TuneConfig) -> Path:
    """Return the cache file for a configuration, the tuning settings and this software."""
    fields = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"):
        fields.pop(name, None)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    digest.update(f"{software_versions()} {tune.method} {tune.base_dtype} {tune.targets}".encode())
    digest.update(_hash_package().encode())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(home if os.path.isabs(home) else os.devnull)  # no home: nothing is cached
    return cache / "hpc_tune" / "trials" / f"{config.model_type}-{digest.hexdigest()[:16]}.json"


@functools.cache
def _hash_package() -> str:
    """Return a hash of the package's code: a trial runs much of it, directly or not."""
    package, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
