"""The checkpoints of a run as they lie on the disk, compared with their manifests.

It reads JSON and bytes alone: ``checkpoint/store.py`` would import torch.
"""

import hashlib
import json
from pathlib import Path

from hpc_tune.units import format_bytes

MAX_HASHED_BYTES = 256 << 20  # hashed in a second


def list_checkpoints(
    run_dir: Path, most_bytes: int = MAX_HASHED_BYTES
) -> list[tuple[str, str, str]]:
    """Return (name, size, what was verified) of each checkpoint, the oldest first.

    Bytes are hashed while ``most_bytes`` in all are not reached; of the rest only sizes are read.
    """
    rows, left = [], most_bytes
    for folder in sorted((run_dir / "checkpoints").glob("step-*[0-9]")):
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            files = {str(name): (f["bytes"], f["sha256"]) for name, f in manifest["files"].items()}
            total = sum(num_bytes for num_bytes, _ in files.values())
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as bad:
            rows.append((folder.name, "", f"DAMAGED: manifest.json cannot be used ({bad!r})"))
            continue
        is_hashed = total <= left
        left -= total if is_hashed else 0
        damage = [
            name for name, (num, sha) in files.items()
            if not _is_intact(folder / name.lstrip("/"), num, sha if is_hashed else None)
        ]  # fmt: skip
        verified = "every byte verified" if is_hashed else "sizes verified; bytes: inspect --verify"
        if damage:
            verified = f"DAMAGED: {damage[0]} is not as it was written"
        rows.append((folder.name, format_bytes(total), verified))
    return rows


def _is_intact(file: Path, num_bytes: int, sha256: str | None) -> bool:
    try:
        # A manifest may be anyone's: no devices, nothing outside of its folder.
        if ".." in file.parts or not file.is_file() or file.stat().st_size != num_bytes:
            return False
        if sha256 is None:
            return True
        with file.open("rb") as opened:
            found = hashlib.sha256()
            while part := opened.read(1 << 20):
                found.update(part)
        return found.hexdigest() == sha256
    except (OSError, ValueError):
        return False
