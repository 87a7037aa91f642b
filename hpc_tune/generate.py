"""Answer one prompt with a model, with or without the adapter of a run, in one process."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_tune.checkpoint.locate import locate, require_base, with_newest
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.chats import REFUSALS, end_of_answer
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.build import build, compute_dtype
from hpc_tune.model.load import allocate, load_trained, load_weights
from hpc_tune.model.tokenizer import load_tokenizer, stop_ids


def answer(
    run: Path | None,
    model: Path | None,
    with_adapter: bool,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return the model's answer to ``prompt``.

    ``run`` is a run directory or checkpoint, ``model`` a model directory; with both, ``model`` is
    where the run's base model is now. ``temperature`` 0: greedy decoding. Generation stops at a
    token that ends a turn: the tokenizer's, one of generation_config.json's, or the one that the
    chat template writes after an answer.

    Raises:
        HpcTuneError: if files are missing or damaged, or transformers has no class for this
            language model by itself.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tune, dtype_name, template = TuneConfig(method="full"), "auto", None
    directory = model
    trained = locate(run, model) if run is not None else None
    if trained is not None:
        directory, dtype_name = require_base(trained, "--model"), trained.config.model.dtype
        template = trained.template
        tune = trained.config.tune if with_adapter else tune
    if directory is None:
        raise ConfigError("generate needs --run RUN or --model DIR")
    dtype = compute_dtype(dtype_name, device)
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = template or tokenizer.chat_template
    built = build(directory, dtype, tune, seed=0)
    if not isinstance(built.config, built.module.causal_lm().config_class):
        raise ConfigError(
            f"transformers generates with a {built.config.model_type} model only as a whole: "
            "export it with --to merged, and ask it there"
        )
    allocate(built.module, device)
    load_weights(built)
    if trained is not None and run is not None and with_adapter:
        with_newest(trained, run, partial(load_trained, built))
    lm = built.module.causal_lm().to(dtype).eval()
    ids_BT = _encode(tokenizer, prompt).to(device)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature}
    out_BT = lm.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=max_tokens,
        use_cache=True,
        eos_token_id=_ends(tokenizer, directory),
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **sampling,
    )
    text: str = tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)
    return text.strip()


def _ends(tokenizer: Any, directory: Path) -> list[int]:
    """Return the tokens at which generation stops."""
    end = tokenizer.convert_tokens_to_ids(end_of_answer(tokenizer))
    return sorted((stop_ids(tokenizer, directory) | {end}) - {None})


def _encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except REFUSALS as error:
        raise ConfigError(f"the chat template refuses the prompt: {first_line(error)}") from None
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
