"""A program: steps of each layout, method and recompute on the fake CUDA device.

    python -m tests.support.fake_cuda_steps FOLDER [LAYOUT ... | more]

Prints a JSON object for each case of a sample, or of the other cases (``more``): where the host
waited in a step, in an evaluation and in the copies of a save, what was used before it was ready,
and where optimizer state was before, during and after its move. One rank of each world runs, on
torch's fake process group.
"""

import contextlib
import json
import sys
from pathlib import Path

from tests.support.fake_cuda import load_native

if __name__ == "__main__":
    load_native()

import torch
from torch.distributed.tensor import DTensor

from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import HeldOutRows, Loader
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.packed_rows import PackedRows
from hpc_tune.data.prepare import PrepareSettings, prepare_data
from hpc_tune.data.reading import ReadOptions
from hpc_tune.engine import native
from hpc_tune.engine.base import EngineSettings, evaluate, train_step
from hpc_tune.engine.mesh import send_large_messages
from hpc_tune.engine.native import NativeEngine
from hpc_tune.memory.policy import Action
from hpc_tune.model import varlen_attention
from hpc_tune.model.build import DTYPES, build
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.plan.trace import _fake_world, make_fake_mesh
from hpc_tune.step.layout import Layout, num_process_groups
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.reference import sum_kl_terms
from tests.support.data import write_jsonl
from tests.support.fake_cuda import NOTES, _place, fake_cuda
from tests.support.fake_world import make_inputs

DEVICE = torch.device("cuda", 0)
SEQ_LEN, MICROS = 64, 2
LAYOUTS = {
    "single": {},
    "replicate 2": {"replicate": 2},
    "shard 2": {"shard": 2, "reshard": "block"},
    "shard 2, kept a step": {"shard": 2, "reshard": "step"},
    "hsdp 2x2": {"replicate": 2, "shard": 2, "reshard": "block"},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "pipeline 2, interleaved": {"pipeline": 2, "stages_per_rank": 2},
    "shard 2, 8 bits": {"shard": 2, "reshard": "block"},
    "offload_params=cpu": {"shard": 2, "reshard": "block", "offload_params": "cpu"},
    "context 2": {"replicate": 2, "context": 2},
    "long rows": {"offload_activations": True, "row_pieces": 4},
    "long rows, shard 2": {
        **{"shard": 2, "reshard": "block"},
        **{"offload_activations": True, "row_pieces": 4},
    },
    "dpo": {},
    "dpo, context 2": {"shard": 2, "context": 2, "reshard": "block"},
    "kto": {},
    "kto, shard 2": {"shard": 2, "reshard": "block"},
    "mixture": {},
    "mixture, shard 2": {"shard": 2, "reshard": "block"},
    "mixture, expert 2": {"shard": 2, "expert": 2},
}
AXES = ("replicate", "shard", "tensor", "pipeline", "expert", "context")
# Its experts have adapters too.
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


PREFERENCES = {"dpo": "pairs", "kto": "labels"}
# Layouts that split, gather or move more with method full; make test-all tries lora for them.
IN_FULL = (
    *("single", "shard 2", "shard 2, kept a step", "hsdp 2x2", "offload_params=cpu"),
    "mixture, shard 2",
)


def cases():
    """Yield (layout, method, recompute, dtype); few layouts have other values of recompute."""
    for layout in LAYOUTS:
        method, recompute = "full" if _is_in_full(layout) else "lora", _recompute(layout)
        yield layout, method, recompute, "bf16"
    yield "single", "lora", "selective", "bf16"
    yield "shard 2", "full", "full", "bf16"
    yield "single", "lora", "full", "fp32"  # attention takes a mask


def more_cases():
    """Each layout with the other method."""
    for layout in LAYOUTS:
        method, recompute = "lora" if _is_in_full(layout) else "full", _recompute(layout)
        yield layout, method, recompute, "bf16"


def _recompute(layout: str) -> str:
    return "full" if "long rows" in layout else "none"


def _is_in_full(layout: str) -> bool:
    return layout in IN_FULL or "8 bits" in layout


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[2:] or LAYOUTS
    more = chosen == ["more"]
    model, data = make_inputs(folder)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 2}
    for directory, more_said in (
        (small := folder / "two blocks", {}),
        (mixture := folder / "mixture", MIXTURE),
    ):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config | more_said))
    stores = {"sft": TokenStore.open(data)}
    for objective, form in PREFERENCES.items():
        stores[objective] = prepared(folder, model, objective, form)
    varlen_attention.varlen_kernel_fault = lambda *_: ""  # the real check computes
    for layout, method, recompute, dtype in more_cases() if more else cases():
        if layout not in chosen and not more:
            continue
        axes = LAYOUTS[layout]
        parallel = ParallelConfig(**{"recompute": recompute, "reshard": "block", **axes})
        world = Layout(*(axes.get(axis, 1) for axis in AXES))
        rank = world.size - 1  # the last stage, which has the loss
        shape = model if parallel.stages_per_rank > 1 else small
        tune = TuneConfig(method=method)
        if (objective := layout.split(",")[0]) in PREFERENCES:
            tune = TuneConfig(method=method, objective=objective)
        if "mixture" in layout:
            shape, tune = mixture, TuneConfig(method=method, targets=["q_proj", "experts"])
        built = build(shape, DTYPES[dtype], tune, 0, reads_weights=False)
        native.send_large_messages, first = noting_groups()
        with _fake_world(rank, world.size), fake_cuda() as watch:
            plan = StepPlan.for_model(built, world, parallel)
            optim = OptimConfig(lr=1e-3, name="adamw_8bit" if "8 bits" in layout else "adamw")
            settings = EngineSettings(plan, DEVICE, optim)
            store = stores[tune.objective]
            engine = NativeEngine(built, settings, make_fake_mesh(settings))
            groups = num_process_groups(world, plan.uses_fsdp)
            noted = {"first": first, "groups": groups, **run(engine, store, world, rank, watch)}
        print(json.dumps({"case": [layout, method, recompute, dtype], **noted}), flush=True)


