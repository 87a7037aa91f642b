"""What a run says before it begins."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_tune import cli
from hpc_tune.config.load import load_config
from hpc_tune.config.optim import OptimConfig
from hpc_tune.data.counts import Counters
from hpc_tune.errors import ConfigError
from hpc_tune.model.loss import LossModel
from hpc_tune.probe.fabric import tcp_warning
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import ModelSize, WeightGroup
from hpc_tune.train.data import Data
from hpc_tune.train.model import Model
from hpc_tune.train.sources import OpenSource
from hpc_tune.train.startup import describe
from hpc_tune.train.startup.describe import (
    _count_data,
    _describe_batch,
    _describe_data,
    describe_allocator,
    describe_learning_rate,
    describe_method,
    warn_few_steps,
    warn_idle_ranks,
    warn_useless_8bit_optimizer,
)


def test_a_limited_source_counts_by_the_documents_that_are_used():
    """The report's figures beside the line that the run logs."""
    counters = Counters(examples=9, documents=9, tokens=90, loss_tokens=45)
    store = SimpleNamespace(
        num_documents=9,
        attributes=SimpleNamespace(counters=counters),
        labels=None,
        document=lambda _: (np.ones(10), np.arange(10) < 5),
    )
    loader = SimpleNamespace(num_rows_per_epoch=3, padding=0.0)
    sources = [OpenSource("a", "a", store), OpenSource("b", "b", store, limit=4)]
    data = Data(sources, sources[1:], loader, total_steps=1)
    found = _count_data(data)
    assert (found["documents"], found["tokens"], found["loss_tokens"]) == (13, 130, 65)
    assert found["held_out_documents"] == 4
    assert "13 documents" in _describe_data(load_config(None, []).data, data)


def warnings_of(settings, total_steps, rows_per_epoch):
    config = load_config(None, settings)
    rows = config.batch.global_size
    return list(warn_few_steps(config.train, config.optim, rows, total_steps, rows_per_epoch))


@pytest.mark.parametrize(
    ("total_steps", "rows_per_epoch", "warmup", "words"),
    [
        (1, 40, 0, ["an epoch is 40 rows, 1 updates"]),
        (
            3,
            130,
            100,
            [
                "an epoch is 130 rows, 3 updates",
                "the run ends during warm-up (optim.warmup_steps=100 in a run of 3 steps): the "
                "rate reaches 3e-05, not 0.001; use fewer",
            ],
        ),
        (60, 40, 10, []),
        (40, 2200, 10, []),
        (
            40,
            2200,
            40,
            ["in a run of 40 steps): the rate reaches 0.001 in the last step alone; use fewer"],
        ),
        (1, 2200, 1, []),
    ],
)
def test_too_few_updates_are_told_of(total_steps, rows_per_epoch, warmup, words):
    settings = ["batch.global_size=64", f"optim.warmup_steps={warmup}", "optim.lr=1e-3"]
    told = warnings_of(settings, total_steps, rows_per_epoch)
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


@pytest.mark.parametrize(
    ("name", "num_trained", "spared", "device", "words"),
    [
        ("adamw", 1_000_000, 0, "cpu", []),
        ("adamw_8bit", 1_000_000, 5_900_000, "cuda", []),
        ("adamw_8bit", 10_000_000, 59_000_000, "cpu", ["about 1 s of one core in each step"]),
        ("adamw_8bit", 5_000, 0, "cuda", ["has no effect: no trained tensor has 4,096 values"]),
    ],
)
def test_moments_in_8_bits_that_take_long_or_gain_nothing_are_told_of(
    name, num_trained, spared, device, words
):
    size = ModelSize(0, num_trained, 0, 4 * num_trained, moment_savings_bytes=spared)
    told = list(warn_useless_8bit_optimizer(OptimConfig(name=name), size, torch.device(device)))
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


@pytest.mark.parametrize(
    ("rows", "layout", "said"),
    [
        (8, Layout(16, 1), ["8 rows for 16 ranks: 8 ranks have nothing to do. Use 8 ranks or"]),
        (1, Layout(1, 2, 4), ["1 row for 8 ranks: 4 ranks have nothing to do. Use 4 ranks or"]),
        (16, Layout(16, 1), []),
        (17, Layout(16, 1), []),
    ],
)
def test_ranks_without_a_row_are_told_of(rows, layout, said):
    told = list(warn_idle_ranks(rows, layout))
    assert len(told) == len(said)
    assert all(text.startswith(word) for word, text in zip(said, told, strict=True))


