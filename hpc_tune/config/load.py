"""Load YAML files and ``key=value`` overrides into one frozen ``RunConfig``, or raise one error
that lists every problem.

defaults <- file.yaml ... <- key=value ... -> interpolate ${oc.env:SCRATCH} -> validate -> check ->
RunConfig
"""

import contextlib
import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from hpc_tune.config.constraints import check_config
from hpc_tune.config.data import HeldOutSource, TrainingSource
from hpc_tune.config.optim import auto_lr
from hpc_tune.config.schema import RunConfig
from hpc_tune.config.section import PathKind, SettingMetadata, field_metadata, flatten_settings
from hpc_tune.errors import ConfigError, first_line, require_utf8
from hpc_tune.files import write_file
from hpc_tune.hub_cache import HubKind, find_cached_snapshot, find_snapshot, is_repo_cache
from hpc_tune.log import log
from hpc_tune.safe_yaml import load_yaml

# -- Paths in a configuration: expand ~ and $VARIABLES, and look up names in the hub's cache.


_PATH_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def _expand_paths_in_place(values: dict[Any, Any]) -> Iterator[str]:
    """Expand paths in place; yield a problem for each variable or revision that does not exist."""
    for name, metadata in setting_metadata().items():
        part, _, key = name.partition(".")
        if metadata.path and isinstance(fields := values.get(part), dict):
            yield from _expand_field_in_place(name, fields, key, metadata.path)
    given_data = values.get("data")
    data = given_data if isinstance(given_data, dict) else {}
    for field in ("sources", "eval_sources"):
        sources = data.get(field)
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            for key in ("path", "chat_template") if isinstance(source, dict) else ():
                kind: PathKind = "dataset" if key == "path" else "file"
                yield from _expand_field_in_place(f"data.{field}.{index}.{key}", source, key, kind)


def _expand_field_in_place(
    name: str, fields: dict[Any, Any], key: str, kind: PathKind
) -> Iterator[str]:
    """Expand ~, $VARIABLES and hub names in ``fields[key]``; ``name``: the setting's."""
    value = fields.get(key)
    paths = value if isinstance(value, list) else [value]
    for index, path in enumerate(paths):
        if not isinstance(path, str):
            continue
        if (encoding := sys.getfilesystemencoding()) == "ascii" and not path.isascii():
            yield (
                f"{name}={path!a}: file names are {encoding} in this shell, and this one is "
                "not; export LC_ALL=C.UTF-8 (and unset PYTHONUTF8), or rename it"
            )
            continue
        expanded = os.path.expandvars(os.path.expanduser(path))
        try:
            expanded = expanded if kind == "file" else resolve_hub_path(name, expanded, kind)
        except ConfigError as error:
            yield str(error)
        if name == "model.path" and os.path.isdir(expanded):
            expanded = os.path.abspath(expanded)  # an export may start in another directory
        paths[index] = expanded
        for variable in _PATH_VARIABLE.findall(expanded):
            yield (
                f"{name}={path}: {variable.strip('${}')} is not set in the environment; set it, or "
                "write out the path"
            )
    if isinstance(value, str):
        fields[key] = paths[0]


def resolve_hub_path(name: str, path: str, kind: HubKind) -> str:
    """Return the folder in the hub's cache that a path stands for, and log it; else the path.

    Such a path is OWNER/NAME or OWNER/NAME@REVISION, if no file has that name, or a model's folder
    in the cache; without REVISION refs/main, or else the only one, is used. ``name`` is the name of
    the setting.

    Raises:
        ConfigError: if OWNER/NAME is in the cache, but not REVISION, or it is not clear which.
    """
    folder = Path(path)
    try:
        if kind == "model" and is_repo_cache(folder) and not (folder / "config.json").exists():
            snapshot = find_snapshot(folder)
        else:
            snapshot = None if folder.exists() else find_cached_snapshot(path, kind)
    except OSError:  # a name that is too long for a file, or a folder that may not be read
        return path
    except ValueError as error:
        raise ConfigError(f"{name}={path}: {error}") from None
    if snapshot is None:
        return path
    other_revisions = ", ".join(path.name for path in snapshot.other_paths[:5])
    other_revisions = f"; also there: {other_revisions}" if other_revisions else ""
    log.info(
        "%s=%s: revision %s (%s) of the hub's cache, %s%s",
        *(name, path, snapshot.path.name, snapshot.reason, snapshot.path, other_revisions),
    )
    return str(snapshot.path)


