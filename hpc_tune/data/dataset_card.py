"""The files that a dataset card (README.md) names, read as the Hugging Face hub reads it.

    ---
    configs:
    - config_name: default
      data_files:
      - split: train
        path: data/train-*
    ---

Source of the format: huggingface.co/docs/hub/datasets-manual-configuration.
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import DataError, find_remedy
from hpc_tune.safe_yaml import load_yaml

# -- Patterns with ``**`` that search each folder once, even if links lead back to it.


_ANY_FOLDERS = "**"


def glob_files(pattern: str) -> list[str]:
    """Return what a pattern matches, sorted; links to folders are followed, each folder only once.

    Python's glob follows links that lead to each other again and again, practically without end.

    Raises:
        DataError: if a folder cannot be read: its files would otherwise be left out silently.
    """
    parts = Path(pattern).parts
    if _ANY_FOLDERS not in parts:
        for index, part in enumerate(parts):
            for base in glob.glob(str(Path(*parts[:index]))) if glob.has_magic(part) else ():
                _list_entries(base)
        return sorted(glob.glob(pattern))
    index = parts.index(_ANY_FOLDERS)
    paths = set()
    for base in glob_files(str(Path(*parts[:index]))):
        for folder in _walk_folders(Path(base), set()):
            inner = str(Path(glob.escape(str(folder)), *(parts[index + 1 :] or "*")))
            paths |= {*glob_files(inner), *(() if parts[index + 1 :] else [str(folder)])}
    return sorted(paths)


def _walk_folders(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield a folder and all folders below it that are not hidden, each of them once."""
    seen.add(os.path.realpath(folder))
    if (listing := _list_entries(folder)) is None:
        return
    entries = [entry for entry in listing if entry.is_dir()]
    yield folder
    for entry in sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name)):
        if not entry.name.startswith(".") and os.path.realpath(entry.path) not in seen:
            yield from _walk_folders(folder / entry.name, seen)


