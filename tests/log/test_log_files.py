"""Files of every kind: foreign, damaged, older, newer, read-only, on a network."""

import lzma
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from log_samples import DEFAULT, DEVICE, FAST, POLICY, matmul, ok

from raftune.log import LogError, LogWarning, TuningLog, connection, schema

REPOSITORY = Path(__file__).parents[2]


def filled(path):
    with TuningLog(path) as log:
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    return path


def journal_mode(path):
    with sqlite3.connect(path) as db:
        return db.execute("PRAGMA journal_mode").fetchone()[0]


def test_closed_log_is_one_self_contained_file(path):
    filled(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert journal_mode(path) == "delete"


def test_readers_do_not_block_a_writer_and_see_committed_rows(path):
    with TuningLog(path) as log:
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
        assert journal_mode(path) == "wal"
        reader = sqlite3.connect(path)
        cursor = reader.execute("SELECT * FROM measurement")
        cursor.fetchone()
        with TuningLog(path, read_only=True) as other:
            log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
            assert other.outcomes(matmul(), DEVICE, POLICY).keys() == {DEFAULT.digest, FAST.digest}
        reader.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"just a text file, long enough" * 60, "not a database"), (b"SQLite format 3\0" + b"\1" * 2000, "cannot")],
)
def test_a_file_that_is_no_database_is_refused_and_kept(path, content, message, read_only):
    path.write_bytes(content)
    with pytest.raises(LogError, match=message) as caught:
        TuningLog(path, read_only=read_only)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("setup", ["CREATE TABLE photos (id)", "PRAGMA user_version = 3", "PRAGMA application_id = 99"])
def test_a_database_of_something_else_is_refused_and_kept(path, setup, read_only):
    with sqlite3.connect(path) as db:
        db.execute(setup)
    db.close()
    before = path.read_bytes()
    with pytest.raises(LogError, match="not a tuning log"):
        TuningLog(path, read_only=read_only)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_log(path):
    path.touch()
    filled(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)
        assert db.execute("PRAGMA user_version").fetchone() == (schema.latest_version(),)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_folder_is_refused(tmp_path, read_only):
    with pytest.raises(LogError, match="is not a file"):
        TuningLog(tmp_path, read_only=read_only)


def test_a_missing_folder_or_log_is_said(tmp_path):
    with pytest.raises(LogError, match="does not exist"):
        TuningLog(tmp_path / "nowhere" / "log.sqlite")
    with pytest.raises(LogError, match="there is no tuning log"):
        TuningLog(tmp_path / "log.sqlite", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_damage_found_later_is_a_log_error(path):
    filled(path)
    with sqlite3.connect(path) as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
    db.close()
    with path.open("r+b") as file:
        file.seek(size)
        file.write(b"\xa5" * (path.stat().st_size - size))
    with pytest.raises(LogError, match="malformed"), TuningLog(path, read_only=True) as log:
        log.outcomes(matmul(), DEVICE, POLICY)


def test_odd_characters_in_the_name(tmp_path):
    filled(tmp_path / "a b?c#d%20é.sqlite")
    with TuningLog(tmp_path / "a b?c#d%20é.sqlite", read_only=True) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT


def test_read_only_never_writes(path):
    before = filled(path).read_bytes()
    with TuningLog(path, read_only=True) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT
        for attempt in (
            lambda: log.record(matmul(), FAST, DEVICE, POLICY, ok(1.0)),
            lambda: log.start_run("k", {}),
            lambda: log.record_race("k", DEVICE, {}),
        ):
            with pytest.raises(LogError, match="read-only"):
                attempt()
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.fixture
def read_only_media():
    """A folder that nobody may write to, and a function that runs Python there as a user for whom that holds (not root)."""
    folder = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0

    def run(code):
        folder.chmod(0o555)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if root:
                    os.setuid(65534)
                code()
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    yield folder, run
    folder.chmod(0o755)
    shutil.rmtree(folder)


def check_read_only(path):
    with TuningLog(path, read_only=True) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT
    with pytest.raises(LogError, match=r"readonly|unable to open"):
        TuningLog(path)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_read_only_media(read_only_media, mode):
    folder, run = read_only_media
    path = filled(folder / "log.sqlite")
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA journal_mode = {mode}")
    db.close()
    path.chmod(0o444)
    assert {p.name for p in folder.iterdir()} == {"log.sqlite"}
    assert run(lambda: check_read_only(path)) == 0
    assert {p.name for p in folder.iterdir()} == {"log.sqlite"}


def test_rows_that_read_only_media_hide_are_warned_about(read_only_media, tmp_path):
    folder, run = read_only_media
    with TuningLog(tmp_path / "log.sqlite") as log:
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
        log._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
        # As after a kill, copied without the memory shared by its users.
        for name in ("log.sqlite", "log.sqlite-wal"):
            shutil.copy(tmp_path / name, folder / name)
            (folder / name).chmod(0o444)

    def check():
        with pytest.warns(LogWarning, match="log.sqlite-wal"):
            opened = TuningLog(folder / "log.sqlite", read_only=True)
        assert opened.winner(matmul(), DEVICE).candidate == DEFAULT

    assert run(check) == 0


@pytest.fixture
def newer(monkeypatch):
    """Pretends that the next schema version exists."""

    def add(sql):
        latest = schema.latest_version()
        migrations = (*schema.migrations(), schema.Migration(latest + 1, sql))
        monkeypatch.setattr(schema, "migrations", lambda: migrations)
        return latest + 1

    return add


def test_an_older_log_is_backed_up_and_upgraded(path, newer):
    before = filled(path)
    version = newer("CREATE TABLE plan (id INTEGER PRIMARY KEY); ALTER TABLE run ADD COLUMN note TEXT DEFAULT 'a;b';")
    with TuningLog(before) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
        db.execute("SELECT * FROM plan")
    (backup,) = [p for p in path.parent.iterdir() if p != path]
    assert backup.name.startswith(f"{path.name}.v{version - 1}-")
    with sqlite3.connect(backup) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version - 1,)
        assert db.execute("SELECT count(*) FROM measurement").fetchone() == (1,)
    db.close()


