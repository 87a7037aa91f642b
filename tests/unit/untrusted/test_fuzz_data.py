"""Data, prepared files and tensors of any content: a clear error or success, nothing else."""

import csv
import json
import tempfile
from pathlib import Path

import h5py
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from hypothesis import strategies as st

from hpc_tune.data.chats import find_answer_end_token
from hpc_tune.data.files import find_files
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import KNOWN_FIELDS
from hpc_tune.errors import CheckpointError, DataError
from hpc_tune.model.weights import (
    FULL_SHAPES_KEY,
    NAMES_KEY,
    OFFSETS_KEY,
    index_files,
    index_model_directory,
)
from tests.support.data import byte_tokenizer, store_of_lengths
from tests.support.fuzz import JSON, YAML_TEXTS, damaged, flips, fuzz, said

MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "tool_calls"]),
        st.sampled_from(["user", "assistant", "human", "gpt", "system"]) | JSON,
        max_size=3,
    ),
    max_size=3,
)
RECORDS = st.dictionaries(
    st.sampled_from(sorted(KNOWN_FIELDS)) | st.text(max_size=4),
    st.text(max_size=30) | MESSAGES | JSON,
    max_size=4,
)


TOKENIZER = byte_tokenizer()
HARD_LINES = [
    b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": %s}]}' % (b"[" * 400 + b"]" * 400),
    b'{"text": 1, "weight": 1e999}',
    b'{"text": "a", "text": "b"}',
    b'{"text": "\\ud800 half a character"}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}, {"role": "assistant", "content": 1}]}',
    b'{"prompt": "a\\u0000b", "completion": "<|im_end|>"}',
]


def prepare_all(path, tokenizer=TOKENIZER, template=""):
    """Prepare ``path`` and read what came of it; nothing half-written may be left.

    What is refused is told by the name of the file, or by what says that it is the ``template``.
    """
    out = path.with_name(f"{path.name}.h5")
    try:
        prepare_data(str(path), out, tokenizer, PrepareSettings(64))
        store = TokenStore.open(out)
        for document in range(store.num_documents):
            tokens, mask = store.document(document)
            assert 0 < len(tokens) == len(mask) <= 64
    except DataError as error:
        said(error, template if template and template in str(error) else path.name)
        assert not out.exists()
    assert not [file for file in path.parent.rglob("*") if file.name.endswith(".tmp")]


@fuzz(
    st.lists(
        RECORDS.map(json.dumps).map(str.encode)
        | st.binary(max_size=40)
        | st.sampled_from(HARD_LINES),
        max_size=4,
    ).map(b"\n".join)
)
def test_lines_of_json(folder, data):
    for name in ("d.jsonl", "d.json", "d.txt", "d.csv", "d.jsonl.gz", "d.csv.zst"):
        (folder / name).write_bytes(data)
        prepare_all(folder / name)


TEMPLATE_PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}", "{% endif %}"),
    *("{{ m.content }}", "{{ m['role'] }}", "{{ m }}", "{{ messages[9] }}", "{{ tools | tojson }}"),
    *("<|im_start|>", "<|im_end|>", "assistant\n", "\n", "x", "{{ 1 / 0 }}", "{{ 2 ** 2000 }}"),
    *("{{ raise_exception('no') }}", '{{ strftime_now("%Y") }}', "{{ strftime_now('%') }}"),
    *("{% generation %}", "{% endgeneration %}", "{% set m = messages[0] %}", "{{ ", "{%", "%}"),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__ }}",
        "{# #}",
        "{%- else %}",
    ),
    *("{% include 'x' %}", "{{ range(999999999) }}", "{{ '%s' % m }}", "{{ '%d' % m }}", "\ud800"),
    *("{{ m.content | int }}", "{{ m.content.split('a')[3] }}", "{{ bos_token + eos_token }}"),
    *("{{ '{0.x}'.format(m) }}", "{% break %}", "{{ m.content | nosuch }}", "{% if m is nosuch %}"),
    *("{{ none + 1 }}", "{{ messages | sum }}", "{{ 'a' | indent(99999) }}", "{{ lipsum() }}"),
)
CHATS = "".join(
    f"{json.dumps({'messages': turns})}\n"
    for turns in (
        [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a" * 90}] * 2,
    )
)


@fuzz(
    st.lists(st.sampled_from(TEMPLATE_PIECES) | st.text(max_size=4), max_size=9)
    .map("".join)
    .filter(bool)
)
def test_chat_templates(folder, template):
    (folder / "d.jsonl").write_text(CHATS)
    (folder / "t.jinja").write_text(template, encoding="utf-8", errors="surrogatepass")
    tokenizer = byte_tokenizer(template)
    prepare_all(folder / "d.jsonl", tokenizer, "the chat template of")
    try:
        find_answer_end_token(tokenizer)
    except DataError as error:
        said(error, "the chat template of")


PATTERNS = st.sampled_from(
    ["*", "**", "**/*", "data/*", "*.jsonl", "train.jsonl", "../*", "/etc/*", "[", "data/train-*"]
) | st.text(max_size=6)
SPLIT_FILES = PATTERNS | st.lists(
    PATTERNS | st.fixed_dictionaries({"split": JSON, "path": PATTERNS | JSON}), max_size=3
)
CONFIGS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "config_name": JSON,
            "data_files": SPLIT_FILES | st.dictionaries(PATTERNS, SPLIT_FILES, max_size=2) | JSON,
            "data_dir": PATTERNS | JSON,
            "default": JSON,
        },
    )
    | JSON,
    max_size=3,
)
CARDS = (
    st.fixed_dictionaries({"configs": CONFIGS | JSON}).map(lambda head: yaml.safe_dump(head))
    | YAML_TEXTS
).map(lambda head: f"---\n{head}\n---\n".encode()) | st.binary(max_size=60)


