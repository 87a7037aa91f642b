"""Find the files of a source, and those beside them that are left out.

    path, glob or a list of them -> files of known kinds, and (file, why) for what is not read

A folder is searched with its subfolders. It may be as ``hf download`` leaves it (a card and a
license beside the data, splits named by the card or by file names) or as ``save_to_disk`` of
datasets does. Nothing is left out silently: callers log ``FoundFiles.skipped_files``.
"""

import difflib
import glob
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.data.dataset_card import choose_train_files, glob_files
from hpc_tune.errors import DataError
from hpc_tune.files import explain_pointer_file
from hpc_tune.hub_cache import (
    CACHE_FOLDER_PREFIXES,
    canonical_path,
    choose_snapshot,
    is_repo_cache,
    missing_snapshot_hint,
    refuse_several_revisions,
)
from hpc_tune.units import list_some

FileKind = Literal["jsonl", "array", "parquet", "arrow", "csv", "text", "pydocs", "megatron"]
Paths = str | list[str]
KIND_BY_SUFFIX: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # Parquet and Arrow compress by themselves
KNOWN_KINDS_TEXT = (
    f"{', '.join(KIND_BY_SUFFIX)} (JSON, CSV and text also as {' and '.join(COMPRESSIONS)}), or a "
    ".bin of Megatron with its .idx"
)
_MEGATRON_SUFFIX, _MEGATRON_INDEX_SUFFIX = ".bin", ".idx"
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
_SPLIT_NAME = re.compile(
    r"(?:^|[-_.=])(train|test|validation|valid|val|dev|eval|held[-_]?out|hold[-_]?out)(?:[-_.]|$)",
    re.I,
)
# How the hub names a file: the split, and which of how many.
_HUB_FILE_NAME = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}")
# One part of several: train-00000-of-00003.parquet, c4-train.00000-of-01024.json.gz.
_SHARD_NAME = re.compile(r"(?P<of>.*?[-_.])(?P<number>\d+)-of-(?P<total>\d+)(?=[-_.])")
_HUB_DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|citation|contributing|code_of_conduct|"
    r"dataset_?card)([-_.]|$)",
    re.I,
)
# Cached results of Hugging Face datasets' map and filter, written beside the data.
_CACHE_FILE_NAME = re.compile(r"cache-[0-9a-f]+(_\d+_of_\d+)?\.arrow")
_METADATA_FILES = ("dataset_info.json", "dataset_infos.json", SPLITS_FILE, STATE_FILE)
_HELD_OUT_REASON = "its name is that of a split to hold out; name it in data.eval_path"
_MAX_LISTED_NAMES = 5


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source in order, and (file, why) for those that are not read."""

    files: tuple[Path, ...]
    skipped_files: tuple[tuple[Path, str], ...] = ()


def as_list(paths: Paths) -> list[str]:
    """Return the paths that data.path names."""
    return [paths] if isinstance(paths, str) else list(paths)


def join_paths(paths: Paths) -> str:
    """Return the paths that data.path names as one text."""
    return ", ".join(as_list(paths))


def find_kind(file: Path) -> FileKind | None:
    """Return the kind of data in a file, by its name; None if it is unknown.

    A .bin is Megatron's if its .idx is beside it.
    """
    if file.suffix == _MEGATRON_SUFFIX:
        return "megatron" if _find_megatron_data(file) else None
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        kind = KIND_BY_SUFFIX.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if kind in ("parquet", "arrow") else kind
    return KIND_BY_SUFFIX.get(suffixes[-1]) if suffixes else None


def megatron_index_path(data: Path) -> Path:
    """Return the index that belongs to a .bin of Megatron."""
    return data.with_name(data.name.removesuffix(_MEGATRON_SUFFIX) + _MEGATRON_INDEX_SUFFIX)


def find_files(paths: Paths) -> FoundFiles:
    """Return the files of a source, which is a file, a folder, a glob or a list of these.

    Raises:
        DataError: if there are none, a named file is of no known kind, one is named twice or only
            a pointer (git-lfs), or a folder mixes kinds, lacks parts or holds several datasets.
    """
    if not as_list(paths):
        raise DataError("data.path is an empty list; name at least one file or folder")
    sources = [_find_source_files(path) for path in as_list(paths)]
    files = [file for source in sources for file in source.files]
    refuse_several_revisions(files)
    seen: set[Path] = set()
    for file in files:
        if problem := explain_pointer_file(file):
            raise DataError(problem)
        if (identity := canonical_path(file)) in seen:
            raise DataError(
                f"{join_paths(paths)} names {file} twice; to learn from it more often, raise "
                "train.epochs or copy it"
            )
        seen.add(identity)
    skipped_files = [skipped_file for source in sources for skipped_file in source.skipped_files]
    empty = [file for file in files if len(files) > 1 and file.stat().st_size == 0]
    kept_files = tuple(file for file in files if file not in empty)
    return FoundFiles(kept_files, (*skipped_files, *((file, "empty") for file in empty)))


def describe_read_files(found: FoundFiles) -> str:
    """Return which files are read."""
    return f"reads {len(found.files):,} files: {_join_names(found.files)}"


def describe_skipped_files(found: FoundFiles) -> Iterator[str]:
    """Yield a line for each reason why files are not read."""
    for reason in sorted({reason for _, reason in found.skipped_files}):
        files = sorted((f for f, r in found.skipped_files if r == reason), key=str)
        yield f"left out {_join_names(files)}: {reason}"


def _join_names(files: Sequence[Path]) -> str:
    return list_some(files, _MAX_LISTED_NAMES)


def _find_source_files(name: str) -> FoundFiles:
    bin_file = _find_megatron_data(Path(name))
    if bin_file and not bin_file.exists():
        raise DataError(
            f"there is an index {megatron_index_path(bin_file)}, but not its data, {bin_file}"
        )
    path = bin_file or Path(name)
    if not path.exists() and glob.has_magic(name):
        return _find_by_glob(name, [Path(match) for match in glob_files(name)])
    if problem := explain_pointer_file(path):
        raise DataError(problem)
    if not path.exists():
        raise DataError(
            f"there is no data at {name}{_advise_on_missing_path(name) or _suggest_paths(path)}"
        )
    if path.is_file():
        if find_kind(path) is None:
            raise DataError(
                f"{path}: files of type {''.join(path.suffixes[-2:]) or '(none)'} are not known; "
                f"expected raw data as {KNOWN_KINDS_TEXT}, or one prepared .h5 file alone"
            )
        return FoundFiles((path,))
    return _find_in_folder(path)


def _find_megatron_data(path: Path) -> Path | None:
    """Return the .bin that a path means: itself, that of an .idx, or PATH.bin if PATH is missing.

    None if that has no index: other programs have files that end in .bin, too.
    """
    if path.suffix in (_MEGATRON_SUFFIX, _MEGATRON_INDEX_SUFFIX):
        data = path.with_suffix(_MEGATRON_SUFFIX)
    elif path.exists():
        return None
    else:
        data = Path(f"{path}{_MEGATRON_SUFFIX}")
    return data if megatron_index_path(data).is_file() else None


def _find_by_glob(name: str, matches: Sequence[Path]) -> FoundFiles:
    """Return the files that a pattern matches, without those that are not data."""
    folders = [_find_in_folder(path) for path in matches if path.is_dir()]
    files, skipped_files = _split_by_known_kind(path for path in matches if path.is_file())
    fixed_parts = itertools.takewhile(lambda part: not glob.has_magic(part), Path(name).parts)
    held_out = _find_held_out_files(files, Path(*fixed_parts))
    kept_files = [file for file in files if file not in held_out]
    kept_files += [file for folder in folders for file in folder.files]
    if not kept_files:
        raise DataError(f"no file of a known kind matches {name}; expected {KNOWN_KINDS_TEXT}")
    return FoundFiles(
        tuple(kept_files),
        (
            *skipped_files,
            *((file, _HELD_OUT_REASON) for file in held_out),
            *(skipped_file for folder in folders for skipped_file in folder.skipped_files),
        ),
    )


def _find_in_folder(folder: Path) -> FoundFiles:
    if (snapshots := choose_snapshot(folder)) is not None:
        snapshot, rest = snapshots
        result = _find_in_folder(snapshot)
        reason = f"another revision of the dataset; the one that is read is {snapshot.name}"
        return FoundFiles(result.files, (*result.skipped_files, *((path, reason) for path in rest)))
    if (folder / SPLITS_FILE).is_file() or (folder / STATE_FILE).is_file():
        return _find_saved_dataset(folder)
    files, non_data = _split_by_known_kind(_list_files(folder, set()))
    if not files:
        note = f"; it has {', '.join(str(file) for file, _ in non_data[:3])}" if non_data else ""
        raise DataError(f"{folder} is a folder without any {KNOWN_KINDS_TEXT} file{note}")
    card_choice = choose_train_files(folder, lambda paths: _find_held_out_files(paths, folder))
    if card_choice is not None and set(card_choice[0]) <= set(files):
        kept_files, skip_reasons = card_choice
        note = "not named by the dataset's card"
        unread_files = [(f, skip_reasons.get(f, note)) for f in files if f not in kept_files]
    else:
        held_out = _find_held_out_files(files, folder)
        kept_files = [file for file in files if file not in held_out]
        _require_one_configuration(folder, kept_files)
        unread_files = [(file, _HELD_OUT_REASON) for file in held_out]
    _require_all_shards(folder, kept_files)
    _refuse_copies(folder, kept_files)
    kinds = {str(find_kind(file)): file for file in kept_files}
    if len(kinds) > 1:
        summary = " and ".join(f"{file.name} ({kind})" for kind, file in sorted(kinds.items()))
        suffix = kept_files[0].suffix
        raise DataError(
            f"{folder} mixes kinds of data: {summary}; keep one kind in a folder, or say which is "
            f"meant, as in data.path='{folder}/**/*{suffix}'"
        )
    return FoundFiles(tuple(kept_files), (*non_data, *unread_files))


def _list_files(folder: Path, seen: set[Path]) -> list[Path]:
    """Return all files below a folder that are not hidden, sorted; links are followed once."""
    seen.add(folder.resolve())
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        entries += [folder / ".hoodie"] if (folder / ".hoodie").is_dir() else []
        subfolders = [entry for entry in entries if entry.is_dir() and entry.resolve() not in seen]
        files = [entry for entry in entries if entry.is_file()]
        broken_links = [e for e in entries if e.is_symlink() and not e.exists() and find_kind(e)]
    except OSError as error:
        is_special = folder.exists() and not folder.is_dir()
        advice = "; it is no regular file: write the data into one" if is_special else ""
        raise DataError(f"{folder} cannot be read as a folder: {error.strerror}{advice}") from None
    for entry in broken_links:
        message = f"{entry} is a link to {entry.readlink()}, where there is no file; copy it again"
        raise DataError(explain_pointer_file(entry) or message)
    for entry in subfolders:
        if is_repo_cache(entry):
            raise DataError(
                _advise_on_cache(folder, [path for path in subfolders if is_repo_cache(path)])
            )
        if table := _versioned_table_kind(folder, entry):
            raise DataError(
                f"{folder} is {table} table, whose files may still hold deleted rows; write "
                "its current rows as Parquet into another folder"
            )
        if entry.name.startswith("_"):
            continue
        if (entry / STATE_FILE).is_file() or (entry / SPLITS_FILE).is_file():
            raise DataError(
                f"{folder} contains {entry.name}, a dataset saved by save_to_disk; name that "
                f"folder: data.path={entry}"
            )
        files += _list_files(entry, seen)
    return sorted(files)


def _advise_on_cache(folder: Path, cache_folders: Sequence[Path]) -> str:
    """Return what to do about a folder that contains folders of the hub's cache."""
    repos = [p for p in cache_folders if not p.name.startswith(CACHE_FOLDER_PREFIXES["model"])]
    if not repos:
        return (
            f"{folder} contains {cache_folders[0].name}, a model in the hub's cache, which is not "
            "data; name the dataset (datasets--OWNER--NAME) or its files in data.path"
        )
    names = " or ".join(f"data.path={p}" for p in sorted(repos)[:_MAX_LISTED_NAMES])
    return (
        f"{folder} contains {repos[0].name}, a folder of the hub's cache; name that folder itself: "
        + names
    )


