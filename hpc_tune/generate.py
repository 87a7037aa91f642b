"""Answer a prompt or a chat with a model, with or without the adapter of a run, in one process.

The question is encoded as rows of training data are: the system prompt and tools by the chat
template, typed special tokens as text. The answer, tool calls included, is shown as it is learned.
"""

import json
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_tune.checkpoint.locate import (
    LocatedCheckpoint,
    locate,
    require_base,
    retry_with_newest_checkpoint,
)
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.chats import find_answer_end_token
from hpc_tune.data.encode import Encoder
from hpc_tune.data.fields import WrongRecord, json_type_name
from hpc_tune.data.records import Chat, NoLearnedTextError, to_example
from hpc_tune.errors import ConfigError, require_utf8
from hpc_tune.log import log
from hpc_tune.model.build import BuiltModel, build, resolve_dtype
from hpc_tune.model.load import allocate, load_trained_parameters, load_weights
from hpc_tune.model.tokenizer import load_tokenizer, refuse_syntax_errors, stop_ids


def read_chat(
    prompt: str | None, system: str | None, tools_file: Path | None, chat_file: Path | None
) -> Chat:
    """Return the chat to answer: from a prompt (``-`` reads stdin) and ``system``, or from a file.

    ``tools_file`` and ``chat_file`` are JSON files: a list of tools as in training data, and a
    row's messages or a whole row.

    Raises:
        ConfigError: if prompt and chat are missing, arguments contradict each other, or a file
            cannot be read or has other content.
    """
    if chat_file is None and prompt is None:
        raise ConfigError("generate needs --prompt TEXT or --chat FILE")
    if chat_file is not None:
        if options := [o for o, v in (("--prompt", prompt), ("--system", system)) if v is not None]:
            raise ConfigError(
                f"--chat and {' and '.join(options)} are given: put all messages into {chat_file}, "
                "or leave --chat out"
            )
        content = _read_json("--chat", chat_file)
        record = content if isinstance(content, dict) else {"messages": content}
    else:
        turns = [("system", system)] if system else []
        turns.append(("user", _read_stdin() if prompt == "-" else str(prompt)))
        record = {"messages": [{"role": role, "content": require_utf8(t)} for role, t in turns]}
    if tools_file is not None:
        if record.get("tools") or record.get("functions"):
            raise ConfigError(f"--tools is given, and {chat_file} has tools too; keep one of them")
        content = _read_json("--tools", tools_file)
        if not isinstance(content, list) or not content:
            raise ConfigError(
                f"--tools {tools_file}: found {json_type_name(content)}, expected a list of tools, "
                "as in rows of training data"
            )
        record = {**record, "tools": content}
    return _parse_chat(
        record, f"--chat {chat_file}" if chat_file is not None else f"--tools {tools_file}"
    )


def _parse_chat(record: dict[str, Any], source: str) -> Chat:
    try:
        example = to_example(record)
    except (WrongRecord, NoLearnedTextError) as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(example, Chat):
        raise ConfigError(
            f"{source}: expected a list of messages, or an object with messages (or conversations) "
            "and tools, as a row of training data"
        )
    if example.messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{source}: the last message is an answer of the assistant; remove it, so the model "
            "gives one"
        )
    return example


def _read_json(option: str, file: Path) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror}") from None
    except UnicodeEncodeError:
        raise ConfigError(
            f"{option} {file}: it contains half of a surrogate pair, such as \\ud83d"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {file}: expected one JSON value in UTF-8: {error}") from None
    return content


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt -: stdin is not UTF-8: {error}") from None


def generate_answer(
    run: Path | None,
    model: Path | None,
    uses_adapter: bool,
    chat: Chat,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return the model's answer to ``chat``.

    ``run`` is a run directory or checkpoint, ``model`` a model directory; with both, ``model`` is
    where the run's base model is now. ``temperature`` 0: greedy decoding. Generation stops at a
    token that ends a turn: from the tokenizer, from generation_config.json, or the one that the
    chat template writes after an answer.

    Raises:
        HpcTuneError: if files are missing or damaged, or transformers has no class for only the
            language model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tune, dtype_name, template = TuneConfig(method="full"), "auto", None
    directory = model
    trained_checkpoint = locate(run, model) if run is not None else None
    if trained_checkpoint is not None:
        directory, dtype_name = (
            require_base(trained_checkpoint, "--model"),
            trained_checkpoint.config.model.dtype,
        )
        template = trained_checkpoint.template
        tune = trained_checkpoint.config.tune if uses_adapter else tune
    if directory is None:
        raise ConfigError("generate needs --run RUN or --model DIR")
    dtype = resolve_dtype(dtype_name, device)
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = template or tokenizer.chat_template
    refuse_syntax_errors(tokenizer.chat_template, str(run if template else directory))
    ids_BT = _encode(tokenizer, chat).to(device)
    built = _build_model(trained_checkpoint, directory, dtype, tune, ids_BT.shape[1] + max_tokens)
    allocate(built.module, device)
    load_weights(built)
    if trained_checkpoint is not None and run is not None and uses_adapter:
        retry_with_newest_checkpoint(
            trained_checkpoint, run, partial(load_trained_parameters, built)
        )
    lm = built.module.causal_lm().to(dtype).eval()
    eos_token_ids = _stop_token_ids(tokenizer, directory)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"temperature": temperature} if temperature else {}
    out_BT = lm.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=max_tokens,
        use_cache=True,
        eos_token_id=eos_token_ids,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        do_sample=bool(temperature),
        **sampling,
    )
    return _decode_answer(tokenizer, out_BT[0, ids_BT.shape[1] :].tolist(), eos_token_ids)


def _build_model(
    trained_checkpoint: LocatedCheckpoint | None,
    directory: Path,
    dtype: torch.dtype,
    tune: TuneConfig,
    max_seq_len: int,
) -> BuiltModel:
    """Build the model for a text of ``max_seq_len`` tokens; a run's, with its scaled positions."""
    rope_scaling = (
        None if trained_checkpoint is None else trained_checkpoint.config.model.rope_scaling
    )
    built = build(directory, dtype, tune, seed=0, rope_scaling=rope_scaling)
    if not isinstance(built.config, built.module.causal_lm().config_class):
        raise ConfigError(
            f"transformers generates with a {built.config.model_type} model only as a whole: "
            "export it with --to merged, and generate with that in transformers"
        )
    if trained_checkpoint is None:
        return built
    scaled_len = trained_checkpoint.state.scaled_for or trained_checkpoint.config.data.seq_len
    return replace(built, seq_len=max(scaled_len, max_seq_len))


def _decode_answer(tokenizer: Any, ids: list[int], eos_token_ids: Collection[int]) -> str:
    """Decode an answer up to its end token; other special tokens, as of tool calls, are kept."""
    stop = next((index for index, token in enumerate(ids) if token in eos_token_ids), len(ids))
    text: str = tokenizer.decode(ids[:stop], skip_special_tokens=False)
    return text.strip()


def _stop_token_ids(tokenizer: Any, directory: Path) -> list[int]:
    end = tokenizer.convert_tokens_to_ids(find_answer_end_token(tokenizer))
    return sorted((stop_ids(tokenizer, directory) | {end}) - {None})


def _encode(tokenizer: Any, chat: Chat) -> torch.Tensor:
    encoder = Encoder(tokenizer, seq_len=1, loss_on="answers")
    ids = encoder.prompt(chat)
    for remark in encoder.counters.remarks():
        log.warning("%s", remark)
    return torch.tensor([ids])