def _list_entries(folder: str | Path) -> list[os.DirEntry[str]] | None:
    """Return the entries of a folder; None if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}{find_remedy(error)}") from None


# -- Which files a card names.


CARD_FILE = "README.md"
HeldOutFileFinder = Callable[[Sequence[Path]], list[Path]]
_MAX_SHOWN_CHOICES = 5


@dataclass(frozen=True)
class DatasetConfiguration:
    """A configuration of a dataset: the files of each of its splits, in order.

    ``patterns``: the file patterns that the card gives for each split.
    """

    name: str
    is_default: bool
    splits: dict[str, list[Path]]
    patterns: dict[str, list[Any]]

    def data_path_of_split(self, folder: Path, split: str) -> str:
        """Return the data.path that reads a whole split and nothing else."""
        files, patterns = self.splits[split], self.patterns.get(split, [])
        names = [str(folder / str(pattern)) for pattern in patterns]
        matched_files = {Path(match) for name in names for match in glob_files(name)}
        if len(files) == 1 or matched_files != set(files):
            names = [str(file) for file in files]
        return names[0] if len(names) == 1 else f"'[{', '.join(names)}]'"


def choose_train_files(
    folder: Path, find_held_out: HeldOutFileFinder
) -> tuple[list[Path], dict[Path, str]] | None:
    """Return the files to train on according to the folder's card, and why each other file that
    the card names is not among them; None if there is no card, or it names no file that is here.

    ``find_held_out`` finds held-out files by their names if the card names only a folder.

    Raises:
        DataError: if there are several configurations but no single default, or several splits but
            none called train, or the card cannot be read.
    """
    configs = [c for c in _find_configurations(folder, find_held_out) if any(c.splits.values())]
    if not configs:
        return None
    default = [c for c in configs if c.is_default] or configs
    if len(default) > 1:
        raise DataError(
            f"{folder} holds several configurations, as its card says; name the files of one: "
            + _format_choices(
                [(c.name, c.data_path_of_split(folder, _choose_split(c.splits))) for c in default]
            )
        )
    (chosen_config,) = default
    splits = {name: files for name, files in chosen_config.splits.items() if files}
    name = _choose_split(splits)
    if len(splits) > 1 and name != "train":
        raise DataError(
            f"{folder} has no split called train in its card; name the files of one: "
            + _format_choices(
                [(split, chosen_config.data_path_of_split(folder, split)) for split in splits]
            )
        )
    left_out: dict[Path, str] = {}
    for config in configs:
        for split, files in config.splits.items():
            reason = f"in the dataset's card it is the split {split}; name it in data.eval_path"
            if config is not chosen_config:
                reason = f"in the dataset's card it is of another configuration, {config.name}"
            left_out |= {file: reason for file in files if file not in splits[name]}
    return splits[name], left_out


def _format_choices(choices: list[tuple[str, str]]) -> str:
    options = [f"{name} (data.path={path})" for name, path in choices[:_MAX_SHOWN_CHOICES]]
    return ", ".join(options) + (" and more" if len(choices) > _MAX_SHOWN_CHOICES else "")


def _choose_split(splits: dict[str, list[Path]]) -> str:
    """Return the split to train on: the one called train, or else the first that has files."""
    nonempty_splits = [name for name, files in splits.items() if files]
    return "train" if "train" in nonempty_splits else nonempty_splits[0]


def _find_configurations(
    folder: Path, find_held_out: HeldOutFileFinder
) -> Iterator[DatasetConfiguration]:
    configs = _read_header(folder / CARD_FILE).get("configs")
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        data_files, data_dir = config.get("data_files"), config.get("data_dir")
        if not data_files and not data_dir:
            continue
        patterns = _read_patterns(data_files) if data_files else {"train": [f"{data_dir}/**/*"]}
        splits = {
            split: sorted({file for path in paths for file in _match_files(folder, path)})
            for split, paths in patterns.items()
        }
        if not data_files:
            rest = find_held_out(splits["train"])
            splits = {"train": [f for f in splits["train"] if f not in rest], "others": rest}
        name = str(config.get("config_name") or "default")
        is_default = bool(config.get("default")) or name == "default"
        yield DatasetConfiguration(name, is_default, splits, patterns)


def _read_header(card: Path) -> dict[str, Any]:
    """Return the YAML at the beginning of a card; empty if there is none."""
    try:
        with card.open(encoding="utf-8") as lines:
            if next(lines, "").strip() != "---":
                return {}
            header = []
            for line in lines:
                if line.strip() == "---":
                    break
                header.append(line)
        content = load_yaml("".join(header))
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return {}
    except OSError as error:  # else the run could train on its test splits
        raise DataError(f"{card} cannot be read: {error.strerror}{find_remedy(error)}") from None
    return content if isinstance(content, dict) else {}


def _read_patterns(data_files: Any) -> dict[str, list[Any]]:
    """Return the patterns of each split; ``data_files`` is a path, a list, or a dict of splits."""
    if isinstance(data_files, dict):
        entries = [{"split": split, "path": path} for split, path in data_files.items()]
    else:
        entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[Any]] = {}
    for entry in entries:
        split = entry.get("split") if isinstance(entry, dict) else None
        path = entry.get("path") if isinstance(entry, dict) else entry
        paths = path if isinstance(path, list) else [path]
        split_patterns = patterns.setdefault(str(split or "train"), [])
        split_patterns.extend(path for path in paths if path is not None)
    return patterns


def _match_files(folder: Path, pattern: Any) -> Iterator[Path]:
    """Yield the files in a folder that a pattern of a card matches; none outside the folder."""
    text = str(pattern)
    if not text or Path(text).is_absolute() or ".." in Path(text).parts or "://" in text:
        return
    try:
        yield from (file for file in folder.glob(text) if file.is_file())
    except (ValueError, NotImplementedError, OSError):
        return
