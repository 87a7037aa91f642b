"""The files of a model directory with any content: a clear error or success, nothing else."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.load import use_init_adapter
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.weights import index_model_directory
from tests.support.fuzz import JSON, damaged, flips, fuzz, said


def tiny():
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


FILES = tiny()
SHAPE, TOKENIZER = (json.loads(FILES[n]) for n in ("config.json", "tokenizer_config.json"))
SIZES = st.sampled_from([0, 1, 2, 7, -1, 10**9, 2**63, 1.5, "4", None, True, [], {}, "x"])


def put(folder, **files):
    for name, data in {**FILES, **files}.items():
        (folder / name).write_bytes(data)


def changed(base, values):
    return st.dictionaries(
        st.sampled_from(sorted(base)) | st.sampled_from(["auto_map", "quantization_config", "x"]),
        values | JSON,
        max_size=2,
    ).map(lambda changes: json.dumps({**base, **changes}).encode())


@fuzz(
    changed(SHAPE, SIZES) | flips(len(FILES["config.json"])) | st.binary(max_size=40) | JSON, few=60
)
def test_config_json_of_models(folder, drawn):
    if isinstance(drawn, tuple):
        drawn = damaged(FILES["config.json"], drawn)
    data = drawn if isinstance(drawn, bytes) else json.dumps(drawn).encode()
    put(folder, **{"config.json": data})
    try:
        build(folder, torch.float32, TuneConfig(), seed=0)
    except (DataError, ConfigError) as error:
        said(error)


NAMES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
SHORTEST = min(len(FILES[name]) for name in NAMES)


@fuzz(
    st.tuples(st.sampled_from(NAMES), flips(SHORTEST) | st.binary(max_size=40) | JSON)
    | changed(TOKENIZER, JSON),
    few=60,
)
def test_files_of_tokenizers(folder, drawn):
    name, data = drawn if isinstance(drawn, tuple) else ("tokenizer_config.json", drawn)
    if isinstance(data, tuple):
        data = damaged(FILES[name][:SHORTEST], data) + FILES[name][SHORTEST:]
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    put(folder, **{name: data})
    try:
        load_tokenizer(folder)
    except DataError as error:
        said(error, str(folder))


@fuzz(st.dictionaries(st.just("weight_map") | st.text(max_size=4), JSON) | JSON, few=60)
def test_indices_of_weights(folder, drawn):
    put(folder, **{"model.safetensors.index.json": json.dumps(drawn).encode()})
    try:
        index_model_directory(folder)
    except DataError as error:
        said(error, str(folder))


@functools.cache
def built():
    folder = Path(tempfile.mkdtemp())
    put(folder)
    model = build(folder, torch.float32, TuneConfig(), seed=0)
    shutil.rmtree(folder)
    return model


ADAPTER = {"r": 16, "lora_alpha": 32, "base_model_name_or_path": "../../secret", "use_dora": False}


@fuzz(
    st.tuples(
        changed(ADAPTER, SIZES) | st.binary(max_size=40) | JSON,
        flips(len(FILES["model.safetensors"])) | st.none(),
    ),
    few=60,
)
def test_adapters_to_start_from(folder, drawn):
    settings, damage = drawn
    settings = settings if isinstance(settings, bytes) else json.dumps(settings).encode()
    weights = FILES["model.safetensors"]
    (folder / "adapter_config.json").write_bytes(settings)
    weights = weights if damage is None else damaged(weights, damage)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    try:
        use_init_adapter(built(), folder)
    except (DataError, ConfigError) as error:
        said(error, str(folder))
