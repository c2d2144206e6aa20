"""Ratings of candidates, and how soon each strategy finds a good one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from search_world import workload

from raftune.cost_model import Prediction
from raftune.measurement import Outcome, Status
from raftune.search.state import TaskState
from raftune.search.strategies import Belief, Exhaustive, ModelGuided, Random, Strategy, expected_gain
from raftune.workload import Candidate

DEFAULT = Candidate("aten", "1.0", {"formulation": "default"})


def state(size: int, candidates: Sequence[Candidate], default_us: float = 100.0) -> TaskState:
    outcomes = {DEFAULT.digest: (DEFAULT, Outcome(Status.OK, default_us, default_us, default_us))}
    return TaskState(workload(size), 1, [DEFAULT, *candidates], margin=0.03, outcomes=outcomes, rematches={})


@pytest.mark.parametrize(("mean", "std", "bar"), [(0.0, 0.3, 0.97), (-0.5, 0.1, 0.97), (0.7, 0.4, 0.5), (-1.0, 0.0, 0.97)])
def test_expected_gain_is_the_mean_shortfall_below_the_bar(mean: float, std: float, bar: float) -> None:
    draw = random.Random(1)
    simulated = fmean(max(bar - math.exp(draw.gauss(mean, std)), 0.0) for _ in range(40_000))
    assert expected_gain(Belief(mean, std), bar) == pytest.approx(simulated, abs=3e-3)


def test_expected_gain_is_zero_for_the_hopeless_and_never_negative() -> None:
    assert expected_gain(Belief(800.0, 0.05), 0.97) == 0.0
    assert expected_gain(Belief(0.5, 0.05), 0.97) >= 0.0


def test_a_dialect_that_keeps_losing_promises_less_than_one_that_wins() -> None:
    strategy = ModelGuided(None, tuple)
    for size in range(1, 5):
        candidates = [Candidate("alpha", "1.0"), Candidate("beta", "1.0")]
        task = state(size, candidates)
        for candidate, us in zip(candidates, (60.0, 150.0), strict=True):
            task.add(candidate, Outcome(Status.OK, us))
            strategy.learn(task, candidate, task.results[candidate.digest][1])
    task = state(9, candidates)
    for candidate in candidates:
        task.add(candidate, Outcome(Status.OK, 100.0))
    fresh = [Candidate("alpha", "1.0", {"tile": 1}), Candidate("beta", "1.0", {"tile": 1})]
    good, bad = strategy.gains(task, fresh)
    assert good > 2 * bad > 0


@pytest.mark.parametrize(("ratio", "scale"), [(1.0, 0.5), (0.8, 1.0)])
def test_promises_that_were_not_kept_with_one_task_count_for_the_next(ratio: float, scale: float) -> None:
    class Hopeful:
        def fit(self, rows: object) -> None: ...

        def predict(self, workload: object, candidates: Sequence[Candidate]) -> list[Prediction]:
            return [Prediction(log_ratio=-0.1, std=0.1, ok=1.0) for _ in candidates]

    def gain_after(trials: int) -> float:
        strategy = ModelGuided(Hopeful(), lambda: [None] * 40)  # type: ignore[list-item]
        strategy.refresh()
        tiles = [Candidate("alpha", "1.0", {"tile": i}) for i in range(8)]
        for size in range(1, 1 + trials):
            task = state(size, tiles)
            task.add(tiles[0], Outcome(Status.OK, 100.0))
            strategy.gains(task, tiles[1:])
            task.add(tiles[1], Outcome(Status.OK, 100.0 * ratio))
            strategy.learn(task, tiles[1], task.results[tiles[1].digest][1])
        task = state(99, tiles)
        task.add(tiles[0], Outcome(Status.OK, 100.0))
        return strategy.gains(task, tiles[2:3])[0]

    if scale == 1.0:
        assert gain_after(6) == pytest.approx(gain_after(0))
    else:
        assert gain_after(6) < scale * gain_after(0)


def test_random_order_depends_on_the_seed_only() -> None:
    pool = [Candidate("alpha", "1.0", {"tile": i}) for i in range(20)]
    task = state(1, pool)
    assert Random(3).gains(task, pool) == Random(3).gains(task, pool)
    assert Random(3).gains(task, pool) != Random(4).gains(task, pool)
    gains = Exhaustive().gains(task, pool)
    assert gains == sorted(gains, reverse=True)


class QuadraticModel:
    """Least squares over squares of the logarithms of tile sizes: learns the synthetic landscape below, as XGBoost would."""

    def fit(self, rows: Iterable[Any]) -> None:
        points = [(r.candidate, r.outcome.time_us) for r in rows if r.candidate.config.get("x")]
        design = np.array([self._features(c) for c, _ in points])
        self.weights = np.linalg.lstsq(design, np.array([math.log(us / 100.0) for _, us in points]), rcond=None)[0]

    def predict(self, workload: Any, candidates: Sequence[Candidate]) -> list[Prediction]:
        return [Prediction(float(self._features(c) @ self.weights), 0.1) for c in candidates]

    def _features(self, candidate: Candidate) -> np.ndarray:
        x, y = math.log2(candidate.config["x"]), math.log2(candidate.config["y"])
        return np.array([1, x, y, x * x, y * y, x * y])


def synthetic_time(candidate: Candidate, rough: random.Random) -> float:
    x, y = math.log2(candidate.config["x"]), math.log2(candidate.config["y"])
    return 50 * math.exp(0.06 * (x - 5) ** 2 + 0.05 * (y - 2) ** 2 + 0.02 * rough.random())


def trials_until_good(strategy: Strategy, rows: list[Any], seed: int) -> int:
    """Trials that a greedy run needs to come within 5% of the best of 144 candidates."""
    pool = [Candidate("alpha", "1.0", {"x": 2**i, "y": 2**j}) for i in range(12) for j in range(12)]
    random.Random(seed).shuffle(pool)
    rough = random.Random(seed + 100)
    times = {c.digest: synthetic_time(c, rough) for c in pool}
    task = state(seed + 1, pool)
    for count in range(1, len(pool) + 1):
        strategy.refresh()
        gains = strategy.gains(task, task.pool)
        chosen = task.pool[max(range(len(gains)), key=gains.__getitem__)]
        outcome = Outcome(Status.OK, times[chosen.digest])
        task.add(chosen, outcome)
        rows.append(SimpleNamespace(candidate=chosen, outcome=outcome))
        strategy.learn(task, chosen, outcome)
        if times[chosen.digest] <= min(times.values()) / 0.95:
            return count
    raise AssertionError("unreachable: every candidate was tried")


def test_the_model_finds_a_good_candidate_in_fewer_trials_than_chance() -> None:
    guided, chance = [], []
    for seed in range(7):
        rows: list[Any] = []
        guided.append(trials_until_good(ModelGuided(QuadraticModel(), lambda rows=rows: rows), rows, seed))
        chance.append(trials_until_good(Random(seed), [], seed))
    assert median(guided) < median(chance)
    assert sum(guided) < 0.8 * sum(chance)
