"""Small stores, rows of chats, and a byte-level tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpc_tune.data.counts import Counters
from hpc_tune.data.hdf5_format import Attributes, TokenStore
from hpc_tune.data.writer import Block, write_store

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML, bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and the two markers of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", len(alphabet))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>" if bos else None,
        eos_token="<|im_end|>",
        chat_template=template,
    )


def attributes(**changes: Any) -> Attributes:
    values: dict[str, Any] = {
        "content": "",
        "tokenizer": "test",
        "tokenizer_fingerprint": "f" * 64,
        "vocab_size": 60_000,
        "highest_token": 0,
        "seq_len": 1024,
        "loss_on": "answers",
        "template_date": "",
        "source": "test",
        "counters": Counters(),
        "hpc_tune_version": "0",
    }
    return Attributes(**{**values, **changes})


def store_of_lengths(path: Path, lengths: Iterable[int]) -> TokenStore:
    """Document d of length n holds the tokens d, d + 1, ...; all but the first are learned."""
    sizes = np.array(list(lengths), dtype=np.int64)
    tokens = np.concatenate([(d + np.arange(n)) % 60_000 for d, n in enumerate(sizes)])
    mask = np.ones(len(tokens), dtype=np.uint8)
    mask[np.cumsum(sizes) - sizes] = 0
    write_store(path, [Block(sizes, tokens, mask)], histogram_of(sizes), attributes())
    return TokenStore.open(path)


def zero_tokens(path: Path, dataset: str = "tokens") -> None:
    """Write zeros over the last bytes of a dataset, as a disk or a copy that went wrong does."""
    with h5py.File(path) as file:
        end = file[dataset].id.get_offset() + file[dataset].size * file[dataset].dtype.itemsize
    with path.open("r+b") as file:
        file.seek(end - 4)
        file.write(bytes(4))


def histogram_of(lengths: Any) -> dict[int, int]:
    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
    return path


def chat(*turns: str) -> dict[str, Any]:
    """Return a chat of user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(turns)]}
