"""What a training step costs on a GPU, counted without one: a table by kind of work.

    python tools/gpu_cost.py llama3-8b [tune.method=qlora ...] [--card h100] [--json]

The engine runs one step on fake CUDA tensors. A kernel takes the time of its flops at the card's
rate or of its bytes at the memory's rate, whichever is longer. Streams, their waits for each other
and the host's launch times are simulated in order: this gives the messages that nothing hides and
the time that the GPU waits for the host. It is arithmetic, not a measurement.

With train.compile=true element-wise work of a decoder block and of the loss counts as fused: see
gpu_fusion.py.
"""

import argparse
import dataclasses
import json
import logging
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.fake_cuda import fake_cuda, load_native  # noqa: E402

if __name__ == "__main__":
    load_native()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401 - it lists torch's functions, which the fake replaces
import torch.nn.functional as F  # noqa: E402
from gpu_cards import CARDS, FLASH_3, MIN_KERNEL_US, THIN_SHARE, Card, matmul_rate  # noqa: E402
from gpu_fusion import join_kernels  # noqa: E402
from gpu_kernels import FusedRMSNorm, Kernel, Recorder, Steps  # noqa: E402

from hpc_tune.batch import costliest_batch  # noqa: E402
from hpc_tune.config.load import load_config  # noqa: E402
from hpc_tune.engine import counted_collectives, expert_parallel, native  # noqa: E402
from hpc_tune.engine.base import EngineSettings, train_step  # noqa: E402
from hpc_tune.engine.native import NativeEngine  # noqa: E402
from hpc_tune.errors import HpcTuneError  # noqa: E402
from hpc_tune.model import float8, varlen_attention  # noqa: E402
from hpc_tune.model.build import DTYPES, build  # noqa: E402
from hpc_tune.model.config_json import resolve_model_directory  # noqa: E402
from hpc_tune.model.loss import LogitsKernels, write_fusible_exponentials  # noqa: E402
from hpc_tune.plan.trace import _fake_world, make_fake_mesh  # noqa: E402
from hpc_tune.step.layout import Layout  # noqa: E402
from hpc_tune.step.plan import StepPlan  # noqa: E402

