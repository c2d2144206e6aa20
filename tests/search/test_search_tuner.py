"""The tuner in a simulated world: order, memory, budgets, rematches, failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
from search_world import DEVICE, POLICY, World, workload

from raftune.cost_model import model_path
from raftune.dialects.registry import UnknownDialect
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.search import (
    Budget,
    Exhaustive,
    InvalidBudget,
    Measured,
    Rematched,
    Sampled,
    SearchStarted,
    Stop,
    TaskStarted,
    TaskStatus,
)
from raftune.workload import Candidate

DEFAULT: dict[str, Any] = {"formulation": "default"}


@pytest.fixture
def tiles(world: World) -> World:
    """Dialect ``alpha`` with four candidates a task; its second is best (60 of 100 us) and wins."""
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(4)])
    for size in range(1, 6):
        for i, us in enumerate((90.0, 60.0, 120.0, 70.0)):
            world.set(size, "alpha", {"tile": i}, time_us=us)
    return world


def test_every_default_is_measured_before_anything_else_heaviest_first(tiles: World) -> None:
    tiles.tune({1: 1, 2: 1, 3: 5})
    first = tiles.measurer.measured[:3]
    assert [size for size, _ in first] == [3, 2, 1]
    assert all(candidate.config == DEFAULT for _, candidate in first)


def test_a_region_is_opened_after_its_members_and_the_heavier_one_first(tiles: World) -> None:
    for size, us in ((1, 100.0), (2, 100.0), (3, 5.0), (4, 5.0)):
        tiles.set(size, "aten", DEFAULT, time_us=us)
        for i in range(4):
            tiles.set(size, "alpha", {"tile": i}, time_us=us)
    regions = {5: (3, 4), 6: (1, 2)}
    result = tiles.tune({5: 1, 6: 1, 1: 1, 2: 1, 3: 1, 4: 1}, Budget(trials=6), parts=regions)
    defaults = [size for size, candidate in tiles.measurer.measured if candidate.config == DEFAULT]
    assert sorted(defaults[:4]) == [1, 2, 3, 4]
    assert defaults[4:] == [6]
    assert {t.workload: t.status for t in result.tasks}[workload(5)] is TaskStatus.UNMEASURED
    assert tiles.tune({5: 1, 6: 1, 1: 1, 2: 1, 3: 1, 4: 1}, parts=regions).stopped is Stop.FINISHED
    assert (5, Candidate("aten", "1.0", DEFAULT)) in tiles.measurer.measured


def test_a_region_whose_member_fails_is_left_and_the_search_ends(tiles: World) -> None:
    tiles.set(1, "aten", DEFAULT, status=Status.CRASH)
    result = tiles.tune({1: 1, 2: 1, 3: 1}, parts={3: (1, 2)})
    assert result.stopped is Stop.FINISHED
    assert 3 not in {size for size, _ in tiles.measurer.measured}


def test_everything_is_measured_once_and_the_best_wins(tiles: World) -> None:
    result = tiles.tune({1: 1, 2: 3})
    assert result.stopped is Stop.FINISHED
    assert result.measured == len(tiles.measurer.measured) == len(set(tiles.measurer.measured)) == 10
    assert result.hits == 0
    for task, size, weight in zip(result.tasks, (1, 2), (1, 3), strict=True):
        assert (task.workload, task.weight, task.status) == (workload(size), weight, TaskStatus.WON)
        assert (task.default_us, task.best_us) == (100.0, 60.0)
        assert task.winner == Candidate("alpha", "1.0", {"tile": 1})


def test_a_second_run_measures_nothing_and_says_the_same(tiles: World) -> None:
    first = tiles.tune({1: 1, 2: 3})
    second = tiles.tune({1: 1, 2: 3})
    assert (second.measured, second.rematches, second.hits) == (0, 0, 10)
    assert second.tasks == first.tasks
    assert second.key == first.key


def test_a_workload_given_twice_is_one_task(tiles: World) -> None:
    with tiles.log() as log:
        from raftune.graph.workloads import Task
        from raftune.search import tune

        tasks = [Task(workload(1), 2), Task(workload(1), 3)]
        result = tune(tasks, log, device=DEVICE, policy=POLICY, budget=Budget(), measurer=tiles.measurer, strategy=Exhaustive())
    assert [task.weight for task in result.tasks] == [5]


@pytest.mark.parametrize("die_after", [0, 1, 4, 9])
def test_after_a_kill_only_the_rest_is_measured(tiles: World, die_after: int) -> None:
    tiles.measurer.die_after = die_after
    with pytest.raises(RuntimeError, match="killed"):
        tiles.tune({1: 1, 2: 3})
    tiles.measurer.die_after = None
    result = tiles.tune({1: 1, 2: 3})
    assert result.hits == die_after
    assert result.measured == 10 - die_after
    assert len(tiles.measurer.measured) == len(set(tiles.measurer.measured)) == 10
    assert all(task.status is TaskStatus.WON for task in result.tasks)


def test_an_interrupt_gives_the_results_so_far(tiles: World) -> None:
    tiles.measurer.die_after, tiles.measurer.error = 3, KeyboardInterrupt()
    result = tiles.tune({1: 1, 2: 3})
    assert result.stopped is Stop.INTERRUPTED
    assert result.measured == 3
    assert {task.status for task in result.tasks} <= {TaskStatus.DEFAULT, TaskStatus.WON}


@pytest.mark.parametrize("trials", [0, 1, 2, 5, 9])
def test_a_budget_in_trials_is_exact_and_adds_up_over_runs(tiles: World, trials: int) -> None:
    result = tiles.tune({1: 1, 2: 3}, Budget(trials=trials))
    assert result.measured == trials
    assert result.stopped is Stop.BUDGET
    again = tiles.tune({1: 1, 2: 3}, Budget(trials=trials))
    assert (again.measured, again.rematches, again.hits) == (0, 0, trials)
    more = tiles.tune({1: 1, 2: 3}, Budget(trials=trials + 1))
    assert more.measured == 1
    assert len(set(tiles.measurer.measured)) == trials + 1


def test_tasks_that_the_budget_did_not_reach_are_unmeasured(tiles: World) -> None:
    result = tiles.tune({1: 1, 2: 3}, Budget(trials=1))
    assert [task.status for task in result.tasks] == [TaskStatus.UNMEASURED, TaskStatus.DEFAULT]
    assert (result.tasks[0].winner, result.tasks[0].best_us) == (None, None)


@pytest.mark.parametrize("seconds", [7.0, 20.0, 33.3, 60.0])
def test_a_budget_in_seconds_holds_within_a_tenth_and_a_second_run_adds_nothing(world: World, seconds: float) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(60)])
    for size in range(1, 4):
        for i in range(60):
            world.set(size, "alpha", {"tile": i}, time_us=60.0 + (7 * i) % 50, cost_s=0.5 + (i % 3) / 2)
    start = world.clock.now
    result = world.tune({1: 1, 2: 1, 3: 1}, Budget(seconds=seconds))
    used = world.clock.now - start
    assert 0.85 * seconds <= used <= 1.1 * seconds
    assert result.seconds == used
    assert result.stopped is Stop.BUDGET
    again = world.tune({1: 1, 2: 1, 3: 1}, Budget(seconds=seconds))
    assert (again.measured, again.rematches) == (0, 0)
    assert again.tasks == result.tasks
    world.tune({1: 1, 2: 1, 3: 1}, Budget(seconds=2 * seconds))
    assert 1.85 * seconds <= world.clock.now - start <= 2.2 * seconds


def test_rematches_are_kept_time_for(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(200)])
    for size in range(1, 5):
        for i in range(200):
            world.set(size, "alpha", {"tile": i}, time_us=90.0 - i * 0.1)
    result = world.tune(dict.fromkeys(range(1, 5), 1), Budget(seconds=60), Exhaustive())
    assert [task.status for task in result.tasks] == [TaskStatus.WON] * 4


def test_what_was_found_is_rematched_before_something_dear_is_tried(world: World) -> None:
    """The time left would do for either; ``dear`` also takes five times as long as its first trial let expect."""
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}])
    world.add_dialect("dear", 40, lambda size: [{"tile": i} for i in range(9)])
    good = world.set(1, "alpha", {"tile": 0}, time_us=80.0)
    world.set(1, "dear", {"tile": 0}, time_us=79.0, cost_s=8.0, build_s=7.0)
    for i in range(1, 9):
        world.set(1, "dear", {"tile": i}, time_us=10.0, cost_s=40.0, build_s=39.0)
    start = world.clock.now
    result = world.tune({1: 10}, Budget(seconds=30.0))
    assert world.clock.now - start <= 33.0
    assert good in [candidate for _, candidate in world.measurer.rematched]
    assert result.tasks[0].status is TaskStatus.WON


def test_a_candidate_that_outlives_the_budget_is_stopped_and_not_judged(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}])
    slow = world.set(1, "alpha", {"tile": 0}, cost_s=50.0, time_us=10.0)
    start = world.clock.now
    world.tune({1: 1}, Budget(seconds=20.0))
    assert world.clock.now - start <= 22.0
    assert world.measurer.timeouts[-1] is not None
    result = world.tune({1: 1}, Budget(seconds=200.0))
    assert world.measurer.timeouts[-1] is None
    assert result.tasks[0].winner == slow


def test_a_timeout_of_the_policy_itself_is_final(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}])
    world.set(1, "alpha", {"tile": 0}, status=Status.TIMEOUT, cost_s=60.0)
    world.tune({1: 1}, Budget(seconds=1000.0))
    assert world.tune({1: 1}, Budget(seconds=1000.0)).measured == 0


def test_what_loses_its_rematch_is_not_the_winner(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}, {"tile": 1}])
    lucky = world.set(1, "alpha", {"tile": 0}, time_us=40.0, rematch_us=99.0)
    solid = world.set(1, "alpha", {"tile": 1}, time_us=80.0)
    result = world.tune({1: 1})
    assert [candidate for _, candidate in world.measurer.rematched] == [lucky, solid]
    assert (result.tasks[0].winner, result.tasks[0].best_us) == (solid, 80.0)


def test_a_win_within_the_margin_keeps_the_default(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}, {"tile": 1}])
    world.set(1, "alpha", {"tile": 0}, time_us=97.5)
    world.set(1, "alpha", {"tile": 1}, time_us=99.5)
    result = world.tune({1: 1})
    assert result.tasks[0].status is TaskStatus.DEFAULT
    assert result.tasks[0].winner == Candidate("aten", "1.0", DEFAULT)
    # 97.5 might be 96 within its interval, 99.5 might not be 97.
    assert [candidate.config["tile"] for _, candidate in world.measurer.rematched] == [0]


def test_only_the_best_few_are_rematched(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(12)])
    for i in range(12):
        world.set(1, "alpha", {"tile": i}, time_us=80.0 - i)
    result = world.tune({1: 1}, strategy=Exhaustive())
    assert result.tasks[0].best_us == 69.0
    late = [candidate.config["tile"] for _, candidate in world.measurer.rematched]
    assert set(late) == {9, 10, 11}
    assert result.rematches == 3


def test_candidates_that_fail_are_recorded_with_their_status_and_never_repeated(world: World) -> None:
    failures = [s for s in Status if s not in (Status.OK, Status.NOISY)]
    world.add_dialect("alpha", 50, lambda size: [{"fails": str(s)} for s in failures])
    for status in failures:
        world.set(1, "alpha", {"fails": str(status)}, status=status)
    result = world.tune({1: 1})
    assert result.measured == 1 + len(failures)
    assert result.tasks[0].status is TaskStatus.DEFAULT
    with world.log() as log:
        known = log.outcomes(workload(1), DEVICE, POLICY)
    assert {o.status for c, o in known.values() if c.dialect == "alpha"} == set(failures)
    assert world.tune({1: 1}).measured == 0


def test_a_noisy_candidate_is_tried_once_more_and_then_left_to_a_later_run(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": 0}, {"tile": 1}])
    noisy = world.set(1, "alpha", {"tile": 0}, status=Status.NOISY)
    other = world.set(1, "alpha", {"tile": 1}, time_us=90.0)
    world.tune({1: 1})
    assert [candidate for _, candidate in world.measurer.measured[1:]] == [noisy, other, noisy]
    world.set(1, "alpha", {"tile": 0}, time_us=50.0)
    result = world.tune({1: 1})
    assert (result.measured, result.tasks[0].winner) == (1, noisy)


@pytest.mark.parametrize("status", [Status.CRASH, Status.WRONG, Status.UNSUPPORTED, Status.TIMEOUT, Status.NOISY])
def test_a_task_whose_default_fails_is_left_alone_with_the_reason(tiles: World, status: Status) -> None:
    tiles.set(1, "aten", DEFAULT, status=status)
    result = tiles.tune({1: 1, 2: 1})
    failed, good = result.tasks
    assert failed.status is (TaskStatus.UNMEASURED if status is Status.NOISY else TaskStatus.FAILED)
    assert failed.winner is None
    assert str(status).split("_")[0] in failed.reason
    assert good.status is TaskStatus.WON
    assert {c.dialect for size, c in tiles.measurer.measured if size == 1} == {"aten"}
    assert len([1 for size, _ in tiles.measurer.measured if size == 1]) == (2 if status is Status.NOISY else 1)


def test_trials_go_where_weight_times_time_is_highest(world: World) -> None:
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(4)])
    world.set(3, "aten", DEFAULT, time_us=20.0)
    for i in range(4):
        world.set(3, "alpha", {"tile": i}, time_us=20.0)
    world.tune({1: 1, 2: 100, 3: 100}, Budget(trials=3 + 10))
    order = [size for size, _ in world.measurer.measured[3:]]
    # The heaviest first; a first look at the next one comes before the last configs of the first.
    assert order[0] == 2
    assert order[:6].count(2) == 4
    assert order.index(3) < 4


def test_a_task_already_improved_yields_to_one_that_is_not(world: World) -> None:
    """Both have tasks of the same weight and time; what is left to gain differs."""
    world.add_dialect("alpha", 50, lambda size: [{"tile": i} for i in range(4)])
    for i in range(4):
        world.set(1, "alpha", {"tile": i}, time_us=15.0)
        world.set(2, "alpha", {"tile": i}, time_us=95.0)
    world.tune({1: 1, 2: 1}, Budget(trials=2 + 5))
    assert [size for size, _ in world.measurer.measured[2:]].count(2) == 4


def test_dialects_compete_for_trials_by_what_they_gained(world: World) -> None:
    """Of two dialects that cost the same, the one that keeps winning is tried first in the tasks that follow."""
    for name, priority, us in (("alpha", 60, 130.0), ("beta", 50, 50.0)):
        world.add_dialect(name, priority, lambda size: [{"tile": 0}])
        for size in range(1, 21):
            world.set(size, name, {"tile": 0}, time_us=us)
    world.tune({size: 21 - size for size in range(1, 21)}, Budget(trials=20 + 20))
    names = [candidate.dialect for _, candidate in world.measurer.measured[20:]]
    assert names.count("beta") >= 14


def test_a_cheap_dialect_is_tried_before_a_dear_one_of_equal_promise(world: World) -> None:
    world.add_dialect("dear", 60, lambda size: [{"tile": 0}])
    world.add_dialect("cheap", 50, lambda size: [{"tile": 0}])
    for size in range(1, 11):
        world.set(size, "dear", {"tile": 0}, time_us=80.0, cost_s=20.0, build_s=19.0)
        world.set(size, "cheap", {"tile": 0}, time_us=80.0, cost_s=1.0)
    world.tune(dict.fromkeys(range(1, 11), 1), Budget(trials=10 + 11))
    names = [candidate.dialect for _, candidate in world.measurer.measured[10:]]
    assert names.count("cheap") >= 9


def test_an_unknown_dialect_is_an_error_before_anything_is_measured(tiles: World) -> None:
    with pytest.raises(UnknownDialect, match=r"'cudnnn'.*alpha"):
        tiles.tune({1: 1}, dialects=["cudnnn"])
    assert tiles.measurer.measured == []


def test_only_the_named_dialects_are_tried(tiles: World) -> None:
    tiles.add_dialect("beta", 40, lambda size: [{"tile": 9}])
    result = tiles.tune({1: 1}, dialects=["beta"])
    assert {candidate.dialect for _, candidate in tiles.measurer.measured} == {"aten", "beta"}
    assert tiles.tune({1: 1}, dialects=["alpha", "beta"]).hits == result.measured == 2


def test_the_policy_is_part_of_what_was_measured(tiles: World) -> None:
    tiles.tune({1: 1})
    result = tiles.tune({1: 1}, policy=Policy(margin=0.05))
    assert (result.hits, result.measured) == (0, 5)


def test_events_tell_the_whole_story(tiles: World) -> None:
    events: list[Any] = []
    result = tiles.tune({1: 1, 2: 1}, progress=events.append)
    assert events[0] == SearchStarted(2, 10, 0, float("inf"), float("inf"))
    assert [e.index for e in events if isinstance(e, TaskStarted)] == [1, 2]
    measured = [e for e in events if isinstance(e, Measured)]
    assert [e.measured for e in measured] == list(range(1, 11))
    assert [e.is_default for e in measured] == [True] * 2 + [False] * 8
    best = next(e for e in measured if e.candidate.config == {"tile": 1})
    assert best.ratio == pytest.approx(0.6)
    rematched = [e for e in events if isinstance(e, Rematched)]
    assert len(rematched) == result.rematches
    assert all(e.won for e in rematched if e.candidate.config == {"tile": 1})
    assert not [e for e in events if isinstance(e, Sampled)]


def test_another_program_tuning_into_the_same_log_is_made_use_of(tiles: World) -> None:
    with tiles.log() as log:
        default, tile = Candidate("aten", "1.0", DEFAULT), Candidate("alpha", "1.0", {"tile": 1})
        log.record(workload(1), default, DEVICE, POLICY, Outcome(Status.OK, 100.0, 99.0, 101.0), is_default=True)
        log.record(workload(1), tile, DEVICE, POLICY, Outcome(Status.OK, 60.0, 59.0, 61.0))
        log.record_rematch(workload(1), tile, default, DEVICE, POLICY, Rematch(Status.OK, 60.0, 100.0, 0.6, 0.61, 15))
    result = tiles.tune({1: 1}, Budget(trials=1))
    assert (result.hits, result.measured) == (2, 1)
    assert result.tasks[0].winner == tile


def landscape(world: World, tasks: int) -> None:
    """64 candidates a task, of which few are good, alike in all tasks: 30 us at x=16, y=4 and rising away from it."""
    configs = [{"x": 2**i, "y": 2**j} for j in range(8) for i in range(8)]
    world.add_dialect("alpha", 50, lambda size: list(configs))
    for size in range(1, tasks + 1):
        for config in configs:
            away = (math.log2(config["x"]) - 4) ** 2 + (math.log2(config["y"]) - 2) ** 2
            world.set(size, "alpha", config, time_us=30.0 * math.exp(0.12 * away))


def test_the_cost_model_carries_over_what_it_learned_to_other_tasks(world: World) -> None:
    landscape(world, tasks=6)
    world.tune(dict.fromkeys(range(1, 6), 1), Budget(trials=140), learn=True)
    assert model_path(world.path).exists()
    before = len(world.measurer.measured)
    result = world.tune({6: 1}, Budget(trials=1 + 5), learn=True)
    assert len(world.measurer.measured) - before == 6
    assert result.tasks[0].best_us is not None
    assert result.tasks[0].best_us <= 34.0  # 5 of the 64 are


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidBudget, match="-1"):
        Budget(seconds=-1)
