"""The file of a reference: of what it is, and what becomes of it between two starts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_tune.checkpoint.locate import locate
from hpc_tune.config.load import load_config
from hpc_tune.errors import DataError
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.train import reference
from hpc_tune.train.run import run
from hpc_tune.world.device import GpuArchitecture
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, losses, train

DYNAMIC = SimpleNamespace(rope_parameters={"rope_type": "dynamic"})
PLAIN = SimpleNamespace(rope_parameters={"rope_type": "default"})


def key_of(**changes):
    """Return the key of a reference with something changed."""
    said = {
        **{"content": "c", "tokenizer": "t", "identity": "i", "sample": "s", "seq_len": 64},
        **{"dtype": torch.float32, "method": "lora", "init_from": None, "float8": False},
        **{"rank": 16, "alpha": 32, "rslora": False, "alpha_pattern": {}, "expert_rank": None},
        **{"base_dtype": None},
        **{"positions": PLAIN, "tf32": True},
    } | changes
    scale = ("rank", "alpha", "rslora", "alpha_pattern", "expert_rank", "base_dtype")
    tune = SimpleNamespace(
        method=said["method"],
        init_from=said["init_from"],
        has_reference=True,
        **{name: said[name] for name in scale},
    )
    train = SimpleNamespace(float8=said["float8"], tf32=said["tf32"], deterministic=False)
    built = SimpleNamespace(
        architecture_hash=said["identity"],
        dtype=said["dtype"],
        seq_len=said["seq_len"],
        config=said["positions"],
    )
    attributes = SimpleNamespace(content=said["content"], tokenizer_fingerprint=said["tokenizer"])
    model = SimpleNamespace(
        config=SimpleNamespace(tune=tune, train=train),
        built=built,
        weights_fingerprint=said["sample"],
    )
    store, device = SimpleNamespace(attributes=attributes), torch.device("cpu")
    return reference._cache_key(model, store, device)


def test_a_reference_has_another_name_if_anything_that_it_follows_from_changes(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    changes = {
        **{"content": "other rows", "tokenizer": "another", "identity": "another model"},
        **{
            "sample": "other weights",
            "dtype": torch.bfloat16,
            "method": "qlora",
            "base_dtype": "fp8",
        },
        **{"init_from": str(tmp_path), "float8": True},
    }
    names = {key_of(), *(key_of(**{name: value}) for name, value in changes.items())}
    assert len(names) == 1 + len(changes)
    assert key_of(seq_len=128) == key_of(), "positions that a text's length does not scale"
    scaled = [key_of(positions=DYNAMIC, seq_len=length) for length in (64, 128)]
    assert scaled[0] != scaled[1]


def test_an_adapter_that_counts_by_another_scale_is_another_reference(tmp_path):
    """Its weights are the same: lora_alpha is in adapter_config.json."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    scales = [{}, {"alpha": 64}, {"rslora": True}, {"alpha_pattern": {"q_proj": 64}}]
    assert len({key_of(init_from=str(tmp_path), **scale) for scale in scales}) == len(scales)
    assert len({key_of(**scale) for scale in scales}) == 1, "new adapters change nothing"


def test_products_in_tf32_are_another_reference_where_a_gpu_has_them(monkeypatch):
    assert key_of(tf32=False) == key_of(tf32=True), "on a CPU"
    monkeypatch.setattr(reference, "find_architecture", lambda _: GpuArchitecture((9, 0)))
    assert key_of(tf32=False) != key_of(tf32=True)
    in_bf16 = {key_of(tf32=tf32, dtype=torch.bfloat16) for tf32 in (False, True)}
    assert len(in_bf16) == 1


def test_what_was_kept_is_read_as_it_was_and_anything_else_is_refused(tmp_path):
    file, values = tmp_path / "reference.npy", np.arange(6, dtype=np.float32).reshape(3, 2)
    assert reference._read_reference(file, 3) is None
    reference._write_reference(file, values)
    assert np.array_equal(reference._read_reference(file, 3), values)
    assert np.array_equal(np.load(file), values), "and numpy reads it"
    with pytest.raises(DataError, match="is of other data"):
        reference._read_reference(file, 4)
    np.save(file, values * np.float32(1.05))
    with pytest.raises(DataError, match="is damaged .*not those that were written.*computed again"):
        reference._read_reference(file, 3)
    file.write_bytes(b"")
    with pytest.raises(DataError, match="is damaged"):
        reference._read_reference(file, 3)


@pytest.fixture
def settings(tmp_path):
    """Return a function that gives the settings of a run of dpo on a base, in a folder."""
    rows = [{"prompt": f"{n}?", "chosen": "yes " * (n % 5 + 1), "rejected": "no"} for n in range(9)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(base, name, *more):
        words = [*SMALL, f"model.path={base}", f"data.path={data}", "data.packing=false"]
        words += ["tune.objective=dpo", "tune.method=full", f"data.cache={tmp_path / 'cache'}"]
        words += ["batch.global_size=4", "train.max_steps=2", f"run.dir={tmp_path / name}"]
        return [*words, *more]

    return of


def noisy(base, folder, share):
    """Write a copy of a model whose weights differ by noise of a share of their deviation."""
    write_tiny_model(folder)
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for values in weights.values():
        if values.dim() > 1:
            noise = torch.randn(values.shape, generator=generator)
            values += share * values.float().std() * noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_full_fine_tuning_compares_with_its_own_base_and_no_other(settings, tmp_path):
    base = tmp_path / "base"
    write_tiny_model(base)
    bases = [base, *(noisy(base, tmp_path / f"noise {s}", s) for s in (1e-4, 1e-2))]
    for number, one in enumerate(bases):
        assert run(load_config(None, settings(one, str(number))), StopAfter(None)) == 0
        first = losses(tmp_path / str(number))[0]
        assert first == pytest.approx(0.6931472, abs=2e-7), "ln 2, as nothing moved"
    assert len([*(tmp_path / "cache").glob("reference-*.npy")]) == len(bases)


def test_a_checkpoint_of_pairs_says_for_which_texts_positions_were_scaled(settings, tmp_path):
    """For the longest answer with its prompt, and not for rows of data.seq_len."""
    base = tmp_path / "base"
    write_tiny_model(base)
    words = settings(base, "run", "model.rope_scaling={rope_type: dynamic, factor: 2}")
    assert run(load_config(None, words), StopAfter(None)) == 0
    said, log = locate(tmp_path / "run").state.scaled_for, tmp_path / "run/logs/rank-0.txt"
    assert said is not None
    assert said < 128
    assert f"for texts of {said} tokens, the longest answer" in log.read_text()
    assert run(load_config(None, settings(base, "plain")), StopAfter(None)) == 0
    assert locate(tmp_path / "plain").state.scaled_for is None


def test_full_fine_tuning_does_not_go_on_beside_another_base(settings, tmp_path):
    base = tmp_path / "base"
    write_tiny_model(base)
    assert run(load_config(None, settings(base, "run")), StopAfter(None)) == 0
    other = noisy(base, tmp_path / "other", 1e-2)
    for file in (tmp_path / "cache").glob("reference-*.npy"):
        file.unlink()
    done = train(settings(other, "run", "train.max_steps=4"))
    assert done.returncode == 2, done.stderr
    assert "model.path: it has other weights than the checkpoint's model" in done.stderr
