"""Two tuners at once, and death at any moment."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from log_samples import DEVICE, POLICY, matmul

from raftune.log import TuningLog

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from log_samples import DEVICE, POLICY, matmul, ok
from raftune.log import TuningLog
from raftune.workload import Candidate

name, count = sys.argv[3], int(sys.argv[4])
with TuningLog(sys.argv[2]) as log:
    run = log.start_run("key", {"name": name})
    for i in range(count):
        log.record(matmul(), Candidate("dialect", "1", {"name": name, "i": i}), DEVICE, POLICY, ok(1.0), run)
        print(i + 1, flush=True)
"""


def start(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(path), name, str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_tune_into_one_new_log(path):
    writers = [start(path, name, 60) for name in "ab"]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert (writer.returncode, errors) == (0, "")
    with TuningLog(path) as log:
        outcomes = log.outcomes(matmul(), DEVICE, POLICY)
        assert len(outcomes) == 120
        assert log.spent("key").trials == 120
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("acknowledged", [1, 7, 40])
def test_a_kill_loses_no_committed_row(path, acknowledged):
    writer = start(path, "a", 100_000)
    seen = 0
    for line in writer.stdout:
        seen = int(line)
        if seen >= acknowledged:
            break
    writer.send_signal(signal.SIGKILL)
    # Everything that was printed before the signal arrived was committed before that.
    seen = max([seen, *map(int, writer.stdout.read().split("\n")[:-1])])
    writer.stderr.read()
    assert writer.wait(timeout=60) == -signal.SIGKILL

    with TuningLog(path, read_only=True) as log:
        assert len(log.outcomes(matmul(), DEVICE, POLICY)) >= seen
    with TuningLog(path) as log:
        assert log.spent("key").trials in (seen, seen + 1)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
