"""Schema versions of the tuning log: the numbered SQL files of ``db/migrations``, and bringing a file up to date."""

from __future__ import annotations

import importlib.resources
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

from sqlite_utils import Database

from raftune.log.errors import LogError

# Stored in the file's header ("RAFT"): tells a tuning log from any other SQLite file.
APPLICATION_ID = 0x52414654

_FILE_NAME = re.compile(r"(\d{4})_\w+\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """SQL that takes a log from ``version - 1`` to ``version``."""

    version: int
    sql: str


def db_files() -> Traversable:
    """The folder ``db``: inside the package when installed from a wheel, beside it in a source checkout."""
    package = importlib.resources.files("raftune")
    packaged = package / "_db"
    return packaged if packaged.is_dir() else Path(str(package)).parent / "db"


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations in order; version 0 is an empty file."""
    found = sorted(
        (int(match[1]), entry)
        for entry in (db_files() / "migrations").iterdir()
        if (match := _FILE_NAME.fullmatch(entry.name)) is not None
    )
    return tuple(Migration(version, entry.read_text(encoding="utf-8")) for version, entry in found)


def latest_version() -> int:
    return migrations()[-1].version


def version_of(db: Database) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def check_ours(db: Database, path: Path) -> None:
    """Raise :class:`LogError` unless the file is a tuning log or holds nothing at all."""
    application = int(db.execute("PRAGMA application_id").fetchone()[0])
    objects = int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if application == APPLICATION_ID:
        return
    if application or objects or version_of(db):
        raise LogError(f"{path} is a SQLite file of something else, not a tuning log; it was left as it is: name another file")


def check_writable_version(db: Database, path: Path) -> None:
    """Raise :class:`LogError` if the log was made by a newer raftune, whose rules for rows are unknown here."""
    version, latest = version_of(db), latest_version()
    if version > latest:
        raise LogError(
            f"tuning log {path} has schema version {version}, this raftune writes version {latest}: "
            "upgrade raftune, or open the log read-only"
        )


@contextmanager
def immediate(db: Database) -> Iterator[None]:
    """One write transaction that takes the write lock at its start, so that it waits for others instead of failing midway."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.rollback()
        raise
    db.execute("COMMIT")


def upgrade(db: Database) -> None:
    """Apply the missing migrations in one transaction; another process may be doing the same at this moment."""
    with immediate(db):
        current = version_of(db)
        for migration in migrations():
            if migration.version > current:
                db.executescript(migration.sql)
                db.execute(f"PRAGMA user_version = {migration.version:d}")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")


def back_up(db: Database, path: Path) -> Path:
    """Copy the log beside itself before an upgrade; the copy appears under its name only when it is complete."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    target = path.with_name(f"{path.name}.v{version_of(db)}-{stamp}.backup")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    with closing(sqlite3.connect(partial)) as copy:
        db.conn.backup(copy)
        # A single file without side files, whatever mode the log itself is in.
        copy.execute("PRAGMA journal_mode = DELETE")
    partial.replace(target)
    return target
