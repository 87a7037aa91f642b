"""The init command: four answers -> a configuration with comments that justify each value.

model, data, machine, method -> ask for the missing ones -> YAML, checked -> FILE
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from hpc_tune.config.data import is_prepared
from hpc_tune.config.load import load_config
from hpc_tune.errors import ConfigError, require_utf8
from hpc_tune.files import read_json_object, write_file
from hpc_tune.safe_yaml import load_yaml
from hpc_tune.units import format_bytes

METHODS = ("lora", "qlora", "dora", "full")
QUESTIONS = {
    "model": "Model: a Hugging Face directory, or builtin:tiny to try things out",
    "data": "Data: a file, a folder or a pattern, or builtin:pydocs to try things out",
    "machine": "Machine: cpu, or NODESxGPUS of each node (1x1, 1x8, 4x8)",
    "method": "Method: lora, qlora (a base of 4 bits), dora, or full (all weights)",
}
DEFAULT_ANSWERS = {
    "model": "builtin:tiny",
    "data": "builtin:pydocs",
    "machine": "cpu",
    "method": "lora",
}
_USUAL_SEQ_LEN, _GLOBAL_BATCH_SIZE = 4096, 64
_SEQ_LEN_ON_CPUS, _GLOBAL_BATCH_SIZE_ON_CPUS = 1024, 8  # with more, a step takes minutes


@dataclass(frozen=True)
class TargetMachine:
    """Number of nodes and of GPUs per node (0: CPU ranks); ``section``: the scheduler's."""

    num_nodes: int
    gpus_per_node: int
    section: Literal["slurm", "pbs"]


@dataclass(frozen=True)
class PlanPreview:
    """The plan of a run: parallel.recompute, and the host memory of a node in GiB.

    A GPU needs ``device_bytes`` of the ``device_limit_bytes`` that it is assumed to have; ``fits``:
    whether that is enough.
    """

    recompute: str
    host_gib_per_node: int
    device_bytes: int
    device_limit_bytes: int
    fits: bool


PlanPreviewer = Callable[[Path, int, int], PlanPreview | None]


def collect_answers(
    option_values: Mapping[str, str | None], ask: Callable[[str], str] | None
) -> dict[str, str]:
    """Return the four answers; ``ask`` is called with the question of each missing one.

    Raises:
        ConfigError: if one is missing and there is nobody to ask, or one is not valid UTF-8.
    """
    missing = [name for name in QUESTIONS if option_values.get(name) is None]
    if missing and ask is None:
        flags = " ".join(f"--{name} {DEFAULT_ANSWERS[name]}" for name in missing)
        raise ConfigError(f"there is nobody to ask; give what is missing as arguments: {flags}")
    complete = {name: value for name, value in option_values.items() if value is not None}
    if ask is not None:
        for name in missing:
            answer = ask(f"{QUESTIONS[name]} [{DEFAULT_ANSWERS[name]}]: ").strip()
            complete[name] = answer or DEFAULT_ANSWERS[name]
    return {name: require_utf8(value) for name, value in complete.items()}


def write_config(
    out: Path,
    option_values: Mapping[str, str],
    host_bytes: int,
    preview_plan: PlanPreviewer | None = None,
    section: Literal["slurm", "pbs"] = "slurm",
) -> list[str]:
    """Write the configuration to ``out``; return the commands that come next.

    ``host_bytes``: the memory of this machine, for CPU ranks. ``preview_plan`` plans a run on nodes
    with GPUs. ``section``: that of the scheduler that a job of several nodes is submitted to.

    Raises:
        ConfigError: if an answer cannot be used, or ``out`` exists or cannot be written.
    """
    if os.path.exists(out):
        raise ConfigError(f"{out} exists already; name another file with --out, or remove it")
    machine = _parse_machine(option_values["machine"], section)
    if option_values["method"] not in METHODS:
        raise ConfigError(
            f"--method {option_values['method']}: expected one of {', '.join(METHODS)}"
        )

    def write(preview: PlanPreview | None) -> None:
        try:
            write_file(
                out, "\n".join([*_config_lines(option_values, machine, out.stem, preview), ""])
            )
        except OSError as error:
            with contextlib.suppress(OSError):
                out.unlink()  # else a second try would say that it exists
            raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None

    write(None)
    try:
        load_config([str(out)], [])
    except ConfigError:
        out.unlink()
        raise
    if machine.gpus_per_node and preview_plan is not None:
        write(preview_plan(out, machine.num_nodes, machine.gpus_per_node))
    return list(_next_commands(out, machine, option_values["data"], host_bytes))


def interactive_input() -> Callable[[str], str] | None:
    """Return the function that asks on the terminal; None if this is not an interactive one."""
    return input if sys.stdin.isatty() and sys.stderr.isatty() else None


def _parse_machine(text: str, section: Literal["slurm", "pbs"]) -> TargetMachine:
    if text == "cpu":
        return TargetMachine(1, 0, section)
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"--machine {text}: expected cpu, or NODESxGPUS such as 2x8")
    return TargetMachine(int(match[1]), int(match[2]), section)