def test_an_upgrade_that_fails_changes_nothing(path, newer):
    filled(path)
    version = newer("CREATE TABLE plan (id INTEGER PRIMARY KEY); CREATE TABLE measurement (id);")
    with pytest.raises(LogError, match="already exists"):
        TuningLog(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version - 1,)
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'plan'").fetchone() == (0,)


def test_an_older_log_is_read_without_touching_it(path, newer):
    before = filled(path).read_bytes()
    newer("CREATE VIEW extra AS SELECT 1 AS one;")
    with TuningLog(path, read_only=True) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT
        assert list(log._db.query("SELECT one FROM extra")) == [{"one": 1}]
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_newer_log_is_readable_but_not_writable(path):
    filled(path)
    latest = schema.latest_version()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {latest + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(LogError, match=rf"schema version {latest + 1}.* writes version {latest}"):
        TuningLog(path)
    with TuningLog(path, read_only=True) as log:
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT
    with sqlite3.connect(path) as db:
        db.execute("DROP VIEW winner")
        db.execute("DROP VIEW contender")
    db.close()
    with TuningLog(path, read_only=True) as log, pytest.raises(LogError, match="no such table: contender"):
        log.winner(matmul(), DEVICE)
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("mounts", "kind"),
    [
        ("disk / ext4 rw 0 0\nserver:/x {0} nfs4 rw 0 0\n", "nfs4"),
        ("disk / ext4 rw 0 0\nserver:/x {0}/elsewhere nfs4 rw 0 0\n", "ext4"),
        ("disk / ext4 rw 0 0\nme@host: {0} fuse.sshfs rw 0 0\n", "sshfs"),
        ("disk / ext4 rw 0 0\nover {0} ext4 rw 0 0\nover {0} lustre rw 0 0\n", "lustre"),
        ("", ""),
    ],
)
def test_file_system_type(tmp_path, mounts, kind):
    table = tmp_path / "mounts"
    table.write_text(mounts.format(tmp_path.resolve()))
    assert connection.file_system_of(tmp_path / "log.sqlite", table) == kind
    assert connection.file_system_of(tmp_path / "log.sqlite", tmp_path / "missing") == ""


def test_no_shared_memory_on_a_network_file_system(path, monkeypatch):
    monkeypatch.setattr(connection, "file_system_of", lambda path: "nfs4")
    with TuningLog(path) as log:
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
        assert journal_mode(path) == "delete"
        assert list(path.parent.iterdir()) == [path]


def test_works_without_torch_and_from_a_wheel_layout(path, tmp_path):
    filled(path)
    installed = tmp_path / "site"
    shutil.copytree(REPOSITORY / "raftune", installed / "raftune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "db", installed / "raftune" / "_db")
    code = """
        import sys
        sys.modules["torch"] = None
        import raftune.log
        from raftune.log import schema
        assert raftune.log.__file__.startswith(sys.argv[2]), raftune.log.__file__
        assert str(schema.db_files()).endswith("_db")
        assert [m.version for m in schema.migrations()] == list(range(1, schema.latest_version() + 1))
        with raftune.log.TuningLog(sys.argv[1]) as log:
            assert len(list(log.winners())) == 1
    """
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), str(installed)], env=environment, cwd=tmp_path, check=True
    )


def compressed(path):
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    return packed


def test_a_compressed_log_is_read_and_never_written(path):
    packed = compressed(filled(path))
    before = packed.read_bytes()
    with TuningLog(packed, read_only=True) as log:
        assert log.outcomes(matmul(), DEVICE, POLICY).keys() == {DEFAULT.digest}
        assert log.winner(matmul(), DEVICE).time_us == 100.0
    with pytest.raises(LogError, match="can only be read"):
        TuningLog(packed)
    assert packed.read_bytes() == before


@pytest.mark.parametrize("content", [b"no archive", lzma.compress(b"x" * 5000)[:-20], lzma.compress(b"no database" * 300), b""])
def test_a_damaged_compressed_log_is_one_clear_error(tmp_path, content):
    packed = tmp_path / "log.sqlite.xz"
    packed.write_bytes(content)
    with pytest.raises(LogError, match=r"log\.sqlite\.xz"):
        TuningLog(packed, read_only=True)


def test_a_log_that_unpacks_without_end_is_refused(path, monkeypatch):
    monkeypatch.setattr(connection, "_MOST_UNPACKED", 1 << 12)
    with pytest.raises(LogError, match="unpacks to more than"):
        TuningLog(compressed(filled(path)), read_only=True)
