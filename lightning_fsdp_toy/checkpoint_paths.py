"""Files and directories of checkpoints: which is which, and how one takes another's place."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning.fabric.utilities.load import _METADATA_FILENAME

__all__ = [
    "META_FILE",
    "clear_the_way",
    "is_sharded_checkpoint",
    "partial_path",
    "put_in_place",
]

META_FILE = _METADATA_FILENAME  # what is not sharded of a sharded checkpoint


def partial_path(path: Path) -> Path:
    """Return where a checkpoint is written before it is moved to ``path``."""
    return path.with_name(f"{path.name}.partial")


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a directory of shards that was written to the end."""
    return path.is_dir() and (path / META_FILE).is_file()


def clear_the_way(path: Path) -> str | None:
    """Make the directory of ``path``, remove what an interrupted save left there.

    Called on one rank.

    Returns:
        A message if something else than a checkpoint is in the way, which nobody may remove.
    """
    if path.is_dir() and not is_sharded_checkpoint(path) and any(path.iterdir()):
        return f"The checkpoint path is a directory with other files: {path}"
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(partial_path(path))
    return None


def put_in_place(path: Path) -> None:
    """Move what was written beside ``path`` to it; an older checkpoint goes only now."""
    partial = partial_path(path)
    if path.is_symlink() and (path.is_dir() or partial.is_dir()):  # what it names stays
        path.unlink()
    elif is_sharded_checkpoint(path) or (path.is_file() and partial.is_dir()):
        _remove(path)
    elif path.is_dir() and partial.is_file():
        path.rmdir()  # an empty one; anything else is not ours to remove
    partial.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # of a link only the link
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