KINDS = (
    *("base products", "adapters", "attention", "norms", "rotary", "gated product", "sums"),
    *("experts' rows", "loss", "casts", "dequantization", "embedding", "update"),
    *("copies of gathered weights", "other"),
)
USUAL_SETTINGS = (
    "model.dtype=bf16",
    "tune.method=lora",
    "data.seq_len=4096",
    "parallel.recompute=none",
)
AXES = ("replicate", "shard", "tensor", "pipeline", "expert", "context")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Microseconds per token of a rank, and other counts per token."""

    us: dict[str, float]
    exposed_us: float
    hidden_us: float
    host_us: float
    launches: float
    kept_bytes: float
    host_waits: tuple[str, ...]

    @property
    def total_us(self) -> float:
        """All of a step."""
        return sum(self.us.values()) + self.exposed_us + self.host_us


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", help="llama3-8b, or any other of shape:NAME, or a model directory")
    parser.add_argument("settings", nargs="*", help="such as tune.method=qlora parallel.shard=8")
    parser.add_argument("--card", choices=sorted(CARDS), default="h100")
    parser.add_argument("--flash", choices="23", default="2", help="FlashAttention 3: h100, h200")
    parser.add_argument("--micro", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--kernels", type=int, default=0, help="print the N costliest kernels")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    card = CARDS[given.card]
    if given.flash == "3":
        if given.card not in ("h100", "h200"):
            parser.error(f"FlashAttention 3 is for h100 and h200, not for {given.card}")
        rates = [rate * times for rate, times in zip(card.attention, FLASH_3, strict=True)]
        card = dataclasses.replace(card, attention=(rates[0], rates[1]))
    try:
        steps, tokens = record_steps(given.shape, given.settings, given.micro, card)
    except HpcTuneError as error:
        sys.exit(f"{error}")
    compiled = "train.compile=true" in given.settings
    found = cost(steps, card, tokens, compiled)
    if given.json:
        print(json.dumps({**dataclasses.asdict(found), "total_us": found.total_us}))
        return
    print(table(found, card))
    if given.kernels:
        print(list_costliest(steps, card, tokens, given.kernels))


def record_steps(shape: str, settings: list[str], num_micro: int, card: Card) -> tuple[Steps, int]:
    """Return what a rank runs in a step, and its number of tokens in the step."""
    path = shape if Path(shape).is_dir() else f"shape:{shape.removeprefix('shape:')}"
    config = load_config(None, [f"model.path={path}", *USUAL_SETTINGS, *settings])
    parallel = config.parallel
    reshard = "block" if parallel.reshard == "auto" else parallel.reshard
    parallel = parallel.model_copy(update={"reshard": reshard})
    axes = [getattr(parallel, axis) for axis in AXES]
    layout = Layout(*(axis if isinstance(axis, int) else 1 for axis in axes))
    rows = config.batch.micro_size if isinstance(config.batch.micro_size, int) else 1
    built = build(
        resolve_model_directory(path),
        DTYPES[config.model.dtype],
        config.tune,
        0,
        reads_weights=False,
    )
    trials: Any = varlen_attention
    trials.varlen_kernel_fault = lambda *_, **__: ""  # the real check computes
    trials = float8
    trials.explain_missing_float8_matmuls = lambda *_: "" if card.multiplies_e4m3 else "none"
    functional: Any = F
    functional.rms_norm = lambda x, shape, weight, eps: FusedRMSNorm.apply(x, weight)
    device = torch.device("cuda", 0)
    batch = costliest_batch(rows, config.data.seq_len)
    with _fake_world(layout.size - 1, layout.size), fake_cuda() as watch:
        plan = StepPlan.for_model(built, layout, parallel)
        engine = _engine(built, EngineSettings(plan, device, config.optim, config.train))
        batches = [batch.pinned() for _ in range(num_micro)]
        recorder = Recorder(watch, [config.data.seq_len] * rows)
        watch.told = recorder.note
        _note_waits(recorder)
        with recorder:
            for _ in range(2):  # the first step allocates the optimizer's moments
                recorder.begin()
                watch.begin()
                train_step(engine, batches, num_micro * batch.num_tokens, 1e-4)
            steps = recorder.finish()
            steps.micro_tokens = batch.num_tokens
    ways = layout.tensor * layout.pipeline * layout.context
    return steps, num_micro * batch.num_tokens // ways


def _engine(built: Any, settings: EngineSettings) -> NativeEngine:
    """Make an engine that computes what a compiled one does, but is not compiled."""

    def as_if_compiled(module: Any) -> None:
        module.logits_kernels = LogitsKernels(write_fusible_exponentials)

    before = native.compile_blocks, native.compile_loss
    native.compile_blocks, native.compile_loss = lambda blocks: None, as_if_compiled
    try:
        return NativeEngine(built, settings, make_fake_mesh(settings))
    finally:
        native.compile_blocks, native.compile_loss = before


def _note_waits(recorder: Recorder) -> None:
    collectives: Any = counted_collectives.CountedCollectives
    exchange: Any = expert_parallel._TokenExchange
    finish, read = collectives.finish, exchange._exchange_row_counts

    def finished(self: Any, works: Any) -> None:
        finish(self, works)
        recorder.note("wait messages", torch.cuda.current_stream(), 0)

    def counted(self: Any, sent: Any, num_rows: int) -> Any:
        recorder.note("host", "numbers of experts' rows are read", 0)
        return read(self, sent, num_rows)

    collectives.finish, exchange._exchange_row_counts = finished, counted


def cost(steps: Steps, card: Card, tokens: int, compiled: bool = False) -> Cost:
    """Return what a step costs on a card."""
    kernels = [event for event in steps.events if isinstance(event, Kernel)]
    seconds = {id(kernel): _seconds(kernel, card) for kernel in kernels}
    launched = {id(kernel) for kernel in kernels}
    if compiled:
        _join(kernels, steps.alive, card, seconds, launched)
    by_kind: dict[str, float] = defaultdict(float)
    computing = _computing_stream(kernels)
    for kernel in kernels:
        if not kernel.message and kernel.stream == computing:
            by_kind[kernel.kind] += seconds[id(kernel)]
    whole_s = _play_events(steps.events, card, seconds, launched, messages=True)
    without_s = _play_events(steps.events, card, seconds, launched, messages=False)
    busy_s = sum(by_kind.values())
    sent_s = sum(seconds[id(k)] for k in kernels if k.message)
    scale = 1e6 / tokens
    return Cost(
        {kind: by_kind[kind] * scale for kind in sorted(by_kind, key=_order)},
        (whole_s - without_s) * scale,
        (sent_s - (whole_s - without_s)) * scale,
        (without_s - busy_s) * scale,
        len(launched) / tokens,
        steps.kept_bytes / steps.micro_tokens,
        tuple(e[1] for e in steps.events if not isinstance(e, Kernel) and e[0] == "host"),
    )


def _computing_stream(kernels: list[Kernel]) -> int:
    """Return the stream of matmuls; copies for messages run on other streams beside it."""
    return next(kernel.stream for kernel in kernels if kernel.kind == "base products")


def _order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _seconds(kernel: Kernel, card: Card) -> float:
    if kernel.message:
        return kernel.message / card.link_bytes_per_s
    rate = matmul_rate(card, kernel.dtype)
    if kernel.kind == "attention" and kernel.flops:
        rate = card.attention[kernel.backward]
    is_thin = kernel.kind == "adapters" and kernel.flops
    bytes_per_s = card.bytes_per_s * (THIN_SHARE if is_thin else 1)
    return max(kernel.flops / rate, kernel.num_bytes / bytes_per_s, MIN_KERNEL_US * 1e-6)


def _join(
    kernels: list[Kernel],
    alive: set[int],
    card: Card,
    seconds: dict[int, float],
    launched: set[int],
) -> None:
    """Give each fused kernel its share of the fused time, and one launch to all of them."""
    for group in join_kernels(kernels, alive):
        before = sum(kernels[n].num_bytes for n in group.members)
        whole_s = max(group.num_bytes / card.bytes_per_s, MIN_KERNEL_US * 1e-6)
        for number in group.members:
            share = kernels[number].num_bytes / max(before, 1)
            seconds[id(kernels[number])] = whole_s * share
            if number != group.members[0]:
                launched.discard(id(kernels[number]))


def _play_events(
    events: list[Any], card: Card, seconds: dict[int, float], launched: set[int], messages: bool
) -> float:
    """Return when the last stream ends; if not ``messages``, messages take no time."""
    host_s, messages_s = 0.0, 0.0
    streams: dict[int, float] = defaultdict(float)
    recorded_s: dict[int, float] = defaultdict(float)
    for event in events:
        if isinstance(event, Kernel):
            host_s += card.launch_us * 1e-6 * (id(event) in launched)
            begin_s = max(streams[event.stream], host_s)
            if not event.message:
                streams[event.stream] = begin_s + seconds[id(event)]
                continue
            end_s = max(begin_s, messages_s) + (seconds[id(event)] if messages else 0)
            messages_s = end_s
            streams[event.stream] = end_s if event.waits_for_it else begin_s
            continue
        what, one, other = event
        if what == "wait":
            streams[one] = max(streams[one], streams[other])
        elif what == "record":
            recorded_s[one] = streams[other]
        elif what == "wait event":
            streams[one] = max(streams[one], recorded_s[other])
        elif what == "wait messages":
            streams[one] = max(streams[one], messages_s)
        else:
            host_s = max(host_s, *streams.values())
    return max(host_s, *streams.values())


def table(cost: Cost, card: Card) -> str:
    """Return the table as text."""
    rows = [*cost.us.items(), ("messages, exposed", cost.exposed_us), ("host", cost.host_us)]
    lines = [f"{card.name}: microseconds per token, counted and not measured"]
    lines += [f"  {name:26} {us:8.2f}" for name, us in rows if us >= 0.005]
    lines += [f"  {'all':26} {cost.total_us:8.2f}   {1e6 / cost.total_us:,.0f} tokens/s"]
    lines += [f"  {'messages, hidden':26} {cost.hidden_us:8.2f}"]
    lines += [f"  {cost.launches:.2f} launches and {cost.kept_bytes / 1024:.1f} KiB kept per token"]
    waits = Counter(cost.host_waits)
    lines += [f"  the host waits: {what} ({n}x)" for what, n in waits.items()]
    return "\n".join(lines)


def list_costliest(steps: Steps, card: Card, tokens: int, num: int) -> str:
    """Return the costliest kernels, summed by kind, name, dtype and pass."""
    us: dict[tuple[str, ...], float] = defaultdict(float)
    times: Counter[tuple[str, ...]] = Counter()
    for kernel in (event for event in steps.events if isinstance(event, Kernel)):
        key = (kernel.kind, kernel.name, str(kernel.dtype)[6:], "back" * kernel.backward)
        us[key] += _seconds(kernel, card) * 1e6 / tokens
        times[key] += 1
    largest = sorted(us.items(), key=lambda item: -item[1])[:num]
    return "\n".join(f"{us:8.3f} {times[key]:6} {' '.join(key)}" for key, us in largest)


if __name__ == "__main__":
    main()
