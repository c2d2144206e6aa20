"""Building ahead: what was built is loaded, what misbehaves costs itself, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raftune.device import current_device, usable_cores
from raftune.dialects import store
from raftune.measure import Measurer
from raftune.measure import ahead as ahead_module
from raftune.measure.ahead import Ahead
from raftune.measurement import Outcome, Policy, Status
from raftune.workload import Candidate, Workload

DEVICE = current_device(1)


def hostile(do: str, **config: object) -> Candidate:
    return Candidate("hostile", "1.0", {"do": do, **config})


@pytest.fixture(autouse=True)
def one_builder(monkeypatch: pytest.MonkeyPatch, hostile_paths: list[str]) -> None:
    """As on a machine with one core to spare, whatever this one has."""
    del hostile_paths
    core = usable_cores()[-1]
    monkeypatch.setattr(ahead_module, "usable_cores", lambda: (core, core))


@pytest.fixture
def ahead(short_policy: Policy) -> Iterator[Ahead]:
    built = Ahead(replace(short_policy, timeout=10.0, memory_limit_mb=700), DEVICE)
    yield built
    built.close()


def until(done: Callable[[], bool], ahead: Ahead) -> None:
    deadline = time.monotonic() + 120.0
    while not done():
        assert time.monotonic() < deadline
        ahead.pump()
        time.sleep(0.02)


def test_what_was_built_ahead_is_loaded(short_policy: Policy, relu: Workload) -> None:
    with Measurer(short_policy, DEVICE) as measurer:
        assert measurer.measure(relu, hostile("kept")).status is Status.BUILD_ERROR
        measurer.prepare(relu, [hostile("kept", n=1)])
        folder = measurer._ahead.folder
        assert folder is not None
        until((folder / "kept").exists, measurer._ahead)
        assert measurer.measure(relu, hostile("kept", n=1)).status in (Status.OK, Status.NOISY)
    assert not folder.exists()
    assert store.kept("kept") is None


def test_what_was_not_begun_is_left_to_the_caller(ahead: Ahead, relu: Workload) -> None:
    ahead.offer(relu, [hostile("kept", n=n) for n in range(3)])
    assert ahead.take(relu, hostile("kept", n=1), 60.0) is False
    assert ahead.take(relu, hostile("kept", n=9), 60.0) is False


@pytest.mark.parametrize(
    ("do", "status"),
    [("ahead_segfault", Status.CRASH), ("ahead_hangs", Status.TIMEOUT), ("ahead_eats", Status.OOM)],
)
def test_a_builder_that_is_taken_down_costs_one_candidate(ahead: Ahead, relu: Workload, do: str, status: Status) -> None:
    ahead.offer(relu, [hostile(do), hostile("kept")])
    folder = ahead.folder
    assert folder is not None
    until((folder / "kept").exists, ahead)
    outcome = ahead.take(relu, hostile(do), 60.0)
    assert isinstance(outcome, Outcome)
    assert outcome.status is status
    until(lambda: ahead.take(relu, hostile("kept"), 60.0) is True, ahead)


def test_a_failed_build_is_met_again_where_it_is_measured(ahead: Ahead, relu: Workload) -> None:
    ahead.offer(relu, [hostile("build_error"), hostile("kept")])
    folder = ahead.folder
    assert folder is not None
    until((folder / "kept").exists, ahead)
    assert ahead.take(relu, hostile("build_error"), 60.0) is False


def test_without_a_core_to_spare_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, short_policy: Policy, relu: Workload
) -> None:
    monkeypatch.setattr(ahead_module, "usable_cores", lambda: (0,))
    idle = Ahead(short_policy, DEVICE)
    idle.offer(relu, [hostile("kept")])
    assert idle.folder is None
    assert idle.take(relu, hostile("kept"), 60.0) is False


def test_builders_that_cannot_start_are_given_up(
    monkeypatch: pytest.MonkeyPatch, ahead: Ahead, relu: Workload, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    started = []
    launch = ahead_module.launch
    monkeypatch.setattr(ahead_module, "launch", lambda *a, **k: started.append(1) or launch(*a, **k))
    ahead.offer(relu, [hostile("kept")])
    until(lambda: ahead._false_starts == 3, ahead)
    ahead.pump()
    assert len(started) == 3
    assert ahead.take(relu, hostile("kept"), 60.0) is False
