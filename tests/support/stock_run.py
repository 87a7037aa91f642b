"""Repeats a run with stock transformers, peft and torch's AdamW, one document at a time."""

import math
from pathlib import Path

import numpy as np
import torch

from hpc_tune.checkpoint import store
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import PackedSampler, SampleOrder
from hpc_tune.engine.adamw import learning_rate
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.packages import fast_imports

with fast_imports():
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

_Document = tuple[np.ndarray, np.ndarray]  # tokens and loss mask, or weights


def steps_of(config: RunConfig, run_dir: Path) -> list[list[_Document]]:
    """Return the documents of each step of a run that has ended, cut as documented."""
    newest = max((run_dir / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    state = store.read_state(newest)
    folder = Path(config.data.cache or run_dir / "data")
    stores = map(TokenStore.open, sorted(folder.glob("*.h5")))
    data = next(s for s in stores if s.attributes.content == state["loader"]["content"])
    seq_len, rows = config.data.seq_len, config.batch.global_size
    order = PackedSampler(
        data.length_values,
        data.length_counts,
        data.documents_by_length,
        SampleOrder(seq_len, config.data.packing, config.train.seed),
    )
    total = state["loader"]["rows"]
    return [
        [
            tuple(part[:seq_len] for part in data.document(number))
            for row in range(first, min(first + rows, total))
            for number in order.documents_of(row)
        ]
        for first in range(0, total, rows)
    ]


def stock_losses(config: RunConfig, run_dir: Path, model_dir: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step, as computed by stock parts."""
    model = _model(config, model_dir)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim, steps = config.optim, steps_of(config, run_dir)
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=optim.peak_lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )
    told = []
    for step, documents in enumerate(steps):
        num_learned = sum(float(mask[1:].sum()) for _, mask in documents)  # or the sum of weights
        total = 0.0
        for tokens, mask in documents:
            ids_BT = torch.from_numpy(tokens.astype(np.int64))[None]
            learned_T = torch.from_numpy(mask[1:].astype(bool))
            if not learned_T.any():
                continue
            logits_TV = model(input_ids=ids_BT, use_cache=False).logits[0, :-1][learned_T].float()
            targets_T = ids_BT[0, 1:][learned_T]
            losses_T = torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="none")
            loss = (losses_T * torch.from_numpy(mask[1:].astype(np.float32))[learned_T]).sum()
            (loss / num_learned).backward()
            total += loss.item() / num_learned
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in trained))
        if optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, optim.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optim, step, len(steps))
        adamw.step()
        adamw.zero_grad()
        told.append((total, norm))
    return told


def _model(config: RunConfig, model_dir: Path) -> torch.nn.Module:
    """Return the stock model, with peft's adapters if the run has adapters; without dropout.

    The adapters start with the same values as in hpc_tune.
    """
    tune = config.tune
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if tune.method == "full":
        return model.eval()
    ours = build(model_dir, torch.float32, tune, config.train.seed)
    allocate(ours.module, torch.device("cpu"))
    load_weights(ours)
    parameters = dict(ours.module.named_parameters())
    values = {saved: parameters[name].detach() for name, saved in ours.saved_names.items()}
    adapters = LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,
        use_rslora=tune.rslora,
        rank_pattern=tune.rank_pattern,
        alpha_pattern=tune.alpha_pattern,
        target_modules=tune.targets,
        use_dora=tune.method == "dora",
        task_type="CAUSAL_LM",
        modules_to_save=tune.modules_to_save or None,
        trainable_token_indices=list(ours.tokens) or None,
    )
    model = get_peft_model(model, adapters)
    assert not set_peft_model_state_dict(model, values).unexpected_keys
    return model.eval()
