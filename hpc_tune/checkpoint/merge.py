"""The tensors of a merged model: the base's tensors, changed by training."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import CheckpointError
from hpc_tune.model.experts import AdaptedExpertStack, has_experts
from hpc_tune.model.language import ModelFileLayout, find_model_file_layout, read_language_config
from hpc_tune.model.modules_to_save import TOKEN_DELTA_SUFFIX, token_ids
from hpc_tune.model.regions import Region
from hpc_tune.model.tensor_sources import PIECE_BYTES, Box, StoredPart
from hpc_tune.model.weights import (
    ADAPTER_PREFIX,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    adapted_layer,
    find_non_finite,
    index_checkpoint,
    index_model_directory,
)

# What to do if values are too large for the dtype to be written.
_OVERFLOW_REMEDIES = {
    torch.float16: ", whose largest is 65504; write the model in another dtype (--dtype bf16), or "
    "use the adapter (--to adapter)"
}


class MergedModel:
    """The tensors of the merged model, each computed on demand."""

    def __init__(
        self, checkpoint: Path, tune: TuneConfig, base: Path, dtype: torch.dtype | None = None
    ) -> None:
        """Index a checkpoint and its base; ``dtype`` None: each tensor keeps its own."""
        self._base_index, self._checkpoint_index = (
            index_model_directory(base),
            index_checkpoint(checkpoint),
        )
        self._tune, self._base, self._dtype = tune, base, dtype
        trained_index = self._checkpoint_index
        self._adapter_layers: dict[str, str] = {}
        for name in trained_index.shapes:
            if name.startswith(ADAPTER_PREFIX) and name.endswith(LORA_A):
                layer = name.removesuffix(LORA_A)
                self._adapter_layers[self._adapted_tensor_name(layer)] = layer
        # Modules trained in full beside an adapter, and trained rows of the embedding.
        adapter_names = (name for name in trained_index.shapes if name.startswith(ADAPTER_PREFIX))
        non_lora_names = [name for name in adapter_names if not adapted_layer(name)]
        row_weights = {
            name: f"{name.removesuffix(TOKEN_DELTA_SUFFIX)}.weight"
            for name in non_lora_names
            if TOKEN_DELTA_SUFFIX in name
        }
        self._row_delta_names = {self._base_tensor_name(w): name for name, w in row_weights.items()}
        self._replacement_names = {
            self._base_tensor_name(name): name for name in non_lora_names if name not in row_weights
        }

    def _adapted_tensor_name(self, layer: str) -> str:
        stack = self._expert_stacks.get(layer.removeprefix(ADAPTER_PREFIX))
        return self._base_tensor_name(f"{layer}.weight") if stack is None else stack.tensor

    @functools.cached_property
    def _expert_stacks(self) -> Mapping[str, AdaptedExpertStack]:
        """Stacks of experts, by the name of the adapter's layer."""
        shapes = self._base_index.shapes.items()
        may_have_experts = any(len(shape) == 3 or ".experts." in name for name, shape in shapes)
        return (
            self._file_layout.stacks_by_layer
            if may_have_experts and has_experts(read_language_config(self._base))
            else {}
        )

    @functools.cached_property
    def _parts_by_stored_name(self) -> Mapping[str, tuple[str, StoredPart]]:
        """For each stored tensor that is part of a joined one: that tensor's name, and the part."""
        joined_tensors = self._file_layout.index.joined_tensors if self._expert_stacks else {}
        return {
            part.source.name: (name, part) for name, t in joined_tensors.items() for part in t.parts
        }

    def _base_tensor_name(self, name: str) -> str:
        path = name.removeprefix(ADAPTER_PREFIX)
        candidates = [path, path.partition(".")[2]]
        if stored_names := [c for c in candidates if c in self._base_index.shapes]:
            return stored_names[0]
        names, shapes = self._file_layout.names, self._file_layout.index.shapes
        if new_name := names.renamed_tensors.get(path):
            return new_name
        # whole_model_name: for old runs, which did not know their model as part of a whole one.
        if known_names := [c for c in (*candidates, names.whole_model_name(path)) if c in shapes]:
            return known_names[0]
        raise CheckpointError(f"the base model has no {path}, which the adapter changes")

    @functools.cached_property
    def _transposed_names(self) -> frozenset[str]:
        """The tensors stored transposed; only looked up if a shape shows that any may be."""
        shapes = self._checkpoint_index.shapes
        shapes_match = all(
            self._base_index.shapes.get(name)  # None: joined from several tensors
            == (shapes[layer + LORA_B][0], shapes[layer + LORA_A][1])
            for name, layer in self._adapter_layers.items()
        )
        return frozenset() if shapes_match else self._file_layout.transposed_tensors

    @functools.cached_property
    def _file_layout(self) -> ModelFileLayout:
        return find_model_file_layout(self._base, self._base_index)

    @property
    def copied_head(self) -> str | None:
        """A tied output head that the base stores in addition to the embedding; it is outdated."""
        return (
            self._file_layout.copied_head if "head" in " ".join(self._base_index.shapes) else None
        )

    @property
    def changes_dtypes(self) -> bool:
        """Whether tensors get other dtypes than in the base's files."""
        return self._base_index.is_quantized or self._dtype is not None

    @property
    def names(self) -> list[str]:
        """The tensors of the merged model, in name order."""
        return sorted({*self._base_index.shapes} - {self.copied_head})

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor gets."""
        dtype = self._base_index.dtypes[name]
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def tensor_bytes(self, name: str) -> int:
        """Return the size of a tensor."""
        return math.prod(self._base_index.shapes[name]) * self.dtype_of(name).itemsize

    def region(self, name: str) -> Region:
        """Return a tensor whose values are computed when they are requested."""
        shape, dtype = self._base_index.shapes[name], self.dtype_of(name)
        return Region.cover_tensor(name, dtype, shape, lambda: self._merge_tensor(name))

    def _merge_tensor(self, name: str) -> torch.Tensor:
        out = torch.empty(self._base_index.shapes[name], dtype=self.dtype_of(name))
        whole_name, part = self._parts_by_stored_name.get(name, (name, None))
        if whole_name in self._checkpoint_index.shapes or whole_name in self._replacement_names:
            box = Box.cover_tensor(tuple(out.shape)) if part is None else part.box
            values = out if part is None else torch.empty(box.shape, dtype=out.dtype)
            self._checkpoint_index.fill(
                values, self._replacement_names.get(whole_name, whole_name), box.offset
            )
            if part is not None:
                out.copy_(part.view(values))
        elif (layer := self._adapter_layers.get(whole_name)) is None:
            self._base_index.fill(out, name)
        elif (stack := self._expert_stacks.get(layer.removeprefix(ADAPTER_PREFIX))) is not None:
            self._add_expert_adapters(out, name, layer, stack)
        else:
            self._add_adapter(out, name, layer)
        if name in self._row_delta_names:
            rows = self._checkpoint_index.read(self._row_delta_names[name])
            out[token_ids(self._base, self._tune.trainable_tokens)] = rows.to(out.dtype)
        if (non_finite := find_non_finite(out)) is not None and self._is_changed(name):
            kind = str(out.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name} cannot be merged: its value at {list(non_finite.position)} would be "
                f"{non_finite.value:g} in {kind}"
                + _OVERFLOW_REMEDIES.get(out.dtype, "; the checkpoint, or its base, is damaged")
            )
        return out

    def _is_changed(self, name: str) -> bool:
        changed_names = (
            self._checkpoint_index.shapes,
            self._adapter_layers,
            self._replacement_names,
            self._row_delta_names,
        )
        whole_name, _ = self._parts_by_stored_name.get(name, (name, None))
        return self._dtype is not None or any(whole_name in names for names in changed_names)

    def _add_expert_adapters(
        self, out: torch.Tensor, name: str, layer: str, stack: AdaptedExpertStack
    ) -> None:
        """Set ``out``, a stack or a part of it, to W_e + scale B_e A_e for each expert e.

        As in peft, A is E R x inputs, expert-major, and B is outputs x R E, where each expert has
        every E-th column. Only one expert is held in fp32 at a time.
        """
        a, b = (self._checkpoint_index.read(layer + end).float() for end in (LORA_A, LORA_B))
        a_ERI = a.view(stack.num_experts, -1, a.shape[1])
        b_ORE = b.view(b.shape[0], -1, stack.num_experts)
        _, part = self._parts_by_stored_name.get(name, (name, None))
        part = part or StoredPart.cover_tensor(self._base_index.sources[name])
        _, rows, columns = part.box.slices()
        scale = self._tune.adapter_scale(layer.removeprefix(ADAPTER_PREFIX))
        for number in range(part.box.offset[0], part.box.end[0]):
            box = Box((number, *part.box.offset[1:]), (1, *part.box.shape[1:]))
            expert = torch.empty(box.shape, dtype=torch.float32)
            values, offset = part.view(expert), part.stored_offset(box)
            self._base_index.fill(values, name, offset)
            delta = b_ORE[..., number] @ a_ERI[number]
            delta = delta.t() if stack.is_transposed else delta
            expert[0].add_(delta[rows, columns], alpha=scale)
            out[Box(offset, tuple(values.shape)).slices()] = values.to(out.dtype)

    def _add_adapter(self, out: torch.Tensor, name: str, layer: str) -> None:
        """Set ``out`` to W + scale B A by blocks of rows; DoRA: each row scaled to its magnitude.

        A transposed W gets the transposed product. A part of W, such as the gate if the model has
        gate and up in one tensor, gets the product's rows for that part.
        """
        scale = self._tune.adapter_scale(layer.removeprefix(ADAPTER_PREFIX))
        a, b = (self._checkpoint_index.read(layer + end) for end in (LORA_A, LORA_B))
        _, part = self._parts_by_stored_name.get(name, (name, None))
        part_rows = slice(None) if part is None else part.box.slices()[0]
        b = b[part_rows]
        if name in self._transposed_names:
            a, b = b.t(), a.t()
        rows = max(1, PIECE_BYTES // (4 * out.shape[1]))
        blocks = torch.empty((min(rows, len(out)), out.shape[1]), dtype=torch.float32)
        for start in range(0, out.shape[0], rows):
            block = blocks[: len(out) - start]
            self._base_index.fill(block, name, (start, 0))
            block.addmm_(b[start : start + rows], a, alpha=scale)
            if self._tune.method == "dora":
                magnitude = self._checkpoint_index.read(layer + MAGNITUDE)[part_rows]
                block_magnitude = magnitude[start : start + rows]
                block *= (block_magnitude / block.norm(dim=1)).unsqueeze(1)
            out[start : start + rows] = block
