"""Searching in a recording: what it finds, what it takes, and what it keeps (nothing)."""

from __future__ import annotations

from typing import Any

import pytest
from search_world import DEVICE, POLICY, World, workload

from raftune.dialects import registry
from raftune.graph.workloads import Task
from raftune.log import LogError, TuningLog
from raftune.measurement import Outcome, Status
from raftune.search import Budget, Measured, Random, Recording, Stop, simulate


@pytest.fixture
def recorded(world: World) -> World:
    """Two workloads with a listed and 40 sampled candidates each; the fastest sampled one takes 41 of 100."""
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], lambda count, seed: [])
    with world.log() as log:
        run = log.start_run("recording", {})
        log.record_tasks(run, [(workload(1), 3.0), (workload(2), 1.0)])
        for size in (1, 2):
            timed = {"aten": [({"formulation": "default"}, 100.0)], "deep": [({"schedule": -1}, 90.0)]}
            timed["deep"] += [({"schedule": i}, 80.0 - i) for i in range(40)]
            for dialect, configs in timed.items():
                for config, us in configs:
                    candidate = world.set(size, dialect, config)
                    outcome = Outcome(Status.OK, us, us, us, repeats=7, build_s=0.1, cost_s=0.5)
                    is_default = dialect == "aten"
                    log.record(workload(size), candidate, DEVICE, POLICY, outcome, run, is_default=is_default)
            broken = world.set(size, "deep", {"schedule": 99})
            log.record(workload(size), broken, DEVICE, POLICY, Outcome(Status.CRASH, message="SIGSEGV", cost_s=4.0), run)
    return world


def recording(world: World) -> Recording:
    with TuningLog(world.path, read_only=True) as log:
        return Recording(log)


def test_a_simulation_finds_what_was_recorded_and_measures_nothing(recorded: World) -> None:
    before = recorded.path.read_bytes()
    trials: list[Any] = []
    result = simulate(recording(recorded), budget=Budget(), progress=trials.append)
    found = {task.workload: (task.weight, task.default_us, task.best_us) for task in result.tasks}
    assert found[workload(1)][:2] == (3, 100.0)
    assert found[workload(1)][2] is not None
    assert 41.0 <= found[workload(1)][2] <= 70.0
    assert result.stopped is Stop.FINISHED
    assert recorded.measurer.measured == recorded.measurer.rematched == []
    assert recorded.path.read_bytes() == before
    costs = [event.outcome.cost_s for event in trials if isinstance(event, Measured)]
    assert result.seconds >= sum(costs) >= 0.5 * len(costs) > 0


def test_a_simulation_is_the_same_again_and_keeps_to_its_budget(recorded: World) -> None:
    world = recording(recorded)
    one, other = (simulate(world, budget=Budget(seconds=10.0), seed=3) for _ in range(2))
    assert [task.best_us for task in one.tasks] == [task.best_us for task in other.tasks]
    assert one.seconds == other.seconds <= 11.0
    assert simulate(world, budget=Budget(trials=5), strategy=Random(1)).measured == 5


def test_children_in_a_recording_are_the_nearest(recorded: World) -> None:
    with registry.standing_in(recording(recorded).dialects()):
        deep = registry.get("deep")
        assert list(deep.candidates(workload(1))) == [{"schedule": -1}]
        drawn = deep.sample(workload(1), 100, 0)
        assert sorted(config["schedule"] for config in drawn) == [*range(40), 99]
        near = deep.vary(workload(1), [{"schedule": 7}], 100, 0)
        assert sorted(config["schedule"] for config in near) == [n for n in [*range(40), 99] if n != 7]
        assert deep.sample(workload(3), 5, 0) == []
        assert not deep.supports(workload(3))


def test_only_recorded_tasks_are_simulated(recorded: World) -> None:
    tasks = [Task(workload(2), 5, (workload(1), workload(1))), Task(workload(9), 1)]
    result = simulate(recording(recorded), tasks=tasks, budget=Budget(trials=4))
    assert [(task.workload, task.weight) for task in result.tasks] == [(workload(2), 5)]
    with pytest.raises(LogError, match="none of the tasks"):
        simulate(recording(recorded), tasks=tasks[1:], budget=Budget(trials=4))


def test_an_empty_log_is_no_recording(world: World) -> None:
    with world.log():
        pass
    with pytest.raises(LogError, match="nothing to simulate"):
        recording(world)
