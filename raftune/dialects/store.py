"""Compiled kernels on disk: what one process has compiled, the next ones load.

Files can be deleted at any time: whoever misses one compiles again.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# A worker is told with it where to keep what is built only to be measured: that is not for the user's own folder.
FOLDER_VARIABLE = "RAFTUNE_KERNELS"


@contextmanager
def folder_is(path: Path) -> Iterator[None]:
    """Keep and find kernels in ``path`` within the block, in this process and those that it starts."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def kept(name: str) -> Path | None:
    """The file of that name, or ``None`` if there is none that may be trusted."""
    folder = _folder()
    path = folder / name
    try:
        return path if path.is_file() and _is_ours(folder) else None
    except OSError:  # a home that is not ours to look into
        return None


def keep(name: str, write: Callable[[Path], None]) -> Path | None:
    """Have ``write`` make the file of that name; ``None`` where nothing can be kept (a read-only home, a full disk).

    Others see the whole file or none. What ``write`` raises beside ``OSError`` is passed on.
    """
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            return None
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            write(made)
            return made.replace(folder / name)
    except OSError:
        return None


def _folder() -> Path:
    """``$XDG_CACHE_HOME/raftune/kernels``, by default below ``~/.cache``."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "raftune" / "kernels"


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write there: what lies there is run."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
