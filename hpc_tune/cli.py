"""The command line. Nothing here imports torch before the arguments are known to be good."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_tune.config.load import is_tiny, load_config
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import EXIT_DONE, ConfigError, HpcTuneError
from hpc_tune.lean import lean_imports, postpone_compiler
from hpc_tune.log import configure, log
from hpc_tune.overview import overview, settings_text, unknown_command
from hpc_tune.units import parse_bytes
from hpc_tune.world.discover import rank_hint

COMMANDS = {
    "train": "fine-tune a model (the default command)",
    "supervise": "keep a run going in a batch job: start it, start it again, requeue",
    "submit": "write the batch script that the slurm part describes, and give it to Slurm",
    "doctor": "say whether the cluster is as a run needs it: alone, under mpirun or srun",
    "prepare": "turn raw data into one prepared .h5 file",
    "show": "print data as the model will see it, what is learned of it, and what is left out",
    "plan": "tell what a run takes on machines that need not be there, and whether it fits",
    "export": "write a checkpoint as a peft adapter or a merged model",
    "generate": "answer a prompt with a tuned model",
    "inspect": "list and verify the checkpoints of a run, or what a prepared .h5 file holds",
    "report": "write one HTML page about a run, or several side by side",
    "watch": "show a run in the terminal while it goes on",
    "completion": 'for a shell: eval "$(hpc_tune completion bash)"',
}
OTHER_RANKS_WAIT_S = 3.0  # for rank 0 to print what is wrong before the launcher ends it
_ALONE_AFTER_S = 10.0  # when rank 0 has not, what is wrong is so on this rank alone


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0] not in COMMANDS and arguments[0] not in ("-h", "--help")):
        if arguments[:1] and not arguments[0].startswith("-") and "=" not in arguments[0]:
            return _refuse(ConfigError(unknown_command(arguments[0], COMMANDS)))
        arguments.insert(0, "train")
    if arguments[0] in ("-h", "--help"):
        print(overview(COMMANDS))
        return EXIT_DONE
    if arguments[1:2] == ["--version"]:
        from hpc_tune.probe.software import for_a_bug_report

        print("\n".join(for_a_bug_report()))
        return EXIT_DONE
    command, rest = arguments[0], arguments[1:]
    configure(rank_hint(os.environ))
    try:
        match command:
            case "train":
                return _train(rest)
            case "supervise":
                return _supervise(rest)
            case "submit":
                return _submit(rest)
            case "doctor":
                return _doctor(rest)
            case "prepare":
                return _prepare(rest)
            case "show":
                return _show(rest)
            case "plan":
                return _plan(rest)
            case "export":
                return _export(rest)
            case "generate":
                return _generate(rest)
            case "inspect":
                return _inspect(rest)
            case "report":
                return _report(rest)
            case "watch":
                return _watch(rest)
            case _:
                return _completion(rest)
    except HpcTuneError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return 130


def _train(arguments: list[str]) -> int:
    parser = _parser("train", config=True)
    parser.add_argument(
        "--force", action="store_true", help="start what does not fit into memory by the plan"
    )
    options, config = _options_and_config(parser, arguments)
    if not options.config and not is_tiny(options.overrides):
        log.info("config  no --config: the defaults, as --help lists them, where not set here")
    with lean_imports():
        from hpc_tune.train.run import run
    if not config.train.compile:
        postpone_compiler()

    return run(config, force=options.force)


def _supervise(arguments: list[str]) -> int:
    parser = _parser("supervise", config=True)
    parser.add_argument(
        "--launch", required=True, metavar="COMMAND", help="what starts the ranks, such as 'srun'"
    )
    parser.add_argument(
        "--requeue", metavar="COMMAND", help="puts the job back; default: scontrol, under Slurm"
    )
    parser.add_argument(
        "--python", metavar="COMMAND", default=sys.executable, help="that of the ranks"
    )
    options, config = _options_and_config(parser, arguments)
    from hpc_tune.supervise import Supervisor

    launch = [*_words(options.launch, "--launch"), *_words(options.python, "--python")]
    requeue = _words(options.requeue or "", "--requeue")
    run = config.run
    return Supervisor(launch, _passed_on(options), Path(run.dir), requeue, run.report).run()


def _submit(arguments: list[str]) -> int:
    parser = _parser("submit", config=True)
    parser.add_argument("--dry-run", action="store_true", help="print the script only")
    options, config = _options_and_config(parser, arguments)
    from hpc_tune.slurm import render, submit

    script = render(config.slurm, _passed_on(options), Path.cwd())
    if options.dry_run:
        print(script, end="")
        return EXIT_DONE
    number = submit(script)
    print(f"job {number}; squeue -j {number} shows it, {config.run.dir} is its run directory")
    return EXIT_DONE


def _doctor(arguments: list[str]) -> int:
    parser = _parser("doctor", config=True)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--links",
        type=float,
        metavar="SECONDS",
        help="how long pairs of ranks are measured; default 10, and half of one for each node",
    )
    options, config = _options_and_config(parser, arguments)
    if options.links is not None and not options.links >= 0:
        raise ConfigError(f"--links {options.links:g}: expected seconds, 0 or more")
    from hpc_tune.probe.doctor import run_doctor

    return run_doctor(config, options.json, options.links)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """Return the arguments that say the same to another command."""
    named = [word for file in options.config for word in ("--config", file)]
    return [*named, *options.overrides]


def _words(command: str, option: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{option} {command!r}: {error}") from None


def _prepare(arguments: list[str]) -> int:
    parser = _parser("prepare", config=True)
    parser.add_argument("--out", required=True, help="the .h5 file to write")
    options, config = _options_and_config(parser, arguments)
    from hpc_tune.train.preparing import run_prepare

    return run_prepare(config, Path(options.out))


def _show(arguments: list[str]) -> int:
    parser = _parser("show", config=True, data="raw data as data.path takes it, or a prepared .h5")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="shown; default 5")
    options, config = _options_and_config(parser, arguments)
    if options.rows < 0:
        raise ConfigError(f"--rows {options.rows}: expected 0 or more")
    from hpc_tune.train.preparing import run_show

    return run_show(config, options.rows)


def _plan(arguments: list[str]) -> int:
    parser = _parser("plan", config=True)
    parser.add_argument("--nodes", type=int, default=1, help="default 1")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks per node; default 8")
    parser.add_argument(
        "--device-memory", default="80GiB", help="of each GPU; 0 for ranks on CPUs; default 80GiB"
    )
    parser.add_argument("--host-memory", default="512GiB", help="of each node; default 512GiB")
    parser.add_argument(
        "--save",
        choices=("streamed", "gathered"),
        default="streamed",
        help="gathered: as tools save that bring everything together on one rank",
    )
    parser.add_argument(
        "--measured", metavar="FILE", help="for parallel=auto: what doctor --json has printed there"
    )
    parser.add_argument("--hardware", metavar="NAME", help="for parallel=auto: a kind of cluster")
    parser.add_argument("--json", action="store_true", help="for programs")
    options, config = _options_and_config(parser, arguments)
    sizes = {}
    for name in ("device_memory", "host_memory"):
        try:
            sizes[name] = parse_bytes(getattr(options, name))
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    from hpc_tune.plan.answer import answer, as_json, as_lines, machine_of

    machine = machine_of(
        options.nodes, options.gpus_per_node, sizes["device_memory"] or None, sizes["host_memory"]
    )
    if config.parallel.layout == "auto":
        from hpc_tune.plan import auto

        choice, machine, config = auto.choose_for(
            config, machine, options.measured, options.hardware
        )
        if options.json:
            print(auto.as_json(choice))
            return EXIT_DONE
        print("\n".join([*auto.as_lines(choice), ""]))
    elif options.measured or options.hardware:
        raise ConfigError("--measured and --hardware are for parallel=auto, which is not set")
    found = answer(config, machine, options.save)
    print(as_json(found) if options.json else "\n".join(as_lines(found)))
    return EXIT_DONE if found.fits else 1


def _export(arguments: list[str]) -> int:
    parser = _parser("export")
    parser.add_argument("run", help="a run directory or one of its checkpoints")
    parser.add_argument(
        "--to", choices=("adapter", "merged"), required=True, help="peft's form, or a whole model"
    )
    parser.add_argument("--out", help="the directory to write; default: RUN/export/adapter|merged")
    parser.add_argument("--base", metavar="DIR", help="where the run's base model has moved to")
    options = parser.parse_args(arguments)
    from hpc_tune.checkpoint.export import export_adapter, export_merged
    from hpc_tune.checkpoint.locate import locate, require_base

    found = locate(Path(options.run), Path(options.base) if options.base else None)
    base = require_base(found, "--base")
    out = Path(options.out) if options.out else found.run_dir / "export" / options.to
    write = export_adapter if options.to == "adapter" else export_merged
    print(write(found.checkpoint, found.config.tune, base, out, found.template))
    return EXIT_DONE


def _generate(arguments: list[str]) -> int:
    parser = _parser("generate")
    parser.add_argument("--run", help="a run directory or one of its checkpoints")
    parser.add_argument("--model", help="a model directory; with --run: where its base is now")
    parser.add_argument("--base", action="store_true", help="with --run: without the adapter")
    parser.add_argument("--prompt", required=True, help="what the user says; - reads stdin")
    parser.add_argument("--max-tokens", type=int, default=128, help="default 128")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    options = parser.parse_args(arguments)
    if options.run is None and options.model is None:
        raise ConfigError("generate needs --run RUN_DIR or --model MODEL_DIR")
    if options.max_tokens < 1 or options.temperature < 0:
        raise ConfigError(
            f"--max-tokens {options.max_tokens} --temperature {options.temperature}: expected at "
            "least 1 token, and a temperature of 0 or more"
        )
    from hpc_tune.generate import answer

    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    print(
        answer(
            run=Path(options.run) if options.run else None,
            model=Path(options.model) if options.model else None,
            with_adapter=not options.base,
            prompt=prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    )
    return EXIT_DONE


def _inspect(arguments: list[str]) -> int:
    parser = _parser("inspect")
    parser.add_argument("run", help="a run directory, one of its checkpoints, or a prepared .h5")
    parser.add_argument("--verify", action="store_true", help="read every byte and check it")
    parser.add_argument("--against", metavar="RUN", help="show what is set differently there")
    options = parser.parse_args(arguments)
    if options.run.endswith((".h5", ".hdf5")):
        from hpc_tune.data.show import describe_prepared

        lines, is_valid = describe_prepared(Path(options.run))
        print("\n".join(lines))
        return EXIT_DONE if is_valid else 1
    from hpc_tune.checkpoint.locate import describe, differences

    lines, all_valid = describe(Path(options.run), options.verify)
    if options.against:
        found = differences(Path(options.run), Path(options.against))
        lines += found or ["no setting differs"]
    print("\n".join(lines))
    return EXIT_DONE if all_valid else 1


def _report(arguments: list[str]) -> int:
    parser = _parser("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--out", metavar="FILE", help="default: RUN/report.html; of several runs ./report.html"
    )
    options = parser.parse_args(arguments)
    if options.out and not options.out.endswith(".html"):
        raise ConfigError(f"--out {options.out}: expected the name of an .html file")
    from hpc_tune.report.write import write_report

    print(write_report([*map(Path, options.runs)], Path(options.out) if options.out else None))
    return EXIT_DONE


def _watch(arguments: list[str]) -> int:
    parser = _parser("watch")
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="default 2")
    parser.add_argument("--once", action="store_true", help="show it once and leave")
    options = parser.parse_args(arguments)
    if not options.every > 0:
        raise ConfigError(f"--every {options.every:g}: expected seconds, more than 0")
    from hpc_tune.report.watch import watch

    watch(Path(options.run), options.every, options.once)
    return EXIT_DONE


def _completion(arguments: list[str]) -> int:
    parser = _parser("completion")
    parser.add_argument("shell", help="bash or zsh")
    options = parser.parse_args(arguments)
    from hpc_tune.completion import script

    print(script(options.shell, COMMANDS), end="")
    return EXIT_DONE


def _parser(command: str, config: bool = False, data: str = "") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m hpc_tune {command}",
        description=COMMANDS[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if data:
        parser.add_argument("data", metavar="DATA", help=data)
    if config:
        parser.add_argument(
            "--config",
            metavar="FILE",
            action="append",
            default=[],
            help="YAML; given again, the later file wins; without one: the defaults, or a tiny run "
            "of the built-in model and data",
        )
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of FILE")
        parser.epilog = settings_text()
    return parser


def _options_and_config(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[Any, RunConfig]:
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise ConfigError(
            f"unknown argument {unknown[0]}; settings are written key=value, such as "
            f"{unknown[0].lstrip('-') or 'train.seed'}=..., see --help"
        )
    named = [f"data.path={options.data}"] if "data" in options else []
    return options, load_config(options.config, [*options.overrides, *named])


def _refuse(error: HpcTuneError) -> int:
    """Print the error once: on rank 0, or on another that is still there when it would have."""
    rank, had_world = rank_hint(os.environ), "torch" in sys.modules
    if rank:
        time.sleep(OTHER_RANKS_WAIT_S if had_world else _ALONE_AFTER_S)
    if not (rank and had_world):
        print(f"hpc_tune: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
    return error.exit_code
