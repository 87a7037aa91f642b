"""The commands: each with its arguments, its help (the docstring) and its function.

``options`` are the arguments as argparse reads them; for commands with SETTINGS_ARGUMENTS,
``options.config`` is the configuration that they describe. A command imports what it needs when it
runs, so that --help and wrong arguments are answered without importing torch.
"""

import math
import os
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpc_tune.config.constraints import check_config, check_job
from hpc_tune.config.data import NAMED_TEMPLATES, is_prepared
from hpc_tune.config.init import (
    METHODS,
    QUESTIONS,
    collect_answers,
    interactive_input,
    write_config,
)
from hpc_tune.config.load import (
    describe_fields,
    find_variables,
    resolve_hub_path,
    uses_builtin_model_and_data,
)
from hpc_tune.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from hpc_tune.log import log
from hpc_tune.packages import fast_imports
from hpc_tune.units import parse_memory

# -- Shell completion of commands, their arguments and settings: a script that the shell sources.
#
# eval "$(hpc_tune completion bash)"


SHELLS = ("bash", "zsh")
_ZSH_SETUP = "autoload -U +X bashcompinit && bashcompinit\n"
# bash splits key=value into three words, and completes only the part after the equals sign.
_COMPLETION_TEMPLATE = """_hpc_tune() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command=train
    local settings="{settings}" words="" files=""
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}}" in {commands}) command="${{COMP_WORDS[1]}}" ;; esac
    fi
    if [ "$word" = "=" ]; then word="" before="$before="
    elif [ "$before" = "=" ]; then before="${{COMP_WORDS[COMP_CWORD-2]}}="
    fi
    case "$command $before" in
{values}
        *=) files=1 ;;
        *)
            case "$command" in
{arguments}
            esac
            [ "$COMP_CWORD" = 1 ] && words="$words {names} --version" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ -n "$files" ] && COMPREPLY+=($(compgen -f -- "$word"))
    case "${{COMPREPLY[*]}}" in *" "*) ;; *=) compopt -o nospace 2> /dev/null ;; esac
}}
complete -F _hpc_tune hpc_tune
"""


def completion_script(shell: str, commands: Mapping[str, Any]) -> str:
    """Return the completion script for a shell, from the arguments that ``commands`` declare."""
    fields, cases, arguments = list(describe_fields()), [], []
    for name, kind, _, _ in fields:
        words = _literal_values(kind.replace("bool", "true | false"))
        is_template = name == "data.chat_template"
        words = [*NAMED_TEMPLATES] if is_template else words
        cases += (
            [_completion_case(f'*" {name}="', words, completes_files=is_template)] if words else []
        )
    for command, (_, argument_specs) in commands.items():
        words, takes_files = ["--help"], False
        for name, kwargs in argument_specs:
            values = kwargs.get("choices", ())
            if name == "settings":
                words.append("$settings")
            elif not name.startswith("-"):
                words, takes_files = [*words, *values], not values
            else:
                words.append(name)
                if "action" not in kwargs or kwargs["action"] == "append":
                    cases.append(
                        _completion_case(f'"{command} {name}"', values, completes_files=not values)
                    )
        arguments.append("        " + _completion_case(command, words, takes_files))
    return (_ZSH_SETUP if shell == "zsh" else "") + _COMPLETION_TEMPLATE.format(
        settings=" ".join(f"{name}=" for name, *_ in fields),
        names=" ".join(commands),
        commands="|".join(commands),
        values="\n".join(cases),
        arguments="\n".join(arguments),
    )


def _completion_case(pattern: str, words: Sequence[str], completes_files: bool) -> str:
    return f'        {pattern}) words="{" ".join(words)}" files={"1" if completes_files else ""} ;;'


def _literal_values(kind: str) -> list[str]:
    """Return the literal values in a field's type, such as ``"a | b"``; none for a single type."""
    types = [] if kind.startswith("list[") else kind.split(" | ")
    literals = [text for text in types if text not in ("int", "str", "float") and "[" not in text]
    return literals if len(types) > 1 else []


# -- The commands.


Argument = tuple[str, dict[str, Any]]  # arguments of argparse's add_argument
CommandFunction = Callable[[Namespace], int]  # from the options to the exit code


class Command(NamedTuple):
    """A command: its name is that of ``run``, its help the docstring of ``run``."""

    run: CommandFunction
    arguments: Sequence[Argument]


