"""YAML file + ``key=value`` overrides -> one frozen ``RunConfig``, or one error that lists every
problem.

defaults <- file.yaml <- key=value ... -> interpolate ${oc.env:SCRATCH} -> validate -> check ->
RunConfig
"""

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError


def load_config(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of ``path`` (None: the embedded default) with ``key=value``
    overrides applied.

    Raises:
        ConfigError: one message that lists all problems found.
    """
    source = path or "the embedded default"
    tree = _read_yaml(path)
    problems = []
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            problems.append(str(error))
    try:
        defaults = OmegaConf.create(RunConfig().model_dump())
        values = OmegaConf.to_container(OmegaConf.merge(defaults, tree), resolve=True)
    except OmegaConfBaseException as error:
        problems.append(f"{source}: {_first_line(error)} (key {error.full_key or '?'})")
        raise ConfigError(_list(problems)) from None
    assert isinstance(values, dict)
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += [_explain(e, source) for e in error.errors()]
    if config is not None:
        problems += check(config)
    if problems:
        raise ConfigError(_list(problems))
    assert config is not None
    return config


def check(config: RunConfig) -> list[str]:
    """Return what is wrong with a configuration whose fields are each valid."""
    problems = [
        f"{name}={value} is not available in hpc_tune yet; {instead}"
        for name, value, refused, instead in (
            ("tune.method", config.tune.method, {"qlora"}, "use lora, dora or full"),
            ("parallel.recompute", config.parallel.recompute, {"selective"}, "use none or full"),
            ("memory.governor", config.memory.governor, {"on"}, "use observe or off"),
            ("train.compile", config.train.compile, {True}, "use false"),
            ("train.float8", config.train.float8, {True}, "use false"),
            ("run.wandb", config.run.wandb, {True}, "use run.tensorboard"),
        )
        if (value in refused if refused is not None else value != 1)
    ]
    problems += _check_zero(config)
    stages = config.parallel.stages_per_rank
    if stages > 1 and (config.parallel.pipeline or 1) == 1:
        problems.append(
            f"parallel.stages_per_rank={stages} has no effect without parallel.pipeline > 1"
        )
    if config.parallel.reduce_dtype != "fp32" and config.tune.method != "full":
        problems.append(
            f"parallel.reduce_dtype={config.parallel.reduce_dtype} has no effect without "
            "tune.method=full: adapters' gradients are added up in fp32"
        )
    if (config.parallel.tensor or 1) > 1 and config.tune.method == "dora":
        problems.append(
            "tune.method=dora with parallel.tensor > 1: its norms span the split weights; "
            "use lora, or parallel.shard"
        )
    if config.tune.method == "full" and config.tune.dropout:
        problems.append("tune.dropout has no effect with tune.method=full; leave it out")
    if config.train.eval_every_steps and not config.data.eval_path:
        problems.append("train.eval_every_steps needs data.eval_path")
    return problems


def _check_zero(config: RunConfig) -> list[str]:
    """Return what is wrong with the DeepSpeed engine's settings."""
    parallel, stage = config.parallel, config.parallel.zero_stage
    offloads = {
        "offload_params": parallel.offload_params,
        "offload_optimizer": parallel.offload_optimizer,
    }
    on_nvme = [name for name, place in offloads.items() if place == "nvme"]
    problems = []
    if stage is None:
        if parallel.engine == "deepspeed":
            problems.append("parallel.engine=deepspeed needs parallel.zero_stage=1, 2 or 3")
        problems += [
            f"parallel.{name}={place} needs parallel.zero_stage (the DeepSpeed engine)"
            for name, place in offloads.items()
            if place == "nvme" or (place == "cpu" and name == "offload_optimizer")
        ]
    else:
        if parallel.engine == "native":
            problems.append(
                f"parallel.zero_stage={stage} is DeepSpeed's; use parallel.engine=deepspeed, or "
                "leave zero_stage out"
            )
        problems += [
            f"parallel.{axis}={value} with parallel.zero_stage={stage}: ZeRO splits over all "
            f"ranks; leave {axis} out"
            for axis in ("replicate", "shard", "tensor", "pipeline")
            if (value := getattr(parallel, axis)) is not None
            and (axis in ("replicate", "shard") or value > 1)
        ]
        problems += [
            f"parallel.{name}={value} has no effect with parallel.zero_stage; leave it out"
            for name, default in (
                ("reshard", "auto"),
                ("blocks_per_unit", 1),
                ("reduce_dtype", "fp32"),
            )
            if (value := getattr(parallel, name)) != default
        ]
        if config.tune.method == "dora" and stage == 3:
            problems.append(
                "tune.method=dora with parallel.zero_stage=3: DoRA needs whole base weights for "
                "their norms; use zero_stage 1 or 2"
            )
        if parallel.offload_params != "none" and stage < 3:
            problems.append(
                f"parallel.offload_params={parallel.offload_params} needs parallel.zero_stage=3: "
                f"stage {stage} keeps all weights on each device"
            )
        if parallel.offload_optimizer == "nvme" and stage < 3:
            problems.append("parallel.offload_optimizer=nvme needs parallel.zero_stage=3; use cpu")
    if on_nvme and stage is not None and parallel.offload_path is None:
        problems.append(
            f"parallel.{on_nvme[0]}=nvme needs parallel.offload_path, a folder on a disk of the "
            "node itself"
        )
    if parallel.offload_path is not None and not on_nvme:
        problems.append(
            "parallel.offload_path has no effect without parallel.offload_params=nvme or "
            "parallel.offload_optimizer=nvme"
        )
    return problems


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write every field of ``config`` to ``path`` as YAML that ``load_config`` reads back."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def field_names(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every field."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from field_names(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def describe_fields() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted name, type, default, prose) of every field, for the help text."""
    for part_name, part in RunConfig.model_fields.items():
        part_type = part.annotation
        assert isinstance(part_type, type)
        assert issubclass(part_type, BaseModel)
        for name, field in part_type.model_fields.items():
            yield (
                f"{part_name}.{name}",
                _type_name(field.annotation),
                field.default,
                field.description or "",
            )


def _read_yaml(path: str | None) -> DictConfig:
    if path is None:
        text = files("hpc_tune.config").joinpath("default.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            near = difflib.get_close_matches(Path(path).name, _names_beside(path), n=3)
            hint = f"; near it there is {', '.join(near)}" if near else ""
            raise ConfigError(f"--config {path}: no such file{hint}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    try:
        content = yaml.safe_load(text)
        if content is not None and not isinstance(content, dict):
            raise ConfigError(
                f"{path}: expected 'part:' with 'key: value' below it, found a list or a single "
                "value"
            )
        return OmegaConf.create(content or {})
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _names_beside(path: str) -> list[str]:
    folder = Path(path).parent
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []


def _apply_override(tree: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not key=value, such as train.max_steps=100")
    try:
        OmegaConf.update(tree, key, yaml.safe_load(text) if text else None, force_add=True)
    except (YAMLError, OmegaConfBaseException, AssertionError) as error:
        raise ConfigError(f"{override!r} cannot be applied: {_first_line(error)}") from None


def _explain(error: Any, source: str) -> str:
    """Turn one pydantic error into: where, found, expected, what to do."""
    # pydantic appends the branch of a union to the location; the user knows only the field.
    known = list(field_names())
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        moved = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
        near = moved or difflib.get_close_matches(
            name, [*known, *RunConfig.model_fields], n=3, cutoff=0.7
        )
        hint = (
            f"; did you mean {' or '.join(near)}?"
            if near
            else "; python -m hpc_tune --help lists all keys"
        )
        return f"{name}: no such key in {source} or its overrides{hint}"
    field = next((k for k in known if name == k or name.startswith(k + ".")), name)
    return f"{field}={error['input']!r}: {error['msg']}"


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in args if a is not types.NoneType)
    return getattr(annotation, "__name__", str(annotation)) if not args else str(annotation)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _list(problems: list[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in unique)
