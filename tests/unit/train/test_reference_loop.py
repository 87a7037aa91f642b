"""The whole of a run against a plain loop with stock parts: transformers, peft, AdamW, one process.

The plain loop does one document at a time, unpacked and unpadded. Ours packs them into rows and
cuts the rows into micro-batches.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hpc_tune.config.load import load_config
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.order import PackedSampler, SampleOrder
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter
from tests.support.nf4 import unpack_linears
from tests.support.training import losses, rows, worst_gap

STEPS, GLOBAL, SEQ_LEN, SEED, WARMUP, RANK, ALPHA = 10, 4, 384, 3, 4, 8, 16
LR = {"full": 1e-3, "lora": 5e-3, "dora": 5e-3, "qlora": 5e-3}
SAMPLE = ("lora", "qlora")
QUANTIZED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder for the data, which are the same for each method."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(
    scope="module",
    params=[x if x in SAMPLE else pytest.param(x, marks=pytest.mark.full) for x in LR],
)
def trained(request, tmp_path_factory, prepared):
    """Run hpc_tune in this process; return (method, its config, its run directory)."""
    if request.param == "qlora":
        pytest.importorskip("bitsandbytes")
    run_dir = tmp_path_factory.mktemp(request.param)
    config = load_config(
        None,
        [
            f"run.dir={run_dir}",
            f"data.cache={prepared}",
            f"tune.method={request.param}",
            f"tune.rank={RANK}",
            f"tune.alpha={ALPHA}",
            f"data.seq_len={SEQ_LEN}",
            "data.path=builtin:pydocs:heldout",
            "data.eval_path=null",
            f"batch.global_size={GLOBAL}",
            "batch.micro_size=2",
            f"train.max_steps={STEPS}",
            f"train.seed={SEED}",
            f"optim.lr={LR[request.param]}",
            f"optim.warmup_steps={WARMUP}",
            "optim.weight_decay=0.1",
            "run.tensorboard=false",
            "run.report=false",
            "run.threads=1",
        ],
    )
    assert run(config, StopAfter(None)) == 0
    return request.param, config, run_dir


def documents_of_each_step(config):
    """Return the (tokens, loss mask) pairs of each step, cut at SEQ_LEN as documented."""
    store = TokenStore.open(next(Path(config.data.cache).glob("*.h5")))
    order = PackedSampler(
        store.length_values,
        store.length_counts,
        store.documents_by_length,
        SampleOrder(SEQ_LEN, packing=True, seed=SEED),
    )
    for step in range(STEPS):
        numbers = [
            d for row in range(step * GLOBAL, (step + 1) * GLOBAL) for d in order.documents_of(row)
        ]
        yield [tuple(part[:SEQ_LEN] for part in store.document(d)) for d in numbers]


def stock_model(method, config, run_dir):
    base = run_dir / "builtin-tiny"
    options = {}
    if method == "qlora":
        quantized = BitsAndBytesConfig(**QUANTIZED, bnb_4bit_compute_dtype=torch.float32)
        options = {"quantization_config": quantized, "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)
    if method == "full":
        return model
    if method == "qlora":
        unpack_linears(model)
    # The first values of the adapters are hpc_tune's own; all else is stock.
    ours = build(base, torch.float32, config.tune, SEED)
    allocate(ours.module, torch.device("cpu"))
    load_weights(ours)
    parameters = dict(ours.module.named_parameters())
    values = {saved: parameters[name].detach() for name, saved in ours.saved_names.items()}
    adapters = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules="all-linear",
        use_dora=method == "dora",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, adapters)
    result = set_peft_model_state_dict(model, values)
    assert not result.unexpected_keys
    return model


def learning_rate(method, step):
    """Warm-up by quarters, then half a cosine down to a tenth, as the configuration says."""
    if step < WARMUP:
        return LR[method] * (step + 1) / WARMUP
    progress = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return LR[method] * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def plain_loop(method, config, run_dir):
    """Return (loss, gradient norm) of each step."""
    model = stock_model(method, config, run_dir)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR[method], foreach=False)
    for step, documents in enumerate(documents_of_each_step(config)):
        num_learned = sum(int(mask[1:].sum()) for _, mask in documents)
        total = 0.0
        for tokens, mask in documents:
            ids_BT = torch.from_numpy(tokens.astype(np.int64))[None]
            logits_TV = model(input_ids=ids_BT).logits[0, :-1]
            learned_T = torch.from_numpy(mask[1:].astype(bool))
            log_p_TV = torch.log_softmax(logits_TV[learned_T], dim=-1)
            loss = -log_p_TV.gather(1, ids_BT[0, 1:][learned_T][:, None]).sum() / num_learned
            loss.backward()
            total += loss.item()
        squares = sum(p.grad.double().square().sum() for p in trained)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(method, step)
        adamw.step()
        adamw.zero_grad()
        yield total, math.sqrt(squares)


def test_losses_and_gradient_norms_equal_a_plain_loop(trained):
    method, config, run_dir = trained
    plain = list(plain_loop(method, config, run_dir))
    assert worst_gap(losses(run_dir), [loss for loss, _ in plain]) < 1e-5
    norms = rows(run_dir, "grad_norm")
    for step, (_, norm) in enumerate(plain, 1):
        assert norms[step] == pytest.approx(norm, rel=1e-4), step


def test_the_documents_are_ragged_and_some_rows_hold_several(trained):
    _, config, _ = trained
    steps = list(documents_of_each_step(config))
    lengths = {len(tokens) for documents in steps for tokens, _ in documents}
    assert len(lengths) > 20
    assert max(len(documents) for documents in steps) > GLOBAL
