"""A program: which process groups an engine makes, rank by rank, in every layout of a few ranks.

    python -m tests.support.groups_made FOLDER SIZE [SIZE ...]

Each rank of a fake world makes the engine by itself, over torch's fake process group. Prints a JSON
object per layout and kind of training: for each rank the groups that are made, in order, as their
ranks and whether this rank makes the group or stands aside while others do; and the sizes of all
groups that torch knows in the end.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine import mesh, pipeline_parallel
from hpc_tune.engine.base import EngineSettings
from hpc_tune.engine.native import NativeEngine
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.plan.trace import _fake_world
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan

DEVICE = torch.device("cpu")
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


def layouts(size: int) -> list[Layout]:
    """Return all layouts of ``size`` ranks; experts are spread where no other axis splits them."""
    numbers = range(1, size + 1)
    found = []
    for replicate, shard, tensor, pipeline in itertools.product(numbers, repeat=4):
        whole = Layout(replicate, shard, tensor, pipeline)
        if whole.size == size:
            spread = [n for n in numbers if shard % n == 0 and tensor == pipeline == 1]
            found += [Layout(replicate, shard, tensor, pipeline, n) for n in spread or [1]]
    return found


def kinds(layout: Layout) -> list[tuple[str, dict[str, Any]]]:
    """Return the methods and settings that differ in the groups that they make."""
    each = [("full", {}), ("lora", {"offload_params": "cpu"}), ("full", {"offload_params": "cpu"})]
    if layout.pipeline > 1:
        each.append(("full", {"stages_per_rank": 2}))
    return each


def main() -> None:
    folder, sizes = Path(sys.argv[1]), map(int, sys.argv[2:])
    dense, mixture = folder / "dense", folder / "mixture"
    for directory, more in ((dense, {"num_hidden_layers": 8}), (mixture, MIXTURE)):
        write_tiny_model(directory)
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    for layout in itertools.chain.from_iterable(map(layouts, sizes)):
        model = mixture if layout.expert > 1 else dense
        for method, said in kinds(layout):
            ranks = [made_by(rank, layout, model, method, said) for rank in range(layout.size)]
            print(json.dumps({"case": [str(layout), method, said], "ranks": ranks}), flush=True)


def made_by(rank: int, layout: Layout, model: Path, method: str, said: dict[str, Any]) -> Any:
    """Return what one rank does in order, and the sizes of the groups that exist afterwards."""
    targets = {"targets": ["q_proj", "experts"]} if layout.expert > 1 else {}
    built = build(
        model, torch.float32, TuneConfig(method=method, **targets), 0, reads_weights=False
    )
    plan = StepPlan.for_model(built, layout, ParallelConfig(reshard="block", **said))
    done: list[tuple[list[int], bool]] = []
    new_group, aside = dist.new_group, mesh.mirror_group_creation

    def noting(ranks: Any, **options: Any) -> Any:
        done.append((sorted(ranks), True))
        return new_group(ranks, **options)

    def standing(ranks: Any) -> None:
        done.append((sorted(ranks), False))
        aside(ranks)

    dist.new_group = noting
    mesh.mirror_group_creation = pipeline_parallel.mirror_group_creation = standing
    try:
        with _fake_world(rank, layout.size):
            NativeEngine(built, EngineSettings(plan, DEVICE, OptimConfig(lr=1e-3)))
            known = dist.distributed_c10d._world.pg_group_ranks
            return {"done": done, "sizes": [len(ranks) for ranks in known.values()]}
    finally:
        dist.new_group = new_group
        mesh.mirror_group_creation = pipeline_parallel.mirror_group_creation = aside


if __name__ == "__main__":
    main()
