"""A program for ranks of Open MPI: a training loop of stock parts, for comparison.

    python -m tests.support.stock_loop MODE MODEL_DIR ROWS MICRO LENGTH STEPS DTYPE

MODE is alone, ddp, fsdp2 or zero3. transformers + peft + AdamW, LoRA on all linear layers, random
tokens: ROWS rows per rank and step in micro-batches of MICRO. Rank 0 prints the median tokens per
second of all ranks after the first step.
"""

import os
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK = 16
LR = 1e-4


def main() -> None:
    mode, directory, *numbers, dtype_name = sys.argv[1:]
    num_rows, micro, length, num_steps = map(int, numbers)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    torch.set_num_threads(1)
    size = 1 if mode == "alone" else int(os.environ["OMPI_COMM_WORLD_SIZE"])
    if size > 1:
        os.environ.update(
            RANK=os.environ["OMPI_COMM_WORLD_RANK"],
            LOCAL_RANK=os.environ["OMPI_COMM_WORLD_LOCAL_RANK"],
            WORLD_SIZE=str(size),
        )
        dist.init_process_group("gloo")
    model = build(Path(directory), dtype)
    step = {"alone": plain, "ddp": ddp, "fsdp2": fsdp2, "zero3": zero3}[mode](model)
    vocab = model.config.vocab_size
    seconds = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        step([torch.randint(vocab, (micro, length)) for _ in range(num_rows // micro)])
        seconds.append(time.perf_counter() - start_s)
    if size == 1 or dist.get_rank() == 0:
        print(size * num_rows * length / statistics.median(seconds[1:]), flush=True)


def build(directory: Path, dtype: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


def plain(model: Any, sync: Any = None) -> Any:
    """Return a training step. ``sync(is_last)`` returns the context of a micro-batch."""
    optimizer = adamw(model)

    def step(batches: list[torch.Tensor]) -> None:
        for i, ids in enumerate(batches):
            with sync(i == len(batches) - 1) if sync else nullcontext():
                (model(input_ids=ids, labels=ids).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(model: Any) -> Any:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    return plain(wrapped, lambda is_last: nullcontext() if is_last else wrapped.no_sync())


def fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.dtype)  # FSDP2 needs one dtype per group
    for block in model.get_base_model().model.layers:
        fully_shard(block)
    fully_shard(model)
    return plain(model)


def zero3(model: Any) -> Any:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": model.dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)

    def step(batches: list[torch.Tensor]) -> None:
        for i, ids in enumerate(batches):
            engine.set_gradient_accumulation_boundary(i == len(batches) - 1)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    return step


if __name__ == "__main__":
    main()
