"""The process in which a step is raced: what its parent makes of its answers, and of none."""

from __future__ import annotations

import sys
import time

import pytest

from raftune import racing
from raftune.measure.race import judge

FIRST = judge({"eager": [2.0] * 9, "raftune": [1.0] * 9})
SECOND = judge({"eager": [2.0] * 9, "raftune": [1.0] * 9, "other": [0.5] * 9})

CHILD = """
import json, os, sys, time
task = json.loads(sys.argv[-1])
answer = os.fdopen(task["answer"], "w")
for wait, line in task["script"]:
    time.sleep(wait)
    print(line, file=answer, flush=True)
sys.stderr.write("it broke " * 1000)
sys.exit(task["code"])
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    real = racing.subprocess.Popen
    monkeypatch.setattr(racing.subprocess, "Popen", lambda args, **kw: real([sys.executable, "-c", CHILD, args[-1]], **kw))

    def run(script, patience_s=20.0, code=0):
        lines = [(wait, racing.json.dumps(result.to_json())) for wait, result in script]
        return racing.race_in_child({"script": lines, "code": code}, tmp_path / "log.sqlite", 1, patience_s)

    return run


def test_the_race_with_single_compilers_replaces_the_first(child):
    assert child([(0, FIRST), (0, SECOND)]).race == SECOND


def test_the_first_race_stands_if_a_single_compiler_takes_too_long_or_breaks(child):
    start = time.monotonic()
    assert child([(0, FIRST), (60, SECOND)], patience_s=0.2).race == FIRST
    assert time.monotonic() - start < 30
    assert child([(0, FIRST)], code=-9).race == FIRST


def test_a_race_that_fails_says_why(child):
    raced = child([], code=3)
    assert raced.race is None
    assert "(exit 3): " in raced.failure
    assert "it broke" in raced.failure


def test_a_race_without_end_is_ended(child, monkeypatch):
    monkeypatch.setattr(racing, "_RACE_TIMEOUT", 0.2)
    assert "within 0 s" in child([(60, FIRST)]).failure
