"""A program: pinned host memory of runs that offload, and of saves, on the fake CUDA device.

    python -m tests.support.fake_cuda_pinned FOLDER

Prints one JSON object with bytes: of the tensors, of one power-of-two block for each of them, and
of the blocks that are made. The shapes are those of Qwen2.5-7B, whose matrices are just above
powers of two: six decoder blocks over eight ranks.
"""

import json
import sys
from pathlib import Path

from tests.support.fake_cuda import load_native

if __name__ == "__main__":
    load_native()

import torch
from torch.distributed.tensor import DTensor

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.writer import CudaStagingDevice, PinnedBlockPool
from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine import native
from hpc_tune.engine.base import EngineSettings, train_step
from hpc_tune.engine.native import NativeEngine
from hpc_tune.memory.policy import Action
from hpc_tune.model import varlen_attention
from hpc_tune.plan.memory_model import _extra_pinned_bytes
from hpc_tune.plan.resolve import ModelShape
from hpc_tune.plan.trace import _count_shards_by_bytes, _fake_world, make_fake_mesh
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from tests.support.fake_cuda import fake_cuda

DEVICE, RANKS = torch.device("cuda", 0), 8
QWEN_7B = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 6},
    **{"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 4096},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False},
}


def main() -> None:
    directory = Path(sys.argv[1]) / "qwen"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    shape = ModelShape(directory, torch.bfloat16, TuneConfig(method="full"), 0)
    varlen_attention.varlen_kernel_fault = lambda *_: ""  # the real check computes
    native.send_large_messages = lambda *_: None
    print(
        json.dumps(
            {"params": offloaded(shape.build()), "moments": moved(shape.build()), "saves": saved()}
        )
    )


def engine_of(built, **words):
    parallel = ParallelConfig(shard=RANKS, recompute="none", reshard="block", **words)
    plan = StepPlan.for_model(built, Layout(1, RANKS), parallel)
    settings = EngineSettings(plan, DEVICE, OptimConfig(lr=1e-3))
    return NativeEngine(built, settings, make_fake_mesh(settings))


def step(engine):
    zeros = [torch.zeros(1, 64, dtype=torch.int64) for _ in range(3)]
    batches = [Batch(*zeros, 64, 64, 0, document_lengths=[[64]]).pinned() for _ in range(2)]
    train_step(engine, batches, 128, 1e-3)


def offloaded(built):
    """Return bytes of pinned blocks with parallel.offload_params=cpu, and what a plan expects."""
    with _fake_world(0, RANKS), fake_cuda() as watch:
        engine = engine_of(built, offload_params="cpu")
        told = {"loaded": watch.pinned.num_bytes}
        weights = [t.parameter for t in engine._trained_weights if isinstance(t.parameter, DTensor)]
        sizes = [weight.to_local().nbytes for weight in weights]
        told |= {"tensors": sum(sizes), "each": sum(1 << (n - 1).bit_length() for n in sizes)}
        for _ in range(2):
            step(engine)
        told |= {"stepped": watch.pinned.num_bytes}
        told["are_pinned"] = all(watch.is_pinned(weight.to_local()) for weight in weights)
        told["planned"] = 2 * sum(sizes) + _extra_pinned_bytes(_count_shards_by_bytes(engine), True)
    return told


def moved(built):
    """Return bytes of pinned blocks while MOVE_OPTIMIZER is in effect, and after it is undone."""
    with _fake_world(0, RANKS), fake_cuda() as watch:
        engine = engine_of(built)
        lever, before = (
            engine.memory_actions[Action.MOVE_OPTIMIZER].apply_times,
            watch.pinned.num_bytes,
        )
        lever(1)
        moments = [
            state[name]
            for state in engine._adamw.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        ]
        told = {
            "tensors": sum(moment.nbytes for moment in moments),
            "each": sum(1 << (moment.nbytes - 1).bit_length() for moment in moments),
            "moved": watch.pinned.num_bytes - before,
            "are_pinned": all(watch.is_pinned(moment) for moment in moments),
        }
        del moments
        lever(0)
        told["undone"] = watch.pinned.num_bytes - before
    return told


def saved():
    """Return the blocks that each of five saves makes, and bytes held after it and a release."""
    told = {"made": [], "held": []}
    with fake_cuda() as watch:
        kept = PinnedBlockPool()
        for number in range(5):
            if number == 3:
                kept.release()
                told["released"] = watch.pinned.num_bytes
            if number == 4:
                kept.keep_between_saves(False)
            made = watch.pinned.num_made
            copy_all(kept, 3)
            told["made"].append(watch.pinned.num_made - made)
            told["held"].append(watch.pinned.num_bytes)
    return told


def copy_all(kept, num_blocks):
    """Copy blocks as the thread of a save does."""
    device = CudaStagingDevice(kept)
    for _ in range(num_blocks):
        block = device.block()
        device.copy(torch.empty(block.numel(), dtype=torch.uint8, device="cuda"), destination=block)
        del block
    device.wait()
    device.close()


if __name__ == "__main__":
    main()
