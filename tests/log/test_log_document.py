"""The queries that docs/log.md shows do run, and its winner rule is the one that raftune applies."""

import re
import shlex
import sqlite3
from pathlib import Path

import pytest
from log_samples import DEFAULT, DEVICE, FAST, FASTER, POLICY, against, failed, matmul, ok

from raftune.log import TuningLog
from raftune.measurement import Status

TEXT = (Path(__file__).parents[2] / "docs" / "log.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in TEXT.splitlines() if line.startswith("sqlite-utils ")]
(RULE,) = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def db(path):
    with TuningLog(path) as log:
        run = log.start_run("key", {})
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), run, is_default=True)
        for _ in range(2):
            log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0), run)
        log.record(matmul(), FASTER, DEVICE, POLICY, failed(Status.CRASH, "boom"), run)
        log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.55), run)
        log.record(matmul(2), DEFAULT, DEVICE, POLICY, ok(100.0), run, is_default=True)
        log.record(matmul(2), FAST, DEVICE, POLICY, ok(99.0), run)
        log.record_rematch(matmul(2), FAST, DEFAULT, DEVICE, POLICY, against(0.99, 1.01), run)
        log.record_tasks(run, [(matmul(), 3)])
    with sqlite3.connect(path) as db:
        yield db
    db.close()


@pytest.mark.parametrize("number", range(1, 11))
def test_query(db, number):
    _, _, sql, option = COMMANDS[number - 1]
    assert option == "-t"
    assert db.execute(sql).fetchall()


def test_rule(db):
    won = [db.execute(RULE, {"workload": w, "device": 1}).fetchall() for w in (1, 2)]
    fast = db.execute("SELECT id FROM candidate WHERE dialect = 'fast'").fetchone()[0]
    assert won == [[(fast, 0.5)], []]