@pytest.mark.parametrize(
    ("rows", "ranks", "said"),
    [
        (8, 4, "8 rows per step over 4 ranks: 2 each; "),
        (4, 3, "4 rows per step over 3 ranks: 1 of them has 2, the others 1 and wait; "),
        (8, 16, "8 rows per step over 16 ranks: 8 of them have 1, the others none; "),
    ],
)
def test_how_the_rows_of_a_step_are_shared_is_told(rows, ranks, said):
    loader = SimpleNamespace(total_rows=160, num_rows_per_epoch=80)
    data: Any = SimpleNamespace(loader=loader, total_steps=20)
    assert _describe_batch(rows, Layout(ranks, 1), data).startswith(said)


def test_epochs_that_a_number_of_steps_overrules_are_told_of():
    settings = ["train.epochs=3", "train.max_steps=500"]
    [told] = warnings_of(settings, 500, 2200)
    assert "train.epochs=3 is not used: train.max_steps=500 is set" in told
    assert warnings_of(["train.max_steps=500"], 500, 2200) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "0.0002 (optim.lr, as auto sets it for adapters): 3 of 100 steps of warm-up, then"),
        (["tune.method=full"], "1e-05 (optim.lr, as auto sets it for all weights): 3 of 100"),
        (["optim.lr=1e-3", "optim.warmup_steps=0"], "0.001 (optim.lr): cosine"),
        (
            ["optim.lr=1e-3", "optim.warmup_steps=9", "optim.schedule=linear"],
            "0.001 (optim.lr): 9 of 100 steps of warm-up, then linear",
        ),
        (
            ["optim.lr=1e-3", "optim.reference_batch=16"],
            "0.002 (optim.lr=0.001 is for 16 rows per step (sqrt)): 3 of 100",
        ),
    ],
)
def test_the_learning_rate_is_told_with_where_it_comes_from(settings, said):
    config = load_config(None, ["model.path=/m", *settings])
    text = describe_learning_rate(config.optim, config.tune, config.batch.global_size, 100)
    assert text.startswith(said)


@pytest.mark.parametrize(
    ("method", "trained", "said"),
    [
        (
            "full",
            [("blocks", False, 9000), ("embedding", False, 2000), ("blocks", True, 500)],
            "full: 11.5k trained, 9.0k in blocks, 2.0k in embeddings, 500 in norms and biases",
        ),
        (
            "dora",
            [("blocks", False, 1000), ("blocks", True, 250)],
            "dora r=16 alpha=32: 1.2k trained (1.25%), 1.0k in adapters, 250 in magnitudes",
        ),
    ],
)
def test_the_method_is_told_with_what_it_trains_of_each_kind(method, trained, said):
    weights = tuple(
        WeightGroup(part, "whole", True, is_vector, num) for part, is_vector, num in trained
    )
    num = sum(weights.num_values for weights in weights)
    frozen = 0 if method == "full" else 100_000 - num
    size = ModelSize(frozen, num, 4 * frozen, 4 * num, weights=weights)
    settings = ["model.path=/m", f"tune.method={method}"]
    assert describe_method(load_config(None, settings).tune, size) == said
    tune = load_config(None, [*settings, "tune.rank=8"]).tune
    unused = "; tune.rank and tune.alpha have no effect" if method == "full" else ""
    assert describe_method(tune, size) == said.replace("r=16", "r=8") + unused


@pytest.mark.parametrize(
    ("words", "told"),
    [([], False), (["train.seed=1"], False), (["model.path=/m"], True), (["data.path=/d"], True)],
)
def test_whose_defaults_hold_is_told_where_no_file_says_anything(monkeypatch, capsys, words, told):
    monkeypatch.setattr("hpc_tune.train.run.run", lambda config, force: 0)
    assert cli.main(words) == 0
    assert ("no --config: defaults" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("kind", "within", "compiled", "device", "why"),
    [
        ("llama", True, False, "cpu", ""),
        ("llama", True, True, "cpu", "train.compile=true"),
        ("llama", False, False, "cpu", "llama models need it"),
        ("opt", True, False, "cpu", "opt models need it"),
        ("opt", True, True, "cuda", "opt models need it"),
    ],
)
def test_why_a_run_has_a_mask(kind, within, compiled, device, why):
    model = model_of(kind, within, compiled)
    assert model.choose_kernels(torch.device(device)).mask_reason == why


@pytest.mark.parametrize(
    ("kind", "device", "seq_len", "is_refused"),
    [("opt", "cuda", 65537, True), ("opt", "cuda", 65536, False), ("opt", "cpu", 65537, False)],
)
def test_rows_whose_mask_a_gpu_would_misread_are_refused(kind, device, seq_len, is_refused):
    model = model_of(kind, True, False, seq_len)
    if not is_refused:
        model.refuse_too_long_masked_rows(torch.device(device))
        return
    with pytest.raises(ConfigError, match=r"=65537: .* \(opt models need it\).* at most 65536"):
        model.refuse_too_long_masked_rows(torch.device(device))


