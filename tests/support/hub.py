"""Folders as in the cache of the Hugging Face hub."""

import os


def cache(root, revisions, main=None):
    """Make a folder of the hub's cache from {revision: {file: content}}."""
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    for revision, files in revisions.items():
        for name, content in files.items():
            blob = root / "blobs" / f"{abs(hash(content)):x}"
            blob.write_text(content)
            link = root / "snapshots" / revision / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (root / "refs" / "main").write_text(main)
    return root
