"""The peer of hpc_tune in benchmarks: the Hugging Face Trainer with peft.

    python bench_peer.py SETTINGS.json OUT_DIR          (N ranks: under torchrun)

Started by tools/bench.py in an environment of its own. SETTINGS: model, tokens (a JSON file of
[token ids, labels] per document), mode (ddp, zero2, zero3, fsdp2), dtype, rows, steps, save_at,
cpu; random: only the model's config.json exists. Each rank writes OUT_DIR/RANK.jsonl, a line per
optimizer step: when it was done, the document tokens trained on so far, the seconds spent on saves
so far, and the peak of the GPU's allocator.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Row = dict[str, list[int]]


class CountingTrainer(Trainer):
    """Counts the tokens that are not padding, and the seconds of saves."""

    num_tokens = 0
    save_s = 0.0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on one micro-batch."""
        self.num_tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        super()._save_checkpoint(*args, **kwargs)
        self.save_s += time.perf_counter() - began_s


class StepLineWriter(TrainerCallback):
    """Writes a line per optimizer step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.trainer: CountingTrainer | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Write what has been done so far."""
        assert self.trainer is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row = {
            "time": time.time(),
            "tokens": self.trainer.num_tokens,
            "save_s": self.trainer.save_s,
            "device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        print(json.dumps(row), file=self._file, flush=True)


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them, as is usual."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([r[name] + [filler] * (longest - len(r[name])) for r in rows])

    ones = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", -100),
        "attention_mask": torch.tensor(ones),
    }


def sharding(mode: str, dtype: str) -> dict[str, Any]:
    """Return the Trainer's settings for a mode."""
    if mode.startswith("zero"):
        is_bf16 = dtype == "bf16"
        stage, precision = {"stage": int(mode[-1])}, {"bf16": {"enabled": is_bf16}}
        sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
        # The Trainer refuses a precision that its own arguments do not name.
        return {"bf16": is_bf16, "deepspeed": {"zero_optimization": stage, **precision, **sizes}}
    if mode == "fsdp2":
        wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, **wrap}}
    return {}


def load(settings: dict[str, Any]) -> Any:
    """Return the model, or one of its shape with random weights."""
    dtype = DTYPES[settings["dtype"]]
    if not settings.get("random"):
        return AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    config = AutoConfig.from_pretrained(settings["model"])
    with torch.device("cpu" if settings["cpu"] else "cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def main() -> None:
    """Train a few steps and write when each was done."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out, mode, dtype = Path(sys.argv[2]), settings["mode"], settings["dtype"]
    if settings["cpu"] and mode.startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # On a CPU the Trainer does this too late for ZeRO-3, which needs it while loading.
        deepspeed.init_distributed(dist_backend="gloo")
    documents = json.loads(Path(settings["tokens"]).read_text(encoding="utf-8"))
    rows = [{"input_ids": tokens, "labels": labels} for tokens, labels in documents]
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        per_device_train_batch_size=settings["rows"],
        max_steps=settings["steps"],
        learning_rate=1e-4,
        save_strategy="steps" if settings["save_at"] else "no",
        save_steps=settings["save_at"] or 1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=settings["cpu"],
        remove_unused_columns=False,
        **sharding(mode, dtype),
    )
    model = load(settings)
    model.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    lines = StepLineWriter(out / f"{os.environ.get('RANK', '0')}.jsonl")
    trainer = CountingTrainer(
        model=get_peft_model(model, lora),
        args=arguments,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[lines],
    )
    lines.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