# -- Secrets must not be in files or lines that others read: recognize them, and mask them.
#
# Recognized are user:password in a URL, the value of an environment variable with a telling name
# (HF_TOKEN, WANDB_API_KEY), NAME=value with such a name in a command, and tokens by their prefix.


SECRET_MASK = "***"
_SECRET_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS"
_SECRET_NAME = re.compile(rf"(?:\w+_)?(?:{_SECRET_WORDS})")
_MIN_SECRET_CHARS = 8  # a shorter value may be part of any text
_SECRET_PATTERN = re.compile(
    r"(?P<before>\w://)[^\s/@:]*:[^\s/@]+(?=@)"
    rf"|(?P<name>\b[A-Z0-9_]*(?:{_SECRET_WORDS})=)\S+"
    r"|(?P<query>[?&][\w-]*(?:token|key|secret|password|signature)=)[^\s&]+"
    r"|\b(?:hf_|gh[opsu]_|sk-)[A-Za-z0-9]{20,}"
)


def mask_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return ``text`` with each secret replaced by ***."""
    for name, value in environ.items():
        if len(value) >= _MIN_SECRET_CHARS and _SECRET_NAME.fullmatch(name):
            text = text.replace(value, SECRET_MASK)
    return _SECRET_PATTERN.sub(
        lambda match: next((prefix for prefix in match.groups() if prefix), "") + SECRET_MASK, text
    )


def _check_no_secrets(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each setting that contains a secret; the text masks the secret."""
    for name, value in settings.items():
        text = str(value)
        if isinstance(value, str | list) and (masked_text := mask_secrets(text)) != text:
            yield (
                f"{name}={masked_text}: it contains a secret, and settings are written into files "
                "and reports; leave it in the environment, which each rank inherits"
            )


# -- Merge files and overrides into one configuration.


_ADVICE_BY_KEY = {
    "run.wandb": "; use run.trackers=[wandb]",
    "config": "; pass a settings file by --config FILE",
}
_LAYOUT_ADVICE = (
    ", or auto; DDP is parallel.replicate, FSDP parallel.shard, ZeRO parallel.zero_stage"
)
_SOURCE_FIELDS = [
    *(f"data.sources.{name}" for name in TrainingSource.model_fields),
    *(f"data.eval_sources.{name}" for name in HeldOutSource.model_fields),
]
_VARIABLE = re.compile(r"\$(?:\{(?:oc\.env:)?(\w+)[,}]|(\w+))")
_SOURCE_KEY_PATTERN = re.compile(r"(data\.(?:eval_)?sources\.)(\d+\.)(\w+)")


