"""Answer one prompt with a model, with or without the adapter of a run, in one process."""

from pathlib import Path
from typing import Any

import torch

from hpc_tune.checkpoint.locate import locate
from hpc_tune.config.schema import TuneConfig
from hpc_tune.model.build import build, compute_dtype, load_tokenizer
from hpc_tune.model.load import allocate, load_trained, load_weights


def answer(
    run: Path | None,
    model: Path | None,
    with_adapter: bool,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Return what the model says to ``prompt``.

    ``run`` is a run directory or checkpoint, ``model`` a model directory; one of them is given.
    ``temperature`` 0 takes the likeliest token each time.

    Raises:
        HpcTuneError: if files are missing or damaged.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tune, dtype_name, template = TuneConfig(method="full"), "auto", None
    directory = model
    found = locate(run) if run is not None else None
    if found is not None:
        directory, dtype_name = found.base, found.config.model.dtype
        template = found.config.data.chat_template
        tune = found.config.tune if with_adapter else tune
    assert directory is not None
    dtype = compute_dtype(dtype_name, device)
    tokenizer = load_tokenizer(directory, template)
    built = build(directory, dtype, tune, seed=0)
    allocate(built.module, device)
    load_weights(built)
    if found is not None and with_adapter:
        load_trained(built, found.checkpoint)
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **sampling,
    )
    text: str = tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)
    return text.strip()


def _encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
