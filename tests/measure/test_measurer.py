"""Whatever a candidate does costs that candidate and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raftune.device import current_device
from raftune.measure import Measurer, WorkerUnavailable
from raftune.measure import process as process_module
from raftune.measurement import Policy, Status
from raftune.workload import Candidate, Workload

RIGHT = Candidate("hostile", "1.0", {"do": "right"})
# On a machine that others use as well, no verdict is a proper answer to how fast a right candidate is.
RAN = (Status.OK, Status.NOISY)


def hostile(do: str, **config: object) -> Candidate:
    return Candidate("hostile", "1.0", {"do": do, **config})


@pytest.fixture(scope="module")
def measurer(hostile_paths: list[str], short_policy: Policy) -> Iterator[Measurer]:
    del hostile_paths
    with Measurer(short_policy, current_device(1)) as measurer:
        yield measurer


@pytest.mark.parametrize(
    ("do", "status", "words"),
    [
        ("segfault", Status.CRASH, "SIGSEGV"),
        ("exits", Status.CRASH, "exited with 7"),
        ("eats", Status.OOM, "memory"),
        ("huge", Status.OOM, "memory"),
        ("system_exit", Status.CRASH, "bye"),
        ("raises", Status.CRASH, "bad tile size 17"),
        ("late_raise", Status.CRASH, "tired"),
        ("build_error", Status.BUILD_ERROR, "compiler said no"),
        ("build_raises", Status.BUILD_ERROR, "KeyError: 'tile'"),
        ("unsupported", Status.UNSUPPORTED, "not on this processor"),
        ("nan", Status.WRONG, "is nan"),
        ("wrong_fast", Status.WRONG, "output 0"),
        ("slightly_wrong", Status.WRONG, "times the tolerance"),
        ("writes_input", Status.WRONG, "input 0 was written to"),
        ("returns_input", Status.WRONG, "not fresh memory"),
        ("kept_buffer", Status.WRONG, "overwritten by the next call"),
        ("cached_result", Status.WRONG, "output 0"),
        ("strides", Status.WRONG, "strides [1, 8], should be [16, 1]"),
        ("shape", Status.WRONG, "float32 [128]"),
        ("dtype", Status.WRONG, "float64"),
        ("nothing", Status.WRONG, "NoneType"),
    ],
)
def test_a_bad_candidate_costs_one_candidate(measurer: Measurer, relu: Workload, do: str, status: Status, words: str) -> None:
    outcome = measurer.measure(relu, hostile(do, after=3))
    assert outcome.status is status, outcome.message
    assert words in outcome.message
    assert outcome.time_us is None
    assert outcome.cost_s > 0
    assert measurer.measure(relu, RIGHT).status in RAN


def test_a_right_candidate_is_timed(measurer: Measurer, relu: Workload) -> None:
    outcome = measurer.measure(relu, hostile("slow_build"))
    assert outcome.status in RAN, outcome.message
    assert outcome.max_error == 0.0
    assert outcome.build_s >= 0.05
    assert outcome.cost_s >= outcome.build_s
    if outcome.status is Status.OK:
        assert 0 < outcome.low_us <= outcome.time_us <= outcome.high_us
        assert outcome.repeats >= 3


def test_a_hopeless_candidate_is_recorded_without_a_race(measurer: Measurer, relu: Workload) -> None:
    outcome = measurer.measure(relu, hostile("sleeps"), default=(RIGHT, 2.0))
    assert outcome.status in RAN, outcome.message
    if outcome.status is Status.OK:
        assert outcome.repeats == 1
        assert outcome.low_us is outcome.high_us is None
        assert outcome.time_us > 20.0


def test_printing_does_not_disturb_the_conversation(measurer: Measurer, relu: Workload) -> None:
    assert measurer.measure(relu, hostile("noisy_printer")).status in RAN


def test_unknown_dialects_and_other_versions_are_refused(measurer: Measurer, relu: Workload) -> None:
    unknown = measurer.measure(relu, Candidate("nonesuch", "1.0", {}))
    other = measurer.measure(relu, Candidate("hostile", "0.9", {"do": "right"}))
    assert unknown.status is Status.UNSUPPORTED
    assert "nonesuch" in unknown.message
    assert other.status is Status.BUILD_ERROR
    assert "0.9" in other.message


def test_a_hang_is_a_timeout(hostile_paths: list[str], relu: Workload, short_policy: Policy) -> None:
    with Measurer(replace(short_policy, timeout=1.0), current_device(1)) as measurer:
        outcome = measurer.measure(relu, hostile("hang"))
        assert outcome.status is Status.TIMEOUT
        assert outcome.message == "not finished after 1 s"


def test_rematch_reports_each_contender_and_survives_the_bad_ones(measurer: Measurer, relu: Workload) -> None:
    # The segfault comes after the checking calls, in the middle of the race.
    names = [hostile("slow"), hostile("late_segfault", after=5), hostile("nan"), hostile("build_error"), RIGHT]
    slow, crashed, wrong, unbuilt, same = measurer.rematch(relu, names, RIGHT)
    assert crashed.status is Status.CRASH
    assert "SIGSEGV" in crashed.message
    assert wrong.status is Status.WRONG
    assert unbuilt.status is Status.BUILD_ERROR
    assert slow.status in RAN
    assert same.status in RAN
    if slow.status is Status.OK:
        assert slow.rounds >= 7
        assert slow.ratio_high >= slow.ratio > 1.0
        assert slow.time_us > slow.default_us > 0


def test_rematch_with_a_failing_default_fails_all(measurer: Measurer, relu: Workload) -> None:
    (result,) = measurer.rematch(relu, [RIGHT], hostile("raises"))
    assert result.status is Status.CRASH
    assert result.message == "the default failed: RuntimeError: bad tile size 17"
    assert measurer.rematch(relu, [], RIGHT) == []


def test_samples_come_from_the_worker(measurer: Measurer, relu: Workload) -> None:
    found = measurer.sample(relu, "hostile", 2, 5)
    assert found == [Candidate("hostile", "1.0", {"do": "right", "n": n}) for n in (5, 6)]
    with pytest.warns(UserWarning, match="no negative seeds"):
        assert measurer.sample(relu, "hostile", 2, -1) == []


def test_a_worker_that_cannot_start_is_one_clear_error(
    relu: Workload, short_policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "torch.py"
    broken.write_text("raise ImportError('libtorch is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    starts = []
    launch = process_module.launch
    monkeypatch.setattr(process_module, "launch", lambda *a, **k: starts.append(1) or launch(*a, **k))
    with Measurer(short_policy, current_device(1)) as measurer, pytest.raises(WorkerUnavailable, match="libtorch is broken"):
        measurer.measure(relu, RIGHT)
    assert len(starts) == 3


_OWNER = """
import sys
from raftune.device import current_device
from raftune.measure import Measurer
from raftune.measurement import Policy
from raftune.workload import Candidate, Workload
import json
workload = Workload.from_json(json.loads(sys.argv[1]))
measurer = Measurer(Policy(max_seconds=0.05, timeout=600.0), current_device(1))
measurer.measure(workload, Candidate("hostile", "1.0", {"do": "build_error"}))
print(measurer._worker.process.pid, flush=True)
measurer.measure(workload, Candidate("hostile", "1.0", {"do": "hang"}))
"""


def test_a_killed_parent_leaves_no_worker(hostile_paths: list[str], relu: Workload) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*hostile_paths, *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, relu.canonical], stdout=subprocess.PIPE, env=environment, text=True
    ) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        assert _alive(worker)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
