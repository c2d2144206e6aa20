"""Spaces too large to list: when a dialect is asked for samples, and when no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from search_world import World

from raftune.measurement import Status
from raftune.search import Budget, Stop

DEFAULT: dict[str, Any] = {"formulation": "default"}


def sampled_space(count: int, seed: int) -> list[dict[str, Any]]:
    return [{"schedule": 1000 * seed + i} for i in range(count)]


def test_sampling_stops_where_it_does_not_improve(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "deep", {"schedule": -1}, time_us=70.0)
    result = world.tune({1: 1})
    assert result.stopped is Stop.FINISHED
    sampled = [c for _, c in world.measurer.measured if c.config.get("schedule", -1) >= 0]
    assert len(sampled) == len(set(sampled)) == 24
    assert result.tasks[0].best_us == 70.0
    again = world.tune({1: 1})
    assert (again.measured, again.hits) == (0, 26)
    assert len(world.measurer.sampled) == 4


def test_a_sampled_space_that_stalls_a_worker_is_left_alone(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "deep", {"schedule": -1}, time_us=90.0)
    for config in sampled_space(1000, 0):
        world.set(1, "deep", config, time_us=50.0, cost_s=45.0)
    start = world.clock.now
    world.tune({1: 1}, Budget(seconds=1000.0))
    assert world.clock.now - start < 45.0
    assert len([c for _, c in world.measurer.measured if c.config.get("schedule", -1) >= 0]) == 1
    assert world.tune({1: 1}, Budget(seconds=1000.0)).measured == 0


def test_sampling_goes_on_while_it_improves(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "deep", {"schedule": -1}, time_us=120.0)
    for seed in range(30):
        for i in range(24):
            world.set(1, "deep", {"schedule": 1000 * seed + i}, time_us=max(120.0 - seed * 3, 60.0))
    result = world.tune({1: 1})
    assert result.tasks[0].best_us == 60.0
    assert 20 <= len(world.measurer.measured) <= 60


def test_a_dialect_far_behind_in_a_large_task_is_not_sampled(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "aten", DEFAULT, time_us=5000.0)
    world.set(1, "deep", {"schedule": -1}, time_us=20000.0)
    assert world.tune({1: 1}).measured == 2
    assert world.measurer.sampled == []


def test_a_space_that_repeats_itself_is_left(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": 0}], lambda count, seed: [{"schedule": i} for i in range(3)])
    for i in range(3):
        world.set(1, "deep", {"schedule": i}, time_us=80.0 - 10 * i)
    result = world.tune({1: 1})
    assert result.stopped is Stop.FINISHED
    assert (result.measured, result.tasks[0].best_us) == (4, 60.0)


def test_a_noisy_machine_does_not_sample_for_ever(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "deep", {"schedule": -1}, time_us=90.0)
    for seed in range(30):
        for i in range(24):
            world.set(1, "deep", {"schedule": 1000 * seed + i}, status=Status.NOISY)
    result = world.tune({1: 1})
    assert result.measured == 2 + 2 * 6


def test_samples_evolve_from_the_fastest(world: World) -> None:
    """Draws never come below 80; only children of children do, each a little faster than its parent."""
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    world.set(1, "deep", {"schedule": -1}, time_us=90.0)
    for seed in range(200):
        for i in range(24):
            world.set(1, "deep", {"schedule": 1000 * seed + i}, time_us=80.0 + i)
    generations: dict[int, int] = {}

    def children(parents: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        found = []
        for parent in parents[: count // 2]:
            origin = parent["schedule"]
            depth = generations.get(origin, 0) + 1
            child = {"schedule": 10**6 * depth + origin % 10**6}
            generations[child["schedule"]] = depth
            world.set(1, "deep", child, time_us=max(80.0 - 4 * depth, 60.0))
            found.append(child)
        return found

    world.variations["deep"] = children
    result = world.tune({1: 1})
    assert result.tasks[0].best_us is not None
    assert result.tasks[0].best_us <= 68.0
    fastest = {c: t.time_us for (_, d, c), t in world.truths.items() if d == "deep"}
    last = [fastest[c.canonical_config] for c in world.measurer.varied[-1]]
    assert last == sorted(last)
    assert last[0] == result.tasks[0].best_us


def test_a_search_starts_from_what_was_fastest_for_the_closest_relatives(world: World) -> None:
    world.add_dialect("deep", 50, lambda size: [{"schedule": -1}], sampled_space)
    for size, fastest in ((4, 2), (64, 501)):
        world.set(size, "deep", {"schedule": -1}, time_us=50.0)
        world.set(size, "deep", {"schedule": fastest}, time_us=20.0)
    world.variations["deep"] = lambda parents, count: [*parents, *({"schedule": 500 + i} for i in range(count))]
    for size in (4, 64):
        world.tune({size: 1}, Budget(trials=20))
    world.set(8, "deep", {"schedule": -1}, time_us=50.0)
    world.set(8, "deep", {"schedule": 2}, time_us=10.0)
    before, asked = len(world.measurer.measured), len(world.measurer.varied)
    world.tune({8: 1}, Budget(trials=9))
    parents = world.measurer.varied[asked]
    assert parents[0].config == {"schedule": 2}
    assert {"schedule": 501} in [parent.config for parent in parents]
    assert {"schedule": -1} not in [parent.config for parent in parents]
    tried = [candidate.config for _, candidate in world.measurer.measured[before:]]
    assert {"schedule": 2} in tried
