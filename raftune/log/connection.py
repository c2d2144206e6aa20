"""Opening the file: for writing (created and upgraded as needed) or for reading only, on any kind of file system.

While it is open for writing on a local disk the log is in SQLite's write-ahead mode, so that readers never block a tuner.
The last writer to close it turns it back into one self-contained file that can be copied, or read from read-only media.
"""

from __future__ import annotations

import lzma
import sqlite3
import warnings
from pathlib import Path

from sqlite_utils import Database

from raftune.log.errors import LogError, LogWarning
from raftune.log.schema import back_up, check_ours, check_writable_version, latest_version, upgrade, version_of

# How long a writer waits for another one. A transaction here takes milliseconds; a slow network disk may take seconds.
BUSY_SECONDS = 30.0

COMPRESSED = ".xz"
_MOST_UNPACKED = 1 << 30

# Write-ahead mode shares memory between its users, which does not work across machines (https://sqlite.org/wal.html).
_NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "sshfs"]
)


def open_for_writing(path: Path) -> Database:
    """Open, create or upgrade the log. Raises :class:`LogError`; a file that is not a tuning log is never changed."""
    _check_place(path)
    if path.suffix == COMPRESSED:
        raise LogError(f"tuning log {path} is compressed and can only be read: unpack it first")
    if not path.parent.is_dir():
        raise LogError(f"cannot create tuning log {path}: folder {path.parent} does not exist")
    try:
        db = _connect(path, "mode=rwc")
    except sqlite3.Error as error:
        raise LogError(f"cannot open tuning log {path} for writing: {error}") from error
    try:
        check_ours(db, path)
        check_writable_version(db, path)
        _set_journal(db, path)
        if 0 < version_of(db) < latest_version():
            back_up(db, path)
        upgrade(db)
    except (sqlite3.Error, OSError) as error:
        db.close()
        raise LogError(f"cannot open tuning log {path} for writing: {error}") from error
    except LogError:
        db.close()
        raise
    return db


def open_for_reading(path: Path) -> Database:
    """Open the log without ever writing to it; raises :class:`LogError`. An older log is upgraded in a copy in memory.

    A file that ends in ``.xz`` is a compressed log, and is read into memory.
    """
    _check_place(path)
    if not path.exists():
        raise LogError(f"there is no tuning log {path}")
    try:
        db = _unpacked(path) if path.suffix == COMPRESSED else _connect_read_only(path)
    except sqlite3.Error as error:
        raise LogError(f"cannot read tuning log {path}: {error}") from error
    try:
        check_ours(db, path)
        if version_of(db) < latest_version():
            copy = sqlite3.connect(":memory:", check_same_thread=False)
            db.conn.backup(copy)
            db.close()
            db = _prepare(copy)
            upgrade(db)
            db.execute("PRAGMA query_only = ON")
    except sqlite3.Error as error:
        db.close()
        raise LogError(f"cannot read tuning log {path}: {error}") from error
    except LogError:
        db.close()
        raise
    return db


def close(db: Database) -> None:
    """Close; the last one to do so after writing leaves one self-contained file."""
    try:
        db.execute("PRAGMA busy_timeout = 0")
        db.disable_wal()
    except sqlite3.Error:
        # Another connection is open, the file is read-only, or this one is closed: the mode stays, and every mode is valid.
        pass
    db.close()


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise LogError(f"tuning log {path} is not a file: name a file")


def _connect(path: Path, parameters: str) -> Database:
    uri = f"{path.absolute().as_uri()}?{parameters}"
    # Compilers may ask from another thread (autograd's); TuningLog serializes.
    return _prepare(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False))


def _prepare(connection: sqlite3.Connection) -> Database:
    # Text from a stranger need not be UTF-8; a replaced character fails the digest check and skips that row only.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        # A stranger's views and triggers may not call functions with side effects.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
        db = Database(connection, execute_plugins=False)
        version_of(db)
    except sqlite3.Error:
        connection.close()
        raise
    return db


def _unpacked(path: Path) -> Database:
    try:
        with lzma.open(path) as file:
            content = file.read(_MOST_UNPACKED + 1)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise LogError(f"cannot unpack tuning log {path}: {error}") from error
    if len(content) > _MOST_UNPACKED:
        raise LogError(f"tuning log {path} unpacks to more than {_MOST_UNPACKED >> 20} MB: unpack it to a file first")
    memory = sqlite3.connect(":memory:", check_same_thread=False)
    # The header of a log that was copied while it was being written asks for side files, which memory does not have.
    memory.deserialize(content[:18] + b"\x01\x01" + content[20:])
    return _prepare(memory)


def _connect_read_only(path: Path) -> Database:
    try:
        return _connect(path, "mode=ro")
    except sqlite3.OperationalError:
        # Write-ahead mode needs side files, which read-only media cannot hold; there nobody writes either.
        db = _connect(path, "immutable=1")
    for suffix in ("-wal", "-journal"):
        side = path.with_name(path.name + suffix)
        if side.exists() and side.stat().st_size:
            warnings.warn(
                f"tuning log {path}: rows of an interrupted run in {side.name} cannot be read from read-only media; "
                "open the log once where it is writable",
                LogWarning,
                stacklevel=4,
            )
    return db


def _set_journal(db: Database, path: Path) -> None:
    try:
        if file_system_of(path) in _NETWORK_FILE_SYSTEMS:
            db.disable_wal()
        else:
            db.enable_wal()
    except sqlite3.OperationalError:
        # Not supported here, or another process is using the file in its present mode: both modes are safe, keep that one.
        return


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that holds ``path``, or an empty string where the system does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    target = path.absolute().resolve()
    best, kind = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(fields[1].replace("\\040", " "))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2].removeprefix("fuse.")
    return kind