@fuzz(st.tuples(CARDS, st.booleans()))
def test_cards_of_datasets(folder, drawn):
    card, in_folder = drawn
    (folder / "secret.jsonl").write_text(CHATS)
    data = folder / "data"
    for name in ("train.jsonl", "data/train-0.jsonl", "data/test-0.jsonl")[: 1 + 2 * in_folder]:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(CHATS)
    (data / "README.md").write_bytes(card)
    try:
        found = find_files(str(data))
    except DataError as error:
        said(error, "data")
        return
    assert all(file.is_relative_to(data) and ".." not in file.parts for file in found.files)


@fuzz(st.tuples(JSON, st.sampled_from(["dataset_dict.json", "state.json"]), st.binary(max_size=40)))
def test_descriptions_of_saved_datasets(folder, drawn):
    value, name, data = drawn
    data_files = {"_data_files": [{"filename": value}], "splits": ["train", value]}
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    (folder / "a" / name).write_text(json.dumps(data_files))
    (folder / "b" / name).write_bytes(data)
    for path in ("a", "b"):
        try:
            find_files(str(folder / path))
        except DataError as error:
            said(error, str(folder / path))


def table_bytes(write):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "d"
        write(pa.table({"text": [f"t{n}" * 9 for n in range(40)], "n": list(range(40))}), file)
        return file.read_bytes()


def write_stream(table, file):
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=10)


PARQUET, ARROW = table_bytes(pq.write_table), table_bytes(write_stream)


@fuzz(st.tuples(flips(len(PARQUET)), flips(len(ARROW))))
def test_damaged_parquet_and_arrow(folder, drawn):
    (folder / "d.parquet").write_bytes(damaged(PARQUET, drawn[0]))
    (folder / "d.arrow").write_bytes(damaged(ARROW, drawn[1]))
    prepare_all(folder / "d.parquet")
    prepare_all(folder / "d.arrow")


@fuzz(st.lists(RECORDS, min_size=1, max_size=3))
def test_rows_of_parquet(folder, rows):
    try:
        pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet")
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeEncodeError):
        return  # not a table at all
    prepare_all(folder / "d.parquet")


@fuzz(st.lists(st.lists(st.text(max_size=8), min_size=1, max_size=4), max_size=5), few=60)
def test_rows_of_csv(folder, rows):
    with (folder / "d.csv").open("w", newline="", errors="surrogatepass") as file:
        csv.writer(file).writerows([["prompt", "completion", "weight"], *rows])
    prepare_all(folder / "d.csv")


def hdf5_bytes():
    """A prepared file, and where its datasets are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.h5"
        store_of_lengths(path, [5, 9, 3, 3, 12])
        with h5py.File(path) as file:
            found = [file[name] for name in DATASETS]
            ranges = [(d.id.get_offset(), d.size * d.dtype.itemsize) for d in found]
        return path.read_bytes(), [at + n for at, size in ranges for n in range(size)]


DATASETS = ("tokens", "loss_mask", "documents/offsets", "documents/by_length")
DATASETS += ("lengths/values", "lengths/counts")
HDF5, IN_DATASETS = hdf5_bytes()


# The datasets are a fiftieth of so small a file.
anywhere = st.sampled_from(IN_DATASETS) | st.integers(0, len(HDF5) - 1)


@fuzz(
    st.tuples(
        st.lists(st.tuples(anywhere, st.integers(0, 255)), max_size=8),
        st.integers(len(HDF5) // 2, len(HDF5)),
    )
)
def test_damaged_prepared_data(folder, drawn):
    """Anywhere, and cut off: in the structure HDF5's own library would end the process."""
    (folder / "s.h5").write_bytes(damaged(HDF5, drawn))
    try:
        store = TokenStore.open(folder / "s.h5")
        for document in range(store.num_documents):
            store.document(document)
    except DataError as error:
        said(error, "s.h5")


def tensor_bytes():
    from safetensors.torch import save

    return save({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)})


TENSORS = tensor_bytes()
NUMBERS = st.lists(st.integers(-1, 9), max_size=3) | JSON
PLACES = st.dictionaries(st.sampled_from(["a", "b"]), NUMBERS, max_size=2) | JSON


@fuzz(
    st.fixed_dictionaries(
        {}, optional={k: PLACES for k in (OFFSETS_KEY, FULL_SHAPES_KEY, NAMES_KEY)}
    )
)
def test_what_files_of_tensors_say_of_their_places(folder, drawn):
    from safetensors.torch import save_file

    places = {key: json.dumps(value) for key, value in drawn.items()}
    file = folder / "rank-0.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, file, places)
    try:
        index = index_files([file], CheckpointError)
        for name in index.shapes:
            if index.tensor_bytes(name) < 1 << 20:
                index.fill(torch.empty(index.shapes[name], dtype=index.dtypes[name]), name)
    except CheckpointError as error:
        said(error, str(folder))


@fuzz(flips(len(TENSORS)) | st.binary(max_size=40))
def test_damaged_tensors(folder, drawn):
    data = drawn if isinstance(drawn, bytes) else damaged(TENSORS, drawn)
    (folder / "model.safetensors").write_bytes(data)
    for look in (
        lambda: index_model_directory(folder),
        lambda: index_files([folder / "model.safetensors"], CheckpointError),
    ):
        try:
            index = look()
            for name in index.shapes:
                index.fill(torch.empty(index.shapes[name], dtype=index.dtypes[name]), name)
        except (DataError, CheckpointError) as error:
            said(error, "model.safetensors")