def _config_lines(
    option_values: Mapping[str, str], machine: TargetMachine, name: str, preview: PlanPreview | None
) -> Iterator[str]:
    path, method = option_values["model"], option_values["method"]
    length, reason = _choose_seq_len(
        path, _USUAL_SEQ_LEN if machine.gpus_per_node else _SEQ_LEN_ON_CPUS
    )
    rows = _GLOBAL_BATCH_SIZE if machine.gpus_per_node else _GLOBAL_BATCH_SIZE_ON_CPUS
    yield f"# Written by `hpc_tune init` for {method} on {option_values['machine']}."
    yield "# All other settings have defaults: python -m hpc_tune --help"
    yield "model:"
    yield f"  path: {_format_scalar(path)}"
    if machine.gpus_per_node:
        yield _commented_line("dtype: bf16", "what GPUs compute fastest in")
    yield "tune:"
    yield f"  method: {method}"
    if method != "full":
        yield _commented_line("rank: 16", "of the adapters; 8 to 64 are usual")
        yield _commented_line("alpha: 32", "scales them by alpha / rank; twice the rank is usual")
    elif machine.gpus_per_node:
        yield _commented_line(
            "param_dtype: fp32", "bf16 halves memory, and loses small updates in rounding"
        )
    yield "data:"
    data = _parse_data(option_values["data"])
    yield f"  path: {_format_scalar(data)}"
    if is_prepared(data):
        yield _commented_line("eval_path: null", "the held-out file that prepare wrote, if any")
    else:
        yield _commented_line(
            "eval_fraction: 0.02", "held out by a hash of each document: overfitting shows"
        )
    yield _commented_line(f"seq_len: {length}", reason)
    yield "batch:"
    yield _commented_line(
        f"global_size: {rows}", "rows per optimizer step, over all ranks together"
    )
    yield "optim:"
    if method == "full":
        yield _commented_line("lr: 1e-5", "usual for all weights")
    else:
        yield _commented_line("lr: 2e-4", "usual for adapters")
    if machine.gpus_per_node:
        yield "parallel:"
        yield _recompute_line(preview)
    yield "train:"
    yield _commented_line("epochs: 1", "watch the held-out loss before you take more")
    yield "checkpoint:"
    yield _commented_line("every_minutes: 30", "what a crash costs at most")
    yield "run:"
    yield _commented_line(
        f"dir: {_format_scalar(f'runs/{name}')}", "on a file system that all nodes share"
    )
    if machine.num_nodes > 1:
        yield from _job_lines(machine, preview)


def _job_lines(machine: TargetMachine, preview: PlanPreview | None) -> Iterator[str]:
    is_pbs = machine.section == "pbs"
    site_settings = "queue, and filesystems if the site asks" if is_pbs else "partition"
    yield f"{machine.section}:  # for `hpc_tune submit`; add account and {site_settings}"
    yield f"  nodes: {machine.num_nodes}"
    yield f"  gpus_per_node: {machine.gpus_per_node}"
    yield _commented_line("cpus_per_task: 8", "cores of each rank")
    time = "walltime" if is_pbs else "time"
    yield _commented_line(
        f'{time}: "04:00:00"', "of one job; the run requeues itself until it is done"
    )
    unit = "gb" if is_pbs else "G"
    if preview is None:
        yield f"  # memory: of each node, such as 64{unit}; `hpc_tune plan` says how much it takes"
    else:
        yield _commented_line(
            f"memory: {preview.host_gib_per_node}{unit}", "of each node, as planned"
        )
    if sys.prefix != sys.base_prefix:
        yield _commented_line(
            f"venv: {_format_scalar(sys.prefix)}", "this environment, on a shared folder"
        )


def _recompute_line(preview: PlanPreview | None) -> str:
    if preview is None or preview.recompute == "selective":
        return _commented_line(
            "recompute: selective", "less memory for a few percent of time; or none"
        )
    device, limit = format_bytes(preview.device_bytes), format_bytes(preview.device_limit_bytes)
    if preview.fits:
        return _commented_line(
            "recompute: full", f"with it a GPU needs {device}; without, more than {limit}"
        )
    return _commented_line("recompute: full", f"and a GPU still needs {device}: take more of them")


def _commented_line(setting: str, reason: str) -> str:
    return f"  {setting:<22} # {reason}"


def _choose_seq_len(model: str, usual_seq_len: int) -> tuple[int, str]:
    """Return the tokens per row and the reason for that number."""
    if model == "builtin:tiny":
        return 512, "tokens per row; the tiny model has short ones"
    shape = read_json_object(Path(model) / "config.json")
    text = shape.get("text_config", shape)
    sizes = text if isinstance(text, dict) else {}
    limit = sizes.get("max_position_embeddings") or sizes.get("n_positions")
    if not isinstance(limit, int):
        return usual_seq_len, "tokens per row; longer documents are cut and counted"
    return min(limit, usual_seq_len), f"tokens per row; this model takes up to {limit}"


def _parse_data(text: str) -> str | list[str]:
    """Return data.path as the command line would parse it: [a, b] is a list."""
    try:
        value = load_yaml(text, scalars_as_text=True) if text.startswith("[") else text
    except ValueError:
        return text
    return value if isinstance(value, list) else text


def _format_scalar(value: str | list[str]) -> str:
    """Return a value as one line of YAML, quoted if necessary."""
    line: str = yaml.safe_dump(value, width=10**9, default_flow_style=True)
    return line.removesuffix("\n").removesuffix("\n...")


def _next_commands(out: Path, machine: TargetMachine, data: str, host_bytes: int) -> Iterator[str]:
    command = f"python -m hpc_tune {{}} --config {shlex.quote(str(out))}"
    yield f"wrote {out}. Next:"
    yield f"  {command.format(f'show {shlex.quote(data)}')}"
    flags = (
        f"--nodes {machine.num_nodes} --gpus-per-node {machine.gpus_per_node} --device-memory 80GiB"
    )
    flags += " --host-memory 512GiB"
    if not machine.gpus_per_node:
        flags = f"--cpu --gpus-per-node 1 --host-memory {host_bytes >> 20}MiB"
    yield f"  {command.format('plan')} {flags}"
    if machine.num_nodes > 1:
        yield f"  {command.format('submit')} --dry-run"
    else:
        launcher = f"mpirun -np {machine.gpus_per_node} " if machine.gpus_per_node > 1 else ""
        yield f"  {launcher}{command.format('train')}"
