"""YAML files + ``key=value`` overrides -> one frozen ``RunConfig``, or one error that lists every
problem.

defaults <- file.yaml ... <- key=value ... -> interpolate ${oc.env:SCRATCH} -> validate -> check ->
RunConfig
"""

import contextlib
import difflib
import functools
import json
import os
import re
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

from hpc_tune.atomic_file import write_file
from hpc_tune.config.constraints import check
from hpc_tune.config.optim import LR_OF_ADAPTERS, LR_OF_ALL_WEIGHTS
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError, first_line

# What may begin with ~ or hold $SCRATCH.
_PATHS = (
    "model.path", "tune.init_from", "data.path", "data.eval_path", "data.chat_template",
    "data.cache", "parallel.offload_path", "checkpoint.resume", "run.dir", "run.compile_cache",
)  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def load_config(paths: str | Sequence[str] | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of the files ``paths``, of which later ones win, with ``key=value``
    overrides applied; without a file of the embedded default, where ``is_tiny``.

    Raises:
        ConfigError: one message that lists all problems found.
    """
    named = [paths] if isinstance(paths, str) else list(paths or ())
    source = ", ".join(named) or "the defaults"
    tree = OmegaConf.create({}) if named or not is_tiny(overrides) else _embedded()
    for file in named:
        tree = _merged(tree, _read_yaml(file))
    problems = []
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            problems.append(str(error))
    try:
        values = OmegaConf.to_container(_over_defaults(tree), resolve=True)
    except OmegaConfBaseException as error:
        problems.append(f"{source}: {first_line(error)} (key {error.full_key or '?'})")
        raise ConfigError(_list(problems)) from None
    assert isinstance(values, dict)
    problems += _expand_paths(values)
    if unwritable := list(_unwritable(values)):
        raise ConfigError(_list([*problems, *unwritable]))
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problems += _explain(error.errors(), source)
    if config is not None:
        problems += check(config)
    if problems:
        raise ConfigError(_list(problems))
    assert config is not None
    return _with_number_for_lr(config)


def is_tiny(overrides: Sequence[str]) -> bool:
    """Tell whether model and data are the built-in ones, for which the embedded default is."""
    tree = OmegaConf.create({})
    for override in overrides:
        with contextlib.suppress(ConfigError):
            _apply_override(tree, override)
    given = [_select(tree, part, "path") for part in ("model", "data")]
    return all(path is None or str(path).startswith("builtin:") for path in given)


def _select(tree: DictConfig, part: str, name: str) -> Any:
    fields = OmegaConf.to_container(tree, resolve=False).get(part)  # type: ignore[union-attr]
    return fields.get(name) if isinstance(fields, dict) else None


def _with_number_for_lr(config: RunConfig) -> RunConfig:
    if config.optim.lr != "auto":
        return config
    lr = LR_OF_ALL_WEIGHTS if config.tune.method == "full" else LR_OF_ADAPTERS
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": lr})})


def _merged(tree: DictConfig, over: DictConfig) -> DictConfig:
    merged = OmegaConf.merge(tree, over)
    assert isinstance(merged, DictConfig)
    return merged


def _unwritable(values: dict[Any, Any]) -> Iterator[str]:
    """Yield what is wrong with text that no file can hold, such as half a character in YAML."""
    for part, fields in values.items():
        for name, value in fields.items() if isinstance(fields, dict) else (("", fields),):
            try:
                f"{part}{name}{json.dumps(value, ensure_ascii=False, default=str)}".encode()
            except UnicodeEncodeError:
                yield f"{f'{part}.{name}={value}'!a}: expected text that can be written as UTF-8"


def _expand_paths(values: dict[Any, Any]) -> Iterator[str]:
    """Put home folders and the environment into paths, in place; yield what is not set there."""
    for name in _PATHS:
        part, _, key = name.partition(".")
        fields = values.get(part)
        if not isinstance(fields, dict):
            continue
        given = fields.get(key)
        paths = given if isinstance(given, list) else [given]
        for at, path in enumerate(paths):
            if not isinstance(path, str):
                continue
            expanded = os.path.expandvars(os.path.expanduser(path))
            if name == "model.path" and os.path.isdir(expanded):
                expanded = os.path.abspath(expanded)  # an export may be made from elsewhere
            paths[at] = expanded
            for left in _VARIABLE.findall(expanded):
                yield (
                    f"{name}={path}: the environment has no {left.strip('${}')}; set it, or name "
                    "the folder"
                )
        if isinstance(given, str):
            fields[key] = paths[0]


def _over_defaults(tree: DictConfig) -> DictConfig:
    """Return the defaults with what ``tree`` says; what is no part at all stays, to be refused."""
    merged: dict[Any, Any] = RunConfig().model_dump()  # optim.lr is auto here
    given = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(given, dict)
    for part, fields in given.items():
        known = isinstance(fields, dict) and part in merged
        merged[part] = merged[part] | fields if known else fields
    return OmegaConf.create(merged)


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write every field of ``config`` to ``path`` as YAML that ``load_config`` reads back."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False)
    write_file(path, text)


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


def _embedded() -> DictConfig:
    text = files("hpc_tune.config").joinpath("default.yaml").read_text(encoding="utf-8")
    tree = OmegaConf.create(yaml.safe_load(text))
    assert isinstance(tree, DictConfig)
    return tree


def _read_yaml(path: str) -> DictConfig:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(Path(path).name, _names_beside(path), n=3)
        hint = f"; near it there is {', '.join(near)}" if near else ""
        raise ConfigError(f"--config {path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    try:
        content = _as_written(yaml.safe_load(text), yaml.load(text, _Written))
        if content is None or content == {}:
            raise ConfigError(
                f"--config {path}: there is no setting in it; fill it, or leave --config out to "
                "take the defaults"
            )
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}: expected 'part:' with 'key: value' below it, found a list or a single "
                "value"
            )
        OmegaConf.create(text)  # refuses a key that is there twice, which safe_load lets pass
        tree = OmegaConf.create(content)
        if tree.get("parallel") == "auto":
            tree.parallel = {"layout": "auto"}
        return tree
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


class _Written(yaml.SafeLoader):
    """Reads YAML, but leaves everything that has no quotes as it is written, except null."""


_Written.yaml_implicit_resolvers = {
    first: [known for known in resolvers if known[0].endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _as_written(content: Any, words: Any) -> Any:
    """Return YAML's values with fields of text as they were written.

    YAML 1.1 reads 12:00:00 as 43200, 2026-11-25 as a date, 0123 as 83 and on as true.
    """
    texts = _text_fields()
    for part, fields in content.items() if isinstance(content, dict) else ():
        for name in fields if isinstance(fields, dict) else ():
            if f"{part}.{name}" in texts:
                fields[name] = words[part][name]
    return content


@functools.cache
def _text_fields() -> frozenset[str]:
    """Return the names of the fields that take any text, or a list of it."""
    return frozenset(
        f"{part_name}.{name}"
        for part_name, part in RunConfig.model_fields.items()
        for name, field in part.annotation.model_fields.items()  # type: ignore[union-attr]
        if {str, list[str]} & {field.annotation, *typing.get_args(field.annotation)}
    )


def _names_beside(path: str) -> list[str]:
    folder = Path(path).parent
    return [p.name for p in folder.iterdir()] if folder.is_dir() else []


def _apply_override(tree: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not key=value, such as train.max_steps=100")
    if (key, text) == ("parallel", "auto"):
        key = "parallel.layout"
    try:
        value = yaml.safe_load(text) if text else None
        words = yaml.load(text, _Written) if text else None
        value = words if key in _text_fields() else _as_written({key: value}, {key: words})[key]
        OmegaConf.update(tree, key, value, force_add=True)
    except (YAMLError, OmegaConfBaseException, AssertionError) as error:
        raise ConfigError(f"{override!r} cannot be applied: {first_line(error)}") from None


def _explain(errors: Sequence[Any], source: str) -> list[str]:
    """Turn pydantic's errors into one line per field: where, found, expected, what to do.

    pydantic has an error for each branch of a union and appends the branch to the location; the
    user knows only the field.
    """
    known, unknown = list(field_names()), []
    expected: dict[str, list[str]] = {}
    for error in errors:
        name = ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            unknown.append(f"{name}: no such key in {source} or its overrides{_near(name, known)}")
            continue
        field = next((k for k in known if name == k or name.startswith(k + ".")), name)
        words = error["msg"].removeprefix("Value error, ")
        if error["type"] == "model_type":
            words = "Input should be a valid dictionary of settings, such as "
            words += f"{_first_below(field, known)}=..."
            words += ", or auto" if field == "parallel" else ""
        expected.setdefault(f"{field}={error['input']!r}", []).append(words)
    return [*unknown, *(f"{found}: {'; or: '.join(all_)}" for found, all_ in expected.items())]


def _first_below(part: str, known: Sequence[str]) -> str:
    return next((name for name in known if name.startswith(f"{part}.")), f"{part}.name")


def _near(name: str, known: Sequence[str]) -> str:
    moved = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    near = moved or difflib.get_close_matches(
        name, [*known, *RunConfig.model_fields], n=3, cutoff=0.7
    )
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; python -m hpc_tune --help lists all keys"


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in args if a is not types.NoneType)
    return getattr(annotation, "__name__", str(annotation)) if not args else str(annotation)


def _list(problems: list[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in unique)