def model_of(kind, within, compiled, seq_len=64):
    config = SimpleNamespace(
        model_type=kind, num_attention_heads=4, hidden_size=32, num_hidden_layers=2
    )
    module = LossModel(torch.nn.Identity(), config, within)
    built: Any = SimpleNamespace(module=module, config=config, dtype=torch.bfloat16)
    tune = SimpleNamespace(method="lora", dropout=0.0)
    train = SimpleNamespace(compiles=compiled, float8=False)
    settings: Any = SimpleNamespace(train=train, tune=tune, data=SimpleNamespace(seq_len=seq_len))
    size: Any = None
    return Model(built, size, settings)


@pytest.mark.parametrize(
    ("device", "environ", "said"),
    [
        ("cuda", {"PYTORCH_ALLOC_CONF": "a:1"}, "; PYTORCH_ALLOC_CONF=a:1"),
        (
            "cuda",
            {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
            "; PYTORCH_CUDA_ALLOC_CONF=b:2",  # torch does not read the other one then
        ),
        ("cuda", {}, ""),
        ("cpu", {"PYTORCH_ALLOC_CONF": "a:1"}, ""),
    ],
)
def test_the_allocator_of_a_gpu_is_told_of(device, environ, said):
    assert describe_allocator(torch.device(device), environ) == said


@pytest.mark.parametrize(
    ("cards", "plugin", "nodes", "device", "names", "said"),
    [
        (
            4,
            "",
            2,
            "cuda",
            "=hsn0",
            ["over hsn0: Slingshot needs", "all 4 interfaces in run.interface, such as hsn0"],
        ),
        (4, "", 2, "cuda", "=hsn0,hsn1,hsn2,hsn3", ["by TCP between the nodes, over hsn0, hsn1"]),
        (4, "librccl-net.so", 2, "cuda", "=hsn0", []),
        (0, "", 2, "cuda", "=eth0", []),
        (4, "", 1, "cuda", "", []),
        (4, "", 2, "cpu", "=hsn0", []),
    ],
)
def test_a_run_tells_that_nccl_sends_by_tcp_beside_a_faster_network(
    cards, plugin, nodes, device, names, said, tmp_path, monkeypatch
):
    for number in range(cards):
        (tmp_path / "class" / "cxi" / f"cxi{number}" / "device").mkdir(parents=True)
    library = SimpleNamespace(name="NCCL", plugin=plugin)
    monkeypatch.setattr(describe, "find_nccl", lambda: library)
    comm = SimpleNamespace(
        device=torch.device(device), world=SimpleNamespace(num_nodes=nodes, size=8)
    )
    found = describe.warn_slow_network(comm, {"NCCL_SOCKET_IFNAME": names}, tmp_path)
    assert len(found) == bool(said)
    assert all(words in text for text in found for words in said)
    assert not found or ("run.interface" in found[0]) == (len(said) == 2)


def test_the_example_of_interfaces_is_that_of_the_network():
    for kind, has_example in (("Slingshot", True), ("EFA", False)):
        text = tcp_warning([kind] * 2, "NCCL", "", "=eth0")
        assert f"{kind} needs its network plugin" in text
        assert "all 2 interfaces in run.interface" in text
        assert ("hsn0" in text) == has_example


def test_a_run_on_gpus_tells_of_settings_that_torch_has_not_read(monkeypatch):
    monkeypatch.setattr(describe, "read_allocator_settings", lambda: {"expandable_segments": False})
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for device, num in (("cuda", 1), ("cpu", 0)):
        comm = SimpleNamespace(
            device=torch.device(device), world=SimpleNamespace(num_nodes=1, size=8)
        )
        found = describe.warn_gpu_setup(comm, environ)
        assert len(found) == num
        assert all("torch has not read expandable_segments:True" in text for text in found)


@pytest.mark.parametrize(
    ("base_dtype", "why", "said"),
    [
        (None, "", ""),
        ("fp8", "", "; the base is multiplied in float8"),
        ("fp8", "no GPU", "; the base is multiplied in bfloat16: no GPU"),
    ],
)
def test_it_is_said_how_a_float8_base_is_multiplied(monkeypatch, base_dtype, why, said):
    monkeypatch.setattr(describe, "explain_missing_float8_matmuls", lambda *_: why)
    config = SimpleNamespace(tune=SimpleNamespace(base_dtype=base_dtype))
    model = SimpleNamespace(config=config, built=SimpleNamespace(dtype=torch.bfloat16))
    assert describe.describe_float8_base(model, torch.device("cpu")) == said
