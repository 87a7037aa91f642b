"""Files of training tools that are recognised, and not converted: what they are, and what to do."""

import re
from typing import Any

_FLAG = re.compile(r"(?:^|\s)--([a-z][\w.-]*)(?:[ =]([^\s-][^\s]*))?")
_AS_LLAMA_FACTORY = (
    "write them as model_name_or_path, stage: sft, finetuning_type, lora_rank, dataset and so on, "
    "the keys of LLaMA-Factory, and convert that, or begin with python -m hpc_tune init"
)


def explain_unsupported(theirs: dict[str, Any]) -> str | None:
    """Return of which tool, or form, a config is that no rules are for, and what to do."""
    is_name = isinstance(theirs.get("model"), str)
    if is_name and {"train_dataset", "model_class", "peft_config"} & set(theirs):
        return (
            "that is the newer form of LLaMA-Factory (v1, as in its examples/v1), which convert "
            f"does not read yet: {_AS_LLAMA_FACTORY}"
        )
    if is_name and {"tuner_type", "train_type", "rlhf_type", "sft_type"} & set(theirs):
        return f"that is a config of ms-swift, which convert does not read: {_AS_LLAMA_FACTORY}"
    of_trl = {"dataset_name", "dataset_mixture", "use_peft", "lora_target_modules"}
    if "model_name_or_path" in theirs and of_trl & set(theirs):
        return f"that is a config of trl, which convert does not read: {_AS_LLAMA_FACTORY}"
    return None


def explain_flags(text: str) -> str | None:
    """Return what to do about a script, or command line, of flags; None if it has none."""
    flags = _FLAG.findall(text)
    if not flags:
        return None
    name, value = next(((name, value) for name, value in flags if value), flags[0])
    value = value.strip("\"'") or "true"
    return (
        f"a command line of flags (--{name} and others), not YAML; write each flag as a line of "
        f"a YAML file, this one as {name}: {value}, and convert that file"
    )
