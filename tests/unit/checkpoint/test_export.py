import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hpc_tune.checkpoint import export, merge
from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.checkpoint.export_metadata import _read_license
from hpc_tune.checkpoint.locate import locate, require_base
from hpc_tune.config.load import load_config
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import CheckpointError, ConfigError, DataError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.regions import Region, write_regions
from hpc_tune.model.tensor_sources import Box
from tests.support.ranks import HANG_S
from tests.support.training import give_manifest

TOKENS_BT = torch.tensor([[5, 9, 2, 77, 31, 8, 8, 60]])
METHODS = {
    "lora": TuneConfig(method="lora", rank=4, alpha=6.0),
    "dora": TuneConfig(method="dora", rank=4, alpha=6.0),
    "rslora": TuneConfig(method="lora", rank=4, alpha=6.0, rslora=True),
    "full": TuneConfig(method="full"),
}


def write_llama(directory: Path, dtype: torch.dtype) -> None:
    """Two layers, an untied head, and several safetensors files."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    write_tiny_model(folder / "tiny")
    write_llama(folder / "llama", torch.float32)
    write_llama(folder / "llama-bf16", torch.bfloat16)
    return folder


def trained(base: Path, tune: TuneConfig, checkpoint: Path) -> torch.nn.Module:
    """Our module with random trained values, which two ranks have saved to ``checkpoint``."""
    built = build(base, torch.float32, tune, 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    generator = torch.Generator().manual_seed(11)
    ranks: list[list[Region]] = [[], []]
    for name, parameter in built.module.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.add_(0.2 * noise * parameter.data.abs().mean().clamp(min=0.1))
        half = parameter.shape[0] // 2
        for rank, rows in enumerate((slice(0, half), slice(half, None))):
            for prefix in ("", "exp_avg.", "exp_avg_sq."):
                part = parameter.data[rows] if not prefix else torch.ones_like(parameter[rows])
                offset = (rows.start, *(0,) * (parameter.dim() - 1))
                full_name = prefix + built.saved_names[name]
                ranks[rank].append(
                    Region(
                        full_name,
                        part.dtype,
                        Box(offset, tuple(part.shape)),
                        tuple(parameter.shape),
                        part.contiguous,
                    )
                )
    checkpoint.mkdir(parents=True)
    for rank, regions in enumerate(ranks):
        write_regions(checkpoint / f"rank-{rank:05d}.safetensors", regions)
    give_manifest(checkpoint)
    return built.module.eval()


@torch.no_grad()
def logits(model):
    lm = model.causal_lm() if hasattr(model, "causal_lm") else model
    return lm(input_ids=TOKENS_BT, use_cache=False).logits


def stock(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def close(a, b):
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_what_is_stored_transposed_or_by_another_name_is_merged(tmp_path, kind):
    """GPT-2 keeps its weights as [in, out], square ones, too; GPT-NeoX its head by another name."""
    said = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    said |= {"intermediate_size": 48} if kind == "gpt_neox" else {}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **said))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "base")
    ours = trained(tmp_path / "base", METHODS["lora"], tmp_path / "step")
    out = export_merged(tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "out")
    assert close(logits(stock(out)), logits(ours))
    assert not close(logits(stock(out)), logits(stock(tmp_path / "base")))
    write_tiny_model(tmp_path / "tiny")
    for file in (tmp_path / "tiny").glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "base" / file.name)
    peft = export_adapter(
        tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "adapter"
    )
    wrapped = PeftModel.from_pretrained(stock(tmp_path / "base"), peft).eval()
    assert close(logits(wrapped), logits(ours))


@pytest.mark.parametrize("base", ["tiny", "llama"])
@pytest.mark.parametrize("method", ["lora", "dora", "rslora"])
def test_stock_peft_loads_the_adapter_and_computes_the_same(bases, tmp_path, base, method):
    ours = trained(bases / base, METHODS[method], tmp_path / "step")
    out = export_adapter(tmp_path / "step", METHODS[method], bases / base, tmp_path / "out")
    wrapped = PeftModel.from_pretrained(stock(bases / base), out).eval()
    assert close(logits(wrapped), logits(ours))
    assert not close(logits(wrapped), logits(stock(bases / base))), "the adapter does nothing"
    assert next(iter(wrapped.peft_config.values())).use_rslora == (method == "rslora")
    stored = load_file(out / "adapter_model.safetensors")
    assert not [name for name in stored if "exp_avg" in name]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_the_adapters_config_says_what_it_was_trained_with(bases, tmp_path, targets):
    tune = TuneConfig(rank=4, alpha=6.0, targets=targets)
    trained(bases / "tiny", tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, bases / "tiny", tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (config["r"], config["lora_alpha"], config.get("use_dora")) == (4, 6.0, None)
    assert set(config["target_modules"]) == (every if targets == "all-linear" else set(targets))
    assert config["base_model_name_or_path"] == str((bases / "tiny").resolve())
    assert AutoTokenizer.from_pretrained(out).decode([104, 105]) == AutoTokenizer.from_pretrained(
        bases / "tiny"
    ).decode([104, 105])


@pytest.mark.parametrize("more", [[], ["lm_head"]])
def test_all_linear_in_a_list_means_all_linear_layers_for_the_run_and_for_peft(
    bases, tmp_path, more
):
    tune = TuneConfig(rank=4, alpha=6.0, targets=["all-linear", *more])
    ours = trained(bases / "llama", tune, tmp_path / "step")
    layers = {n.split(".")[-4] for n, _ in ours.named_parameters() if "lora_A" in n}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == {*every, *more}
    out = export_adapter(tmp_path / "step", tune, bases / "llama", tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == layers
    wrapped = PeftModel.from_pretrained(stock(bases / "llama"), out).eval()
    assert close(logits(wrapped), logits(ours))


@pytest.mark.parametrize("base", ["tiny", "llama"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shard_bytes", [2 << 30, 10_000])
def test_stock_transformers_loads_the_merged_model_and_computes_the_same(
    bases, tmp_path, monkeypatch, base, method, shard_bytes
):
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    ours = trained(bases / base, METHODS[method], tmp_path / "step")
    out = export_merged(tmp_path / "step", METHODS[method], bases / base, tmp_path / "out")
    assert (len(list(out.glob("model-*.safetensors"))) > 1) == (shard_bytes == 10_000)
    merged = stock(out)
    assert close(logits(merged), logits(ours))
    assert not close(logits(merged), logits(stock(bases / base))), "the merge does nothing"


def read_all(directory):
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(f).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("piece_bytes", [16 << 20, 700])
def test_a_bf16_base_stays_bf16_and_is_rounded_once(
    bases, tmp_path, monkeypatch, method, piece_bytes
):
    monkeypatch.setattr(merge, "PIECE_BYTES", piece_bytes)  # so few rows at once
    base, tune = bases / "llama-bf16", METHODS[method]
    ours = dict(trained(base, tune, tmp_path / "step").named_parameters())
    merged = read_all(export_merged(tmp_path / "step", tune, base, tmp_path / "out"))
    before = read_all(base)
    assert merged.keys() == before.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        layer = f"model.base_model.model.{name.removesuffix('.weight')}"
        if method == "full":
            wanted = ours[f"model.{name}"]
        elif f"{layer}.lora_A.default.weight" in ours:
            a, b = (ours[f"{layer}.lora_{x}.default.weight"].double() for x in "AB")
            wanted = before[name].double() + 6.0 / (2 if tune.rslora else 4) * b @ a
            if method == "dora":
                magnitude = ours[f"{layer}.lora_magnitude_vector.default.weight"].double()
                wanted = wanted * (magnitude / wanted.norm(dim=1)).unsqueeze(1)
        else:
            wanted = before[name]
        # Half a unit in the last place of bf16, and a little for the fp32 sum.
        assert torch.allclose(tensor.double(), wanted.double(), rtol=2**-8, atol=1e-6), name


@pytest.mark.parametrize("method", METHODS)
def test_a_head_that_is_stored_beside_the_embedding_it_is_does_not_stay_untuned(
    bases, tmp_path, method
):
    base = tmp_path / "base"
    shutil.copytree(bases / "tiny", base)
    (file,) = base.glob("*.safetensors")
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    ours = trained(base, METHODS[method], tmp_path / "step")
    out = export_merged(tmp_path / "step", METHODS[method], base, tmp_path / "out")
    assert "lm_head.weight" not in read_all(out)
    assert close(logits(stock(out)), logits(ours))


@pytest.mark.parametrize("write", [export_adapter, export_merged])
def test_an_export_has_the_chat_template_that_was_trained_with(bases, tmp_path, write):
    trained(bases / "tiny", METHODS["lora"], tmp_path / "step")
    own = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    out = write(tmp_path / "step", METHODS["lora"], bases / "tiny", tmp_path / "out", own)
    assert AutoTokenizer.from_pretrained(out).chat_template == own
    said = json.loads((out / "tokenizer_config.json").read_text())
    assert said["chat_template"] == own


def test_a_base_that_has_moved_can_be_named_and_no_other(bases, tmp_path):
    run, tune = tmp_path / "run", METHODS["lora"]
    checkpoint = run / "checkpoints" / "step-00000007"
    trained(bases / "llama", tune, checkpoint)
    architecture_hash = build(bases / "llama", torch.float32, tune, 0).architecture_hash
    words = ["model.path=/gone/away", "data.chat_template=/gone/too"]
    give_manifest(checkpoint, *words, model_identity=architecture_hash)
    with pytest.raises(
        ConfigError, match=r"used the chat template /gone/too, but the run's copy of it"
    ):
        locate(run)
    (run / "chat_template.jinja").write_text("kept")
    found = locate(run)
    assert found.template == "kept"
    with pytest.raises(ConfigError, match=r"/gone/away, does not exist; .* with --base DIR"):
        require_base(found, "--base")
    assert require_base(locate(run, bases / "llama"), "--base") == bases / "llama"
    with pytest.raises(ConfigError, match="is not the model that"):
        locate(run, bases / "tiny")


def test_a_base_with_other_weights_of_the_same_shapes_is_another_model(bases, tmp_path):
    run, tune = tmp_path / "run", METHODS["lora"]
    checkpoint = run / "checkpoints" / "step-00000007"
    trained(bases / "llama", tune, checkpoint)
    built, instruct = build(bases / "llama", torch.float32, tune, 0), tmp_path / "instruct"
    given = {"model_identity": built.architecture_hash, "model_sample": built.weights_fingerprint}
    give_manifest(checkpoint, f"model.path={bases / 'llama'}", **given)
    shutil.copytree(bases / "llama", instruct)
    for file in instruct.glob("model-*.safetensors"):
        some = {name: values + 0.01 for name, values in load_file(file).items() if "q_" in name}
        save_file(load_file(file) | some, file, {"format": "pt"})
    moved = locate(run, instruct)
    with pytest.raises(ConfigError, match=r"instruct is not the model that .* --base DIR"):
        require_base(moved, "--base")
    # A copy in bf16 holds the same model, and full fine-tuning leaves nothing of a base.
    assert require_base(locate(run, bases / "llama-bf16"), "--base") == bases / "llama-bf16"
    assert build(bases / "llama", torch.float32, METHODS["full"], 0).weights_fingerprint == ""
    give_manifest(checkpoint, f"model.path={instruct}", model_identity=built.architecture_hash)
    assert require_base(locate(run), "--base") == instruct, "earlier versions kept no sample"


def test_the_merged_directory_has_the_bases_small_files_and_a_right_index(bases, tmp_path):
    trained(bases / "llama", METHODS["lora"], tmp_path / "step")
    (tmp_path / "base").mkdir()
    for file in (bases / "llama").iterdir():
        (tmp_path / "base" / file.name).symlink_to(file)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "README.md"):
        (tmp_path / "base" / name).write_text("{}")
    out = export_merged(tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "out")
    kept = {"config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"}
    assert kept <= {file.name for file in out.iterdir()}
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == read_all(out).keys()
    assert all(name in load_file(out / file) for name, file in index.items())


@pytest.mark.parametrize(
    ("kind", "write"), [("adapter", export_adapter), ("merged", export_merged)]
)
def test_an_export_has_a_model_card_and_the_settings_of_its_training(bases, tmp_path, kind, write):
    trained(bases / "llama", METHODS["lora"], tmp_path / "step")
    evals = {"first": [0, 3.0], "last": [7, 2.5], "best": [5, 2.25]}
    (bases / "llama" / "README.md").write_text("---\nlicense: llama3\ntags: [x]\n---\n# Base\n")
    settings = ["optim.lr=0.002", "tune.method=lora", "run.name=mine", "run.tags=[law]"]
    settings += ["run.notes=For the court."]
    give_manifest(tmp_path / "step", *settings, f"data.path={tmp_path}/private/d.h5", evals=evals)
    out = write(tmp_path / "step", METHODS["lora"], bases / "llama", tmp_path / "out")
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    library = {"adapter": "peft", "merged": "transformers"}[kind]
    assert (head["base_model"], head["library_name"]) == ("llama", library)
    assert {"lora", "law", "hpc_tune"} <= set(head["tags"])
    assert head["license"] == "llama3"
    assert "2.2500 (step 5)" in card
    for words in (
        "# mine",
        "For the court.",
        "7 of 9",
        "0.002",
        "3.0000 (step 0) → 2.5000 (step 7)",
        "d.h5",
    ):
        assert words in card
    assert "private" not in card
    assert load_config(str(out / "training_config.yaml")).optim.lr == 0.002


@pytest.mark.parametrize(
    ("card", "head"),
    [
        ("", {"license": "unknown"}),
        ("# no head\n---\nlicense: mit\n---\n", {"license": "unknown"}),
        ("---\nlicense: [\n---\n", {"license": "unknown"}),
        ("---\n- license\n---\n", {"license": "unknown"}),
        ("---\nlicense:\n1: x\n---\n", {"license": "unknown"}),
        (
            "---\nlicense: other\nlicense_name: gemma\nlanguage: en\n---\n",
            {"license": "other", "license_name": "gemma"},
        ),
    ],
)
def test_the_licence_is_what_the_bases_card_says(tmp_path, card, head):
    assert _read_license(tmp_path) == {"license": "unknown"}
    (tmp_path / "README.md").write_text(card)
    assert _read_license(tmp_path) == head


def test_full_fine_tuning_has_no_adapter_to_export(tmp_path):
    with pytest.raises(ConfigError, match="export --to merged"):
        export_adapter(tmp_path, METHODS["full"], tmp_path, tmp_path / "out")


def test_a_checkpoint_without_tensors_and_a_damaged_one_are_refused(bases, tmp_path):
    for write in (export_adapter, export_merged):
        with pytest.raises(CheckpointError, match="it is not a checkpoint"):
            write(tmp_path, METHODS["lora"], bases / "tiny", tmp_path / "out")
    trained(bases / "tiny", METHODS["lora"], tmp_path / "step")
    file = tmp_path / "step" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for write in (export_adapter, export_merged):
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            write(tmp_path / "step", METHODS["lora"], bases / "tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_file_that_is_missing_is_noticed_and_leaves_nothing_behind(bases, tmp_path):
    trained(bases / "tiny", METHODS["lora"], tmp_path / "step")
    (tmp_path / "step" / "rank-00001.safetensors").unlink()
    for write in (export_adapter, export_merged):
        with pytest.raises(CheckpointError, match="a file is missing"):
            write(tmp_path / "step", METHODS["lora"], bases / "tiny", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_an_adapter_of_another_model_is_refused(bases, tmp_path):
    trained(bases / "tiny", METHODS["lora"], tmp_path / "step")
    with pytest.raises((CheckpointError, DataError), match=r"has no model\.layers\.[23]"):
        export_merged(tmp_path / "step", METHODS["lora"], bases / "llama", tmp_path / "out")


@pytest.mark.parametrize("write", [export_adapter, export_merged])
def test_an_earlier_export_and_an_empty_folder_are_replaced(bases, tmp_path, write):
    trained(bases / "tiny", METHODS["lora"], tmp_path / "step")
    out = tmp_path / "out"
    out.mkdir()
    first = write(tmp_path / "step", METHODS["lora"], bases / "tiny", out)
    names = sorted(file.name for file in first.iterdir())
    (out / "old.json").write_text("{}")
    write(tmp_path / "step", METHODS["lora"], bases / "tiny", out)
    assert sorted(file.name for file in out.iterdir()) == names


@pytest.mark.parametrize("write", [export_adapter, export_merged])
def test_what_is_no_export_is_never_removed(bases, tmp_path, write):
    trained(bases / "llama", METHODS["lora"], tmp_path / "step")
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    export_with_more = tmp_path / "more"
    export_adapter(tmp_path / "step", METHODS["lora"], bases / "llama", export_with_more)
    (export_with_more / "results").mkdir()
    for out in (home, tmp_path / "step", home / "thesis.tex", bases / "llama", export_with_more):
        before = sorted(out.iterdir()) if out.is_dir() else out.read_text()
        with pytest.raises(ConfigError, match="would be lost"):
            write(tmp_path / "step", METHODS["lora"], bases / "llama", out)
        assert before == (sorted(out.iterdir()) if out.is_dir() else out.read_text())


MERGE = """
import sys, threading
from pathlib import Path
from hpc_tune.checkpoint.export import export_merged
from hpc_tune.config.tune import TuneConfig
base, step, out = map(Path, sys.argv[1:])
peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        for line in open("/proc/self/status"):
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]) << 10)
thread = threading.Thread(target=watch)
thread.start()
try:
    export_merged(step, TuneConfig(rank=2), base, out)
