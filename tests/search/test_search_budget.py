"""Durations, budgets, their key, and the meter."""

from __future__ import annotations

import math

import pytest
from search_world import DEVICE, POLICY, Clock, workload

from raftune.measurement import Policy
from raftune.search.budget import Budget, InvalidBudget, Meter, budget_key, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("90s", 90), ("1h30m", 5400), ("120", 120), (" 1H ", 3600), ("0.5m", 30), ("1h0m5s", 3605), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "-3s", "m", "5m3h", "nan", "1e3", "٣s"])
def test_a_bad_duration_is_named_in_the_error(text: str) -> None:
    with pytest.raises(InvalidBudget) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
    assert "1h30m" in str(caught.value)


@pytest.mark.parametrize("limits", [{"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}, {"trials": -1}])
def test_an_impossible_budget_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidBudget):
        Budget(**limits)


def test_parse_takes_either_or_both() -> None:
    assert Budget.parse("2m", 7) == Budget(120.0, 7)
    assert Budget.parse() == Budget(None, None)


def test_the_key_ignores_order_and_repeats_of_tasks_but_nothing_else() -> None:
    tasks, dialects = [workload(1), workload(2)], [("aten", "1"), ("tvm", "2")]
    key = budget_key(tasks, DEVICE, POLICY, dialects)
    assert budget_key([*reversed(tasks), workload(1)], DEVICE, POLICY, dialects[::-1]) == key
    others = [
        budget_key(tasks[:1], DEVICE, POLICY, dialects),
        budget_key(tasks, DEVICE, Policy(margin=0.5), dialects),
        budget_key(tasks, DEVICE, POLICY, dialects[:1]),
        budget_key(tasks, DEVICE, POLICY, [("aten", "1"), ("tvm", "3")]),
    ]
    assert len({key, *others}) == 5


def test_the_meter_charges_the_time_between_results_on_top_of_earlier_runs() -> None:
    clock = Clock()
    meter = Meter(Budget(100.0, 5), 40.0, 2, clock)
    clock.now += 7
    assert meter.charge(5.0, trials=1) == 7
    assert meter.charge(3.0) == 3  # a replay, whose clock stands still
    assert (meter.seconds_left, meter.trials_left) == (50, 2)
    assert meter.room() == pytest.approx(53)
    clock.now += 10
    assert meter.seconds_left == 50
    assert meter.stop_after() == pytest.approx(47)
    assert (meter.room(8), meter.stop_after(8)) == (42, 32)
    assert meter.elapsed == 17


def test_a_meter_without_limits_admits_everything() -> None:
    meter = Meter(Budget(), 1e9, 10**9, Clock())
    assert meter.open
    assert meter.room() == math.inf


@pytest.mark.parametrize(("spent", "opens"), [(0.0, True), (94.0, True), (96.0, False), (101.0, False)])
def test_the_rest_of_a_spent_budget_is_not_worth_a_start(spent: float, opens: bool) -> None:
    assert Meter(Budget(100.0), spent, 1, Clock()).open is opens