def command(*arguments: Argument) -> Callable[[CommandFunction], Command]:
    """Make a function a command with these arguments; ``_ALL_COMMANDS`` lists them."""
    return lambda run: Command(run, arguments)


def argument(
    name: str, kind: Any, help: str, minimum: float = -math.inf, **kwargs: Any
) -> Argument:
    """Declare an argument: a flag (bool), a choice (tuple), or a value that ``kind`` parses."""
    if kind is bool:
        kwargs["action"] = "store_true"
    elif isinstance(kind, tuple):
        kwargs["choices"] = kind
    else:
        kwargs["type"] = _make_argument_type(kind, minimum)
    if isinstance(kwargs.get("default"), str | int | float):
        help += " (default: %(default)s)"
    return name, {"help": help, **kwargs}


def _make_argument_type(kind: Callable[[str], Any], minimum: float) -> Callable[[str], Any]:
    """Return a type for argparse whose errors explain what is wrong."""

    def parse_value(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            number = "a whole number" if kind is int else "a number" if kind is float else None
            message = f"found {text}, expected {number}" if number else str(error)
            raise ArgumentTypeError(message) from None
        if isinstance(value, int | float) and not value >= minimum:
            raise ArgumentTypeError(f"found {text}, expected at least {minimum:g}")
        return value

    return parse_value


def model_folder(path: str) -> Path:
    """Return the folder of a model, given as a path or as OWNER/NAME in the hub's cache."""
    try:
        return Path(resolve_hub_path("the model", path, "model"))
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None


SETTINGS_ARGUMENTS = (
    argument(
        "--config",
        str,
        "YAML file of settings; may be repeated, later files win; without any, the defaults below "
        "hold, or those of a tiny test run if neither model.path nor data.path is set",
        dest="files",
        metavar="FILE",
        action="append",
        default=[],
    ),
    argument(
        "settings", str, "settings that override FILE's", nargs="*", metavar="key=value", default=[]
    ),
)
RUN_ARGUMENT = argument("run", Path, "a run directory or one of its checkpoints", metavar="RUN")
JSON_ARGUMENT = argument("--json", bool, "print JSON instead of a table")


@command(
    argument("--force", bool, "start even if the run is predicted not to fit"), *SETTINGS_ARGUMENTS
)
def train(options: Namespace) -> int:
    """Fine-tune a model (the default command)."""
    if not options.files and not uses_builtin_model_and_data(options.settings):
        log.info("config  no --config: defaults apply to all settings not given here (see --help)")
    # Read when torch is imported. Without it each rank prints C++ frames when one rank is lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with fast_imports():
        from hpc_tune.train.run import run
    return run(options.config, force=options.force)


@command(
    argument("--model", str, "a Hugging Face model directory, or builtin:tiny"),
    argument("--data", str, "a dataset, as data.path takes it"),
    argument("--machine", str, "cpu, or NODESxGPUS of each node, such as 2x8"),
    argument("--method", METHODS, "which weights are trained"),
    argument("--out", Path, "the file to write", default="my.yaml"),
)
def init(options: Namespace) -> int:
    """Write a configuration from four answers (model, data, machine, method)."""
    from hpc_tune.cluster.submission import find_schedulers
    from hpc_tune.memory.host import find_host_limit
    from hpc_tune.plan.report import preview_plan

    answers = collect_answers(
        {name: getattr(options, name) for name in QUESTIONS}, interactive_input()
    )
    host_bytes, out = find_host_limit().num_bytes, Path(options.out)
    section: Literal["slurm", "pbs"] = "pbs" if find_schedulers() == ["pbs"] else "slurm"
    print("\n".join(write_config(out, answers, host_bytes, preview_plan, section)))
    return EXIT_DONE


@command(
    argument(
        "file", Path, "a config of torchtune, LLaMA-Factory or axolotl, in YAML", metavar="FILE"
    ),
    argument("--ranks", int, "ranks (GPUs) that it was made for (default: 1)", minimum=1),
    argument("--out", Path, "the file to write (default: print it)"),
)
def convert(options: Namespace) -> int:
    """Convert another tool's config to one of hpc_tune; report what became of each key."""
    from hpc_tune.convert.convert import convert_file

    lines, text = convert_file(options.file, options.ranks, options.out)
    print("\n".join(lines), file=sys.stderr)
    print(text if options.out is None else "", end="")
    return EXIT_DONE


@command(
    argument("--launch", shlex.split, "launcher of the ranks, such as srun", required=True),
    argument(
        "--requeue", shlex.split, "command that requeues the job (default: the scheduler's own)"
    ),
    argument("--python", shlex.split, "Python of the ranks", default=shlex.quote(sys.executable)),
    *SETTINGS_ARGUMENTS,
)
def supervise(options: Namespace) -> int:
    """In a batch job, start the ranks, restart them after a failure, and requeue the job."""
    from hpc_tune.cluster.nodes import JobNodes
    from hpc_tune.cluster.schedulers import choose_section
    from hpc_tune.supervise import Supervisor

    config, launch = options.config, [*options.launch, *options.python]
    job = choose_section(config.slurm, config.pbs, os.environ)
    nodes = JobNodes(launch, os.environ, job, config.parallel)
    arguments, run = _config_arguments(options), config.run
    return Supervisor(
        launch, arguments, Path(run.dir), options.requeue, run.report, nodes=nodes
    ).run()


@command(
    argument("--dry-run", bool, "print the script instead of submitting it"),
    argument(
        "--scheduler",
        ("slurm", "pbs"),
        "the scheduler (default: the one whose section is given, or that this host has)",
    ),
    *SETTINGS_ARGUMENTS,
)
def submit(options: Namespace) -> int:
    """Write a batch script from the slurm or pbs settings and submit it with sbatch or qsub."""
    from hpc_tune.cluster import submission

    config = options.config
    job = submission.choose_scheduler(config.slurm, config.pbs, options.scheduler)
    if problems := check_job(job, config.parallel, config.run.device):
        raise ConfigError("; ".join(problems))
    if not job.is_given:
        log.warning(
            "no %s setting is given: the job asks for 1 node, 1 rank, no GPU and 1 hour",
            job.section,
        )
    config_variables = find_variables(options.files, options.settings)
    variables = submission.job_variables(config_variables, os.environ)
    text = submission.render_script(job, _config_arguments(options), Path.cwd(), variables)
    if options.dry_run:
        print(text, end="")
        return EXIT_DONE
    job_id = submission.submit_job(text, job, Path.cwd(), os.environ)
    status_words = submission.status_command(job, job_id)
    print(f"submitted job {job_id}, run directory {config.run.dir}; {status_words} shows its state")
    return EXIT_DONE


def _config_arguments(options: Namespace) -> list[str]:
    """Return the arguments that pass this configuration to another command."""
    return [*(word for file in options.files for word in ("--config", file)), *options.settings]


@command(
    JSON_ARGUMENT,
    argument("--links", float, "seconds of link tests (default: 10 + 0.5 per node)", minimum=0),
    argument(
        "--products",
        float,
        "seconds in which all ranks multiply matrices (default: 2 on GPUs, 0.5 on CPUs)",
        minimum=0,
    ),
    *SETTINGS_ARGUMENTS,
)
def doctor(options: Namespace) -> int:
    """Check that nodes, network and software are ready for a run; launch it like the run."""
    from hpc_tune.probe.doctor import run_doctor

    return run_doctor(options.config, options.json, options.links, options.products)


@command(argument("--out", Path, "the .h5 file to write", required=True), *SETTINGS_ARGUMENTS)
def prepare(options: Namespace) -> int:
    """Tokenize a dataset into one .h5 file, to be used as data.path."""
    from hpc_tune.prepare import run_prepare

    return run_prepare(options.config, options.out)


@command(
    argument(
        "data",
        str,
        "a dataset, as data.path takes it, or a prepared .h5 (default: FILE's data.path)",
        metavar="DATA",
        nargs="?",
    ),
    argument("--rows", int, "number of rows to print", minimum=0, default=5),
    *SETTINGS_ARGUMENTS,
)
def show(options: Namespace) -> int:
    """Print examples as the model sees them, with the tokens that count in the loss marked."""
    from hpc_tune.prepare import run_show

    return run_show(options.config, options.rows)


@command(
    argument("--nodes", int, "number of nodes (default: from the slurm or pbs section)", minimum=1),
    argument(
        "--gpus-per-node",
        int,
        "GPUs, and so ranks, per node (default: from that section, or 8)",
        minimum=1,
    ),
    argument("--cpu", bool, "plan for ranks on CPUs, as --device-memory 0 and run.device=cpu do"),
    argument("--device-memory", parse_memory, "memory per GPU (default: 80GiB)"),
    argument(
        "--host-memory", parse_memory, "memory per node (default: from that section, or 512GiB)"
    ),
    argument(
        "--save",
        ("streamed", "gathered"),
        "streamed: as hpc_tune saves; gathered: as tools that first gather the model on one rank",
        default="streamed",
    ),
    argument("--masked", bool, "for GPUs below compute capability 8.0, whose attention has a mask"),
    argument("--measured", str, "with parallel=auto: file with the output of doctor --json there"),
    argument("--hardware", str, "with parallel=auto: kind of cluster, such as h100-ib400"),
    JSON_ARGUMENT,
    *SETTINGS_ARGUMENTS,
)
def plan(options: Namespace) -> int:
    """Predict the memory that a run needs on a cluster, and whether it fits; needs no GPU."""
    from hpc_tune.packages import is_importable
    from hpc_tune.plan.hardware import requested_machine
    from hpc_tune.plan.report import (
        describe_sufficient_remedies,
        make_plan,
        plan_to_json,
        plan_to_lines,
    )
    from hpc_tune.plan.resolve import explain_too_long_rows
    from hpc_tune.train.sources import describe_planned_sources

    config = options.config
    named_machine = options.nodes, options.gpus_per_node, options.device_memory, options.host_memory
    uses_cpus = options.cpu or options.device_memory == 0 or config.run.device == "cpu"
    machine, assumptions = requested_machine(config.job, *named_machine, uses_cpus)
    if assumptions:
        log.info("assumed, since it is not specified: %s", ", ".join(assumptions))
    if config.parallel.layout == "auto":
        from hpc_tune.autotune import search

        speed_sources = options.measured, options.hardware
        choice, machine, config = search.choose_layout_for_command(config, machine, *speed_sources)
        if options.json:
            print(search.choice_to_json(choice))
            return EXIT_DONE
        print("\n".join([*search.choice_lines(choice), ""]))
    elif options.measured or options.hardware:
        raise ConfigError("--measured and --hardware need parallel=auto, which is not set")
    plan_arguments = machine, options.save, options.masked

    def fits_with(changes: Mapping[str, Any]) -> bool:
        changed_config = config.with_changes(changes)
        try:
            return (
                set(check_config(changed_config)) <= set(check_config(config))
                and make_plan(changed_config, *plan_arguments).fits
            )
        except ConfigError:
            return False

    memory_plan = make_plan(config, *plan_arguments)
    advice = memory_plan.advice
    if not memory_plan.fits:
        advice = describe_sufficient_remedies(memory_plan.remedies, fits_with)
    if config.parallel.zero_stage is not None and not is_importable("deepspeed"):
        log.warning("parallel.zero_stage needs DeepSpeed, which is not installed here")
    if config.tune.form != "pairs":
        for warning in explain_too_long_rows(config.model, config.data.seq_len):
            log.warning("%s", warning)
    lines = plan_to_lines(memory_plan, advice)
    lines += describe_planned_sources(config.data, config.train, config.batch.global_size)
    print(plan_to_json(memory_plan, advice) if options.json else "\n".join(lines))
    return EXIT_DONE if memory_plan.fits else EXIT_FAILED


@command(
    RUN_ARGUMENT,
    argument(
        "--to",
        ("adapter", "merged", "gguf"),
        "a PEFT adapter (with experts also per expert, for vLLM), the whole model, or that as GGUF",
        required=True,
    ),
    argument("--out", Path, "directory to write (default: RUN/export/ and the kind)"),
    argument("--base", model_folder, "directory of the base model, if it has moved"),
    argument("--dtype", ("bf16", "fp32"), "of merged weights (default: as the base stores them)"),
)
def export(options: Namespace) -> int:
    """Export a checkpoint as a PEFT adapter, or merged with its base."""
    from hpc_tune.checkpoint.export import export_adapter, export_merged
    from hpc_tune.checkpoint.gguf_file import export_gguf
    from hpc_tune.checkpoint.locate import locate, require_base, retry_with_newest_checkpoint
    from hpc_tune.model.build import DTYPES

    run = locate(options.run, options.base)
    folders = require_base(run, "--base"), options.out or run.run_dir / "export" / options.to
    if options.to == "adapter" and options.dtype:
        raise ConfigError("--dtype is for --to merged and gguf; an adapter keeps its dtype")

    def export_checkpoint(checkpoint: Path) -> Path:
        arguments = (checkpoint, run.config.tune, *folders, run.template)
        if options.to == "adapter":
            return export_adapter(*arguments)
        export_model = export_merged if options.to == "merged" else export_gguf
        return export_model(*arguments, DTYPES.get(options.dtype))

    print(retry_with_newest_checkpoint(run, options.run, export_checkpoint))
    return EXIT_DONE


@command(
    argument("--run", Path, "a run directory or one of its checkpoints"),
    argument(
        "--model", model_folder, "a model directory; with --run: the base model, if it has moved"
    ),
    argument("--base", bool, "with --run: without the adapter"),
    argument("--prompt", str, "the user's message; - reads it from stdin"),
    argument("--system", str, "with --prompt: the system prompt"),
    argument("--tools", Path, "JSON file with a list of tools, as in rows of training data"),
    argument("--chat", Path, "instead of --prompt: JSON file with messages, or with a whole row"),
    argument("--max-tokens", int, "maximum number of tokens to generate", minimum=1, default=128),
    argument("--temperature", float, "sampling temperature; 0: greedy", minimum=0, default=0.0),
    argument("--seed", int, "random seed for sampling", default=0),
)
def generate(options: Namespace) -> int:
    """Answer a prompt, or a chat with tools, with a fine-tuned model."""
    from hpc_tune.generate import generate_answer, read_chat

    chat = read_chat(options.prompt, options.system, options.tools, options.chat)
    sampling = options.max_tokens, options.temperature, options.seed
    print(generate_answer(options.run, options.model, not options.base, chat, *sampling))
    return EXIT_DONE


@command(
    argument("run", str, "a run directory, a checkpoint or a prepared .h5 file", metavar="RUN"),
    argument("--verify", bool, "read all files and verify their checksums"),
    argument("--against", Path, "another run or checkpoint: also list the settings that differ"),
)
def inspect(options: Namespace) -> int:
    """List and check the checkpoints of a run, or describe a prepared .h5 file."""
    path = Path(options.run)
    if is_prepared(options.run):
        from hpc_tune.data.show import describe_prepared_file

        lines, is_valid = describe_prepared_file(path)
    else:
        from hpc_tune.checkpoint.locate import describe_checkpoints, diff_settings

        lines, is_valid = describe_checkpoints(path, options.verify)
        if options.against:
            lines += diff_settings(path, options.against) or ["no setting differs"]
    print("\n".join(lines))
    return EXIT_DONE if is_valid else EXIT_FAILED


@command(
    argument("runs", Path, "run directories", nargs="+", metavar="RUN"),
    argument("--out", Path, ".html file (default: report.html in RUN, or here for several)"),
    argument("--png", bool, "also write the figures as PNG, into a folder beside the page"),
    argument("--no-job-energy", bool, "do not ask Slurm for the energy of the run's jobs"),
)
def report(options: Namespace) -> int:
    """Write an HTML report about one run, or one that compares several."""
    if options.out and options.out.suffix != ".html":
        raise ConfigError(f"--out {options.out}: expected the name of an .html file")
    from hpc_tune.report.page import write_report

    print(write_report(options.runs, options.out, options.png, not options.no_job_energy))
    return EXIT_DONE


@command(
    RUN_ARGUMENT,
    argument("--every", float, "seconds between updates", minimum=0.01, default=2.0),
    argument("--once", bool, "print the current state once and exit"),
)
def watch(options: Namespace) -> int:
    """Follow a run in the terminal while it trains."""
    from hpc_tune.report import watch as live

    live.watch_run(options.run, options.every, options.once)
    return EXIT_DONE


@command(argument("shell", SHELLS, "the shell that reads the script"))
def completion(options: Namespace) -> int:
    """Print a completion script: eval "$(hpc_tune completion bash)"."""
    print(completion_script(options.shell, COMMANDS), end="")
    return EXIT_DONE


_ALL_COMMANDS = (
    *(train, init, convert, show, plan, doctor, prepare, submit, supervise),
    *(report, watch, inspect, generate, export, completion),
)
COMMANDS = {command.run.__name__: command for command in _ALL_COMMANDS}
ALL_RANK_COMMANDS = ("train", "doctor", "prepare")  # the others are for one process