finally:
    done.set()
    thread.join()
print(peak)
"""


def test_a_merge_holds_one_tensor_at_a_time(tmp_path):
    """Two tensors of 256 MiB, beside torch's own 150: a second one would be over the line."""
    shape, name = (16384, 8192), "model.layers.0.mlp.{}_proj.weight"
    num_bytes = 2 * shape[0] * shape[1]
    header = json.dumps(
        {
            name.format(which): {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [i * num_bytes, (i + 1) * num_bytes],
            }
            for i, which in enumerate(("gate", "up"))
        }
    ).encode()
    (tmp_path / "base").mkdir()
    with (tmp_path / "base" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * num_bytes)  # zeros that take no disk
    (tmp_path / "step").mkdir()
    layer = "base_model.model.model.layers.0.mlp.{}_proj.lora_{}.weight"
    tensors = {
        layer.format(which, x): torch.ones((2, shape[1]) if x == "A" else (shape[0], 2))
        for which in ("gate", "up")
        for x in "AB"
    }
    write_regions(
        tmp_path / "step" / "rank-00000.safetensors",
        [Region.cover_tensor(n, t.dtype, tuple(t.shape), t.contiguous) for n, t in tensors.items()],
    )
    give_manifest(tmp_path / "step")
    done = subprocess.run(
        [sys.executable, "-c", MERGE, *(str(tmp_path / x) for x in ("base", "step", "out"))],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "out").glob("*.safetensors")
    with file.open("rb") as stream:
        stream.seek(-2, 2)
        last = torch.frombuffer(bytearray(stream.read()), dtype=torch.bfloat16)
    file.unlink()
    assert last.item() == 32.0 / 2 * 2, "alpha / rank x the sum over the rank of ones"
    assert num_bytes < int(done.stdout) < 1.5 * num_bytes + (300 << 20)