def noting_groups():
    """Return a function that sends small messages, not large ones, and a list of group sizes."""
    first = []

    def send(mesh, *more):
        first.append([group.size() for group in mesh.all_groups()])
        send_large_messages(mesh, *more, 1 << 10)

    return send, first


def prepared(folder, model, objective, form):
    """Return a store of pairs or of labeled answers."""
    answers = {"pairs": {"chosen": "yes", "rejected": "no"}, "labels": {"completion": "yes"}}
    rows = ({"prompt": f"{n}?", "label": n % 2 == 0, **answers[form]} for n in range(200))
    raw = write_jsonl(folder / f"{objective}.jsonl", rows)
    out = folder / f"{objective}.h5"
    settings = PrepareSettings(SEQ_LEN, reading=ReadOptions(form=form))
    prepare_data(str(raw), out, load_tokenizer(model), settings)
    return TokenStore.open(out)


def run(engine, store, world, rank, watch):
    """Do what a run does between its start and its end; return what was noted."""
    order = SampleOrder(SEQ_LEN, True, 0)
    place = {"rank": world.coordinates(rank).data, "size": world.data_parallel_size}
    rows = MICROS * world.data_parallel_size
    loader = Loader(PackedRows(store, order), order, global_size=rows, prefetch_bytes=0, **place)
    loader.pin_batches(DEVICE)
    noted = {}

    def note(what):
        noted[what] = {name: sorted(set(getattr(watch, name))) for name in NOTES}
        noted[what]["num_waits"] = len(watch.waits)
        watch.begin()

    def step(what):
        batches = loader.next_step()
        assert all(watch.is_pinned(tensor) for batch in batches for tensor in batch.all_tensors)
        watch.begin()
        if store.form == "labels":
            sum_kl_terms(engine, [batch.mismatched_batch for batch in batches])
        with timed(engine, watch) as (noted["timed"], noted["untimed"]):
            train_step(engine, batches, 100, 1e-3)
        note(what)

    step("step")
    evaluate(
        engine, HeldOutRows(store, order, rows, **place).batches(), engine._plan, engine._device
    )
    note("evaluation")
    noted["save"] = copied(engine)
    if Action.MOVE_OPTIMIZER in engine.memory_actions:
        lever = engine.memory_actions[Action.MOVE_OPTIMIZER].apply_times
        noted["moments"] = [state_of(engine, watch)]
        lever(1)
        noted["moments"].append(state_of(engine, watch))
        noted["save while moved"] = copied(engine)
        step("step while moved")
        lever(0)
        noted["moments"].append(state_of(engine, watch))
    else:
        step("another step")
    return noted


@contextlib.contextmanager
def timed(engine, watch):
    """Yield two lists to fill: the kinds of streams that a step times, and its untimed waits.

    The latter are places where the computing stream waits for messages and nothing times it: waits
    for events of streams that gather or reduce, or that come after them.
    """
    found, collectives = set(), engine._collectives
    take, pairs, waits, sent = collectives.pop_totals, [], [], {}

    def noting():
        kind = {True: "compute", False: "beside"}
        for pair in collectives._events:
            found.add(" to ".join(kind[event.stream is watch.default] for event in pair))
        kinds[:] = sorted(found)
        pairs.extend(collectives._events)
        return take()

    def told(what, stream, event):
        if what == "wait event" and stream is watch.default and event.stream is not stream:
            waits.append((watch.now, event.stream, event.at, _place()))

    def is_timed(now, stream, at):
        if not (ended := [end for end in sent[stream] if end <= at]):
            return True  # nothing was sent there before
        last = max(ended)
        for start, end in pairs:
            if start.stream is not watch.default or start.at > now:
                continue
            if (
                end.at >= now
                if end.stream is watch.default
                else (end.stream, end.at) == (stream, last)
            ):
                return True
        return False

    done = collectives.record_end_event

    def noting_done():
        if (event := done()) is not None and event.stream is not watch.default:
            sent.setdefault(event.stream, []).append(event.at)
        return event

    kinds, untimed = [], []
    collectives.pop_totals, collectives.record_end_event, watch.told = noting, noting_done, told
    yield kinds, untimed
    collectives.pop_totals, collectives.record_end_event, watch.told = take, done, lambda *_: None
    for now, stream, at, place in waits:
        if stream in sent and not is_timed(now, stream, at):
            untimed.append(place)


def state_of(engine, watch):
    """Return the types of the moments and their devices."""
    found = set()
    for state in engine._adamw.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            local = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            kind = type(state[name]).__name__.removeprefix("Fake")
            pinned = " pinned" if watch.is_pinned(local) else ""
            found.add(f"{kind} on {local.device.type}{pinned}")
    return sorted(found)


def copied(engine):
    """Copy a rank's regions to the host, as a writer does; return where the values were."""
    places = {}
    for region in engine.regions():
        values = region.values()
        assert tuple(values.shape) == region.box.shape
        assert values.dtype == region.dtype
        values.to("cpu", copy=True)
        kind = region.name.split(".")[0] if region.name.startswith("exp_") else "weights"
        places.setdefault(kind, set()).add(values.device.type)
    return {kind: sorted(found) for kind, found in places.items()}


if __name__ == "__main__":
    main()