def _versioned_table_kind(folder: Path, subfolder: Path) -> str | None:
    """Return the kind of table whose history is in ``subfolder``; None if it holds none."""
    if (
        subfolder.name == "metadata"
        and (folder / "data").is_dir()
        and any(subfolder.glob("*.metadata.json"))
    ):
        return "an Iceberg"
    return {"_delta_log": "a Delta", ".hoodie": "a Hudi"}.get(subfolder.name)


def _split_by_known_kind(files: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Separate files into data files and (file, why) for the others."""
    data_files: list[Path] = []
    other_files: list[tuple[Path, str]] = []
    for file in files:
        if file.suffix == _MEGATRON_INDEX_SUFFIX and file.with_suffix(_MEGATRON_SUFFIX).is_file():
            continue  # it belongs to a .bin
        kind = find_kind(file)
        is_documentation = kind in ("text", None) and _DOCUMENTATION.match(file.name)
        if is_documentation or file.name in _METADATA_FILES:
            other_files.append((file, "it describes the data"))
        elif kind is None:
            other_files.append((file, "its kind of data is not known"))
        elif file.name.startswith(("_", ".")):
            other_files.append((file, "its name begins with _, as those of bookkeeping files do"))
        elif _CACHE_FILE_NAME.fullmatch(file.name):
            other_files.append(
                (file, "cached by datasets: the result of a map or filter; name it to read it")
            )
        else:
            data_files.append(file)
    return data_files, other_files


def _find_held_out_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """Return held-out files such as test-00000-of-00001.parquet, if others are beside them."""
    splits = {file: m["split"] for file in files if (m := _HUB_FILE_NAME.match(file.name))}
    if "train" in splits.values():
        held_out = [file for file in files if splits.get(file, "train") != "train"]
        held_out += [file for file in files if file not in splits and _is_held_out(file, folder)]
    else:
        held_out = [file for file in files if _is_held_out(file, folder)]
    return held_out if len(held_out) < len(files) else []


def _is_held_out(file: Path, folder: Path) -> bool:
    """Return whether a file's name, or else a folder's above it, names a split to hold out."""
    for part in (file.name, *file.relative_to(folder).parent.parts[::-1]):
        if match := _SPLIT_NAME.search(part):
            return match[1].lower() != "train"
    return False


def _require_one_configuration(folder: Path, files: Sequence[Path]) -> None:
    """Check that files belong together; the hub puts each configuration into a folder.

    Raises:
        DataError: if there are several configurations, or splits, to choose from.
    """
    splits = {(file.parent, m["split"]) for file in files if (m := _HUB_FILE_NAME.match(file.name))}
    if len(splits) > 1:
        choices = sorted(f"{parent}/{split}-*" for parent, split in splits)
        raise DataError(
            f"{folder} holds several configurations or splits of a dataset; name one, or more "
            f"of them in a list: data.path={' or '.join(choices[:_MAX_LISTED_NAMES])}"
        )


def _require_all_shards(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder that lacks parts of a numbered set of files, or has two such sets.

    Raises:
        DataError: naming what is missing, or both sets.
    """
    sets: dict[tuple[Path, str], dict[str, dict[int, Path]]] = {}
    for file in files:
        if m := _SHARD_NAME.match(file.name):
            parts = sets.setdefault((file.parent, m["of"]), {}).setdefault(m["total"], {})
            parts[int(m["number"])] = file
    for parts_by_total in sets.values():
        (total, parts), *other_sets = parts_by_total.items()
        file = next(iter(parts.values()))
        if other_sets:
            other = next(iter(other_sets[0][1].values()))
            raise DataError(
                f"{folder} has {file.name} and {other.name}: parts of two sets, which may hold the "
                "same rows; remove the older set, or name the files that are meant"
            )
        counts_from_0 = 0 in parts or (int(total) not in parts and total.startswith("0"))
        numbers = range(int(not counts_from_0), int(total) + int(not counts_from_0))
        missing = next((number for number in numbers if number not in parts), None)
        if missing is not None:
            number = str(missing).zfill(len(total) if total.startswith("0") else 1)
            raise DataError(
                f"{folder} lacks {int(total) - len(parts):,} of the {int(total):,} parts that "
                f"{file.name} is one of, such as {number}-of-{total}; copy them, or, to train on "
                f"the others alone, name these: data.path='{file.parent}/*{file.suffix}'"
            )


def _refuse_copies(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder with two files of one name and kind: compressed or not, an array or lines.

    Raises:
        DataError: naming both.
    """
    first_files: dict[tuple[Path, FileKind | None, str], Path] = {}
    for file in files:
        is_compressed = file.suffix.lower() in COMPRESSIONS
        stem = file.with_suffix("").stem if is_compressed else file.stem
        other = first_files.setdefault((file.parent, find_kind(file), stem), file)
        if other != file:
            raise DataError(
                f"{folder} has {other.name} and {file.name}, which may hold the same rows; remove "
                "one, or name the files that are meant"
            )


def _find_saved_dataset(path: Path) -> FoundFiles:
    """Return the files of a folder that Hugging Face datasets' ``save_to_disk`` wrote."""
    index = SPLITS_FILE if (path / SPLITS_FILE).is_file() else STATE_FILE
    try:
        content = json.loads((path / index).read_text(encoding="utf-8"))
        if index == SPLITS_FILE:
            splits = content["splits"]
            if "train" not in splits:
                raise DataError(
                    f"{path} holds the splits {', '.join(splits)} of a saved dataset and none of "
                    f"them is called train; name one, such as {path / splits[0]}"
                )
            held_out = [path / Path(split).name for split in splits if split != "train"]
            files = _find_saved_dataset(path / "train").files
            return FoundFiles(files, tuple((folder, _HELD_OUT_REASON) for folder in held_out))
        if content.get("_indices_data_files") or content.get("_indices_files"):
            raise DataError(
                f"{path} was saved by an old version of datasets, as a selection of the rows in "
                "its files; load it and save it again with a current version"
            )
        # Only file names are used: nothing outside the folder is read.
        files = tuple(path / Path(entry["filename"]).name for entry in content["_data_files"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if problem := explain_pointer_file(path / index):
            raise DataError(problem) from None
        raise DataError(
            f"{path} looks like a dataset saved by save_to_disk, but its {index} cannot be read "
            f"({error!r}); save it again"
        ) from None
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}, listed in its {STATE_FILE}; copy the whole folder"
        )
    return FoundFiles(files)


def _advise_on_missing_path(name: str) -> str:
    """Return advice for a name that is no file but an address, or a list without brackets."""
    path = Path(name)
    is_hub = _HUB_DATASET.fullmatch(name) and not path.parent.is_dir() and find_kind(path) is None
    if is_hub or "://" in name:
        return (
            f"{missing_snapshot_hint(name, 'dataset')}; a run downloads nothing, because compute "
            "nodes have no internet. Fetch data on the login node (from the Hugging Face hub: hf "
            "download --repo-type dataset NAME --local-dir DIR) and name its file or folder"
        )
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and all(Path(part).exists() for part in parts):
        return f"; give several as a list: data.path='[{', '.join(parts)}]'"
    return ""


def _suggest_paths(path: Path) -> str:
    if path.is_symlink():
        return f"; it is a link to {path.readlink()}, which leads to no file"
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = [entry.name for entry in path.parent.iterdir()]
    matches = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return (
        f"; did you mean {' or '.join(str(path.parent / n) for n in matches)}?" if matches else ""
    )
