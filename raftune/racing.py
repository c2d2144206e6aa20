"""Racing a step in a process of its own: threads are pinned as in measuring, and a kernel that crashes takes nothing along."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raftune.device import thread_environment
from raftune.measure.race import RaceResult

_RACE_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Raced:
    """``race`` is ``None`` when the step could not be raced; ``failure`` then says why."""

    race: RaceResult | None
    failure: str = ""


def race_in_child(task: Mapping[str, Any], log_path: Path, threads: int, patience_s: float) -> Raced:
    """Race the step that ``task`` describes (see :mod:`raftune.race_child`) from a log, which keeps the result.

    Single compilers are waited for until ``patience_s`` seconds have passed; without them the race of plan and eager stands.
    """
    end = time.monotonic() + patience_s
    read_end, write_end = os.pipe()
    whole = {**task, "log": str(log_path), "threads": threads, "answer": write_end, "parent": os.getpid()}
    with os.fdopen(read_end, "rb", buffering=0) as answer, tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "raftune.race_child", json.dumps(whole)],
            env=os.environ | thread_environment(threads, pinned=True),
            pass_fds=[write_end],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        os.close(write_end)
        try:
            first = _line(answer.fileno(), _RACE_TIMEOUT)
            if first is None:
                return Raced(None, f"the step could not be raced within {_RACE_TIMEOUT:.0f} s, so the plan is not recommended")
            if not first:
                code = child.wait()
                errors.seek(0)
                tail = " ".join(errors.read().split()[-40:])
                return Raced(None, f"the step could not be raced, so the plan is not recommended (exit {code}): {tail}")
            second = _line(answer.fileno(), max(0.0, end - time.monotonic()))
            return Raced(RaceResult.from_json(json.loads(second or first)))
        finally:
            child.kill()
            child.wait()


def _line(descriptor: int, timeout_s: float) -> bytes | None:
    """The next line; empty at the end of the stream, ``None`` if none came in time."""
    deadline = time.monotonic() + timeout_s
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(descriptor, 1)
        if not part:
            return b""
        found += part
    return found