def load_config(paths: str | Sequence[str] | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load ``paths`` (later files override earlier ones), then apply ``key=value`` overrides.

    Without a file, default.yaml is the base if ``uses_builtin_model_and_data(overrides)``.

    Raises:
        ConfigError: one message that lists all problems found.
    """
    try:
        return _load_and_check(paths, overrides)
    except RecursionError:
        raise ConfigError(
            "the settings are nested too deeply, or refer to each other in a circle; write a "
            "setting as `section: {key: value}` or as section.key=value"
        ) from None


def _load_and_check(paths: str | Sequence[str] | None, overrides: Sequence[str]) -> RunConfig:
    config_files = [paths] if isinstance(paths, str) else list(paths or ())
    source = ", ".join(config_files) or "the defaults"
    tree = (
        OmegaConf.create({})
        if config_files or not uses_builtin_model_and_data(overrides)
        else _load_default_yaml(overrides)
    )
    for file in config_files:
        tree.merge_with(_read_yaml(file))
    problems = []
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            problems.append(str(error))
    try:
        values = _as_dict(_merge_with_defaults(tree), resolve=True)
    except OmegaConfBaseException as error:
        problems.append(f"{source}: {_explain_interpolation_error(error)}")
        raise ConfigError(_join_problems(problems)) from None
    problems += _expand_paths_in_place(values)
    if unwritable := list(_check_encodable_text(values)):
        raise ConfigError(_join_problems([*problems, *unwritable]))
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            _join_problems([*problems, *explain_errors(error.errors(), source)])
        ) from None
    secrets = _check_no_secrets(flatten_settings(config.model_dump()))
    if problems := [*problems, *check_config(config), *secrets]:
        raise ConfigError(_join_problems(problems))
    if config.optim.lr == "auto":
        return config.with_changes({"optim.lr": auto_lr(config.tune)})
    return config


def find_variables(paths: Sequence[str], overrides: Sequence[str] = ()) -> list[str]:
    """Return the environment variables that settings refer to, such as SCRATCH in $SCRATCH/a.

    The arguments are as in ``load_config``, but ``paths`` must be a list.
    """
    tree = OmegaConf.create({})
    for file in paths:
        tree.merge_with(_read_yaml(file))
    for override in overrides:
        _apply_override(tree, override)
    text = yaml.safe_dump(_as_dict(tree), allow_unicode=True, width=10**9)
    return sorted({name for pair in _VARIABLE.findall(text) for name in pair if name})


def _explain_interpolation_error(error: OmegaConfBaseException) -> str:
    key = error.full_key or "?"
    if missing := re.search(r"Environment variable '(.+)' not found", str(error)):
        name = missing[1]
        return (
            f"{key} needs {name}, which is not set in the environment; export it in this "
            f"shell, and in a job: export {name}=..."
        )
    return f"{first_line(error)} (key {key})"


def uses_builtin_model_and_data(overrides: Sequence[str]) -> bool:
    """Return whether the overrides leave model and data built-in, as default.yaml assumes."""
    tree = OmegaConf.create({})
    for override in overrides:
        with contextlib.suppress(ConfigError):
            _apply_override(tree, override)
    values = [_as_dict(tree).get(part) for part in ("model", "data")]
    sections = [fields for fields in values if isinstance(fields, dict)]
    if any(fields.get("sources") is not None for fields in sections):
        return False
    paths = [fields.get("path") for fields in sections]
    return all(path is None or str(path).startswith("builtin:") for path in paths)


def _as_dict(tree: DictConfig, resolve: bool = False) -> dict[Any, Any]:
    values: Any = OmegaConf.to_container(tree, resolve=resolve)
    return values


def _check_encodable_text(values: dict[Any, Any]) -> Iterator[str]:
    """Yield a problem for each text that cannot be encoded, such as a lone surrogate from YAML."""
    for part, fields in values.items():
        for name, value in fields.items() if isinstance(fields, dict) else (("", fields),):
            try:
                f"{part}{name}{json.dumps(value, ensure_ascii=False, default=str)}".encode()
            except UnicodeEncodeError:
                yield f"{f'{part}.{name}={value}'!a}: expected text that can be written as UTF-8"


def _merge_with_defaults(tree: DictConfig) -> DictConfig:
    """Return the defaults overridden by ``tree``; unknown sections are kept, to be refused."""
    merged: dict[Any, Any] = RunConfig().model_dump()  # optim.lr is auto here
    for part, fields in _as_dict(tree).items():
        is_known = isinstance(fields, dict) and part in merged
        if is_known and part == "data" and fields.get("sources") is not None:
            merged[part]["path"] = None  # drop the default; a given path is kept, to be refused
        merged[part] = merged[part] | fields if is_known else fields
    return OmegaConf.create(merged)


def write_resolved_config(config: RunConfig, path: Path) -> None:
    """Write every field of ``config`` to ``path`` as YAML that ``load_config`` reads back."""
    write_file(path, yaml.safe_dump(config.model_dump(), sort_keys=False))


def setting_names() -> list[str]:
    """Return the dotted name of every field."""
    return list(setting_metadata())


@functools.cache
def setting_metadata() -> Mapping[str, SettingMetadata]:
    """Return the facts of every field by its dotted name."""
    return {name: field_metadata(field) for name, field in _iterate_fields()}


def describe_fields() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted name, type, default, description) of every field, for the help text."""
    for name, field in _iterate_fields():
        yield name, _type_name(field.annotation), field.default, field.description or ""


def explain_errors(errors: Sequence[Any], source: str) -> list[str]:
    """Turn pydantic's errors into one line per field: field, value and what is expected.

    pydantic reports an error for each branch of a union and appends the branch to the location;
    users only know the field. ``source``: the files that the settings are from, in words.
    """
    known_names, unknowns = [*setting_names(), *_SOURCE_FIELDS], []
    messages: dict[str, list[str]] = {}
    for error in errors:
        name = ".".join(str(part) for part in error["loc"])
        # data.sources.0.path.str: the branch is cut off
        match = _SOURCE_KEY_PATTERN.match(name)
        if error["type"] == "extra_forbidden":
            for key in _names_in_section(name, error["input"]):
                lookup = (match[1] + match[3], _SOURCE_FIELDS) if match else (key, known_names)
                hint = (
                    _ADVICE_BY_KEY.get(key) or _suggest_similar_name(*lookup)
                ) + _scheduler_option_hint(key)
                unknowns.append(f"{key}: no such key in {source} or its overrides{hint}")
            continue
        field = next((k for k in known_names if name == k or name.startswith(k + ".")), name)
        field = match[0] if match else field
        message = error["msg"].removeprefix("Value error, ")
        if error["type"] == "model_type":
            example = next(
                (name for name in known_names if name.startswith(f"{field}.")), f"{field}.name"
            )
            message = f"Input should be a valid dictionary of settings, such as {example}=..."
            message += _LAYOUT_ADVICE if field == "parallel" else ""
        if error["type"] == "list_type" and isinstance(error["input"], str):
            message += f", such as [{', '.join(map(str.strip, error['input'].split(',')))}]"
        messages.setdefault(f"{field}={error['input']!r}", []).append(message)
    return [*unknowns, *(f"{value}: {'; or: '.join(texts)}" for value, texts in messages.items())]


def _scheduler_option_hint(name: str) -> str:
    """Return a hint on how to pass an unknown option of a section on to its scheduler."""
    if name.startswith("pbs."):
        return "; pass other qsub options by pbs.options=['-X VALUE'], with the letter"
    if name.startswith("slurm."):
        option = name.removeprefix("slurm.").replace("_", "-")
        return f"; pass other sbatch options by slurm.options=[--{option}=...]"
    return ""


def _names_in_section(name: str, value: Any) -> list[str]:
    """Return the dotted names inside an unknown section, such as lora.r inside lora."""
    if name in _ADVICE_BY_KEY or "." in name or not isinstance(value, dict) or not value:
        return [name]
    return [f"{name}.{key}" for key in value]


def _iterate_fields() -> Iterator[tuple[str, FieldInfo]]:
    for part, section in RunConfig.model_fields.items():
        for name, field in type(section.default).model_fields.items():
            yield f"{part}.{name}", field


def _load_default_yaml(overrides: Sequence[str]) -> DictConfig:
    text = files("hpc_tune.config").joinpath("default.yaml").read_text(encoding="utf-8")
    tree = OmegaConf.create(load_yaml(text))
    for override in overrides:
        metadata = setting_metadata().get(override.partition("=")[0])
        if metadata is not None and metadata.replaces is not None:
            OmegaConf.update(tree, metadata.replaces, None)
    return tree


def _read_yaml(path: str) -> DictConfig:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        similar_names = difflib.get_close_matches(Path(path).name, _list_sibling_names(path), n=3)
        hint = f"; similar names there: {', '.join(similar_names)}" if similar_names else ""
        raise ConfigError(f"--config {path}: no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    try:
        content = _restore_text(load_yaml(text), load_yaml(text, scalars_as_text=True))
        if content is None or content == {}:
            raise ConfigError(
                f"--config {path}: it contains no setting; add some, or leave --config out to "
                "use the defaults"
            )
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}: expected 'part:' with 'key: value' below it, found a list or a single "
                "value"
            )
        tree = OmegaConf.create(content)
        if tree.get("parallel") == "auto":
            tree.parallel = {"layout": "auto"}
        return tree
    except (ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _restore_text(content: Any, texts: Any) -> Any:
    """Return the values that YAML parsed, but keep text fields as they were written.

    ``texts`` is the same content with every value as text. YAML 1.1 reads 12:00:00 as 43200,
    2026-11-25 as a date, 0123 as 83 and on as true.
    """
    for part, fields in content.items() if isinstance(content, dict) else ():
        for name in fields if isinstance(fields, dict) else ():
            if f"{part}.{name}" in text_setting_names():
                fields[name] = texts[part][name]
    return content


@functools.cache
def text_setting_names() -> frozenset[str]:
    """Return the names of the fields that take free text, or a list or mapping with texts."""
    return frozenset(
        name
        for name, field in _iterate_fields()
        if {str, list[str]} & {field.annotation, *typing.get_args(field.annotation)}
    )


def _list_sibling_names(path: str) -> list[str]:
    try:
        return os.listdir(Path(path).parent)
    except OSError:  # there is no such folder, or this user may not list it
        return []


def _apply_override(tree: DictConfig, override: str) -> None:
    require_utf8(override)
    key, equals, text = override.partition("=")
    if not equals or not key:
        hint = config_flag_hint(override) or ", such as train.max_steps=100"
        raise ConfigError(f"{override!r} is not key=value{hint}")
    if (key, text) == ("parallel", "auto"):
        key = "parallel.layout"
    try:
        value, value_as_text = load_yaml(text), load_yaml(text, scalars_as_text=True)
        value = (
            value_as_text
            if key in text_setting_names()
            else _restore_text({key: value}, {key: value_as_text})[key]
        )
        OmegaConf.update(tree, key, value, force_add=True)
    except (ValueError, OmegaConfBaseException, AssertionError) as error:
        is_cut_off = text[:1] in ("[", "{") and text[-1:] not in ("]", "}")
        hint = "; quote a setting that contains a space: 'run.tags=[a, b]'" if is_cut_off else ""
        raise ConfigError(f"{override!r} cannot be applied: {first_line(error)}{hint}") from None


def config_flag_hint(argument: str) -> str:
    """Return a hint for a word that looks like a settings file without its --config, or ""."""
    is_file = argument.endswith((".yaml", ".yml")) and not argument.startswith("-")
    return f"; pass a settings file by --config {argument}" if is_file else ""


def _suggest_similar_name(name: str, known_names: Sequence[str]) -> str:
    last = name.rpartition(".")[2]
    by_last_part = [k for k in known_names if k.rpartition(".")[2] == last]
    by_alias = [k for k, metadata in setting_metadata().items() if last in metadata.aliases.split()]
    similar_names = (
        by_last_part
        or by_alias
        or difflib.get_close_matches(name, [*known_names, *RunConfig.model_fields], n=3, cutoff=0.7)
    )
    if similar_names:
        return f"; did you mean {' or '.join(similar_names)}?"
    return "; python -m hpc_tune --help lists all keys"


def _type_name(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is list:
        return f"list[{_type_name(args[0])}]"
    if origin is typing.Literal:
        return " | ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in args if a is not types.NoneType)
    text = str(annotation).replace("typing.", "")
    return getattr(annotation, "__name__", text) if not args else text


def _join_problems(problems: list[str]) -> str:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return unique[0]
    return f"{len(unique)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in unique)
