"""Timing contenders in turns: one after the other in every round, the order alternating, on cores that keep their speed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from bench_process import ContenderFailed

from raftune.measure.guard import ContentionGuard, same_speed

# Rounds are run again if the machine was disturbed, for this many seconds at most in one case.
PATIENCE_S = 120.0
# OpenMP's threads spin for some milliseconds after their last work; what comes next waits until they sleep.
_PAUSE_S = 0.02

Turn = Callable[[], float]
"""One contender's turn in a round: milliseconds of its step. Raises :class:`~bench_process.ContenderFailed`."""


@dataclass
class Times:
    """``milliseconds`` by contender, one for each round; ``failed``: why those that dropped out did.

    ``disturbed`` counts the rounds that count although the cores changed their speed in them.
    """

    milliseconds: dict[str, list[float]]
    failed: dict[str, str] = field(default_factory=dict)
    disturbed: int = 0


class Cores:
    """How fast the cores are that the contenders run on, each looked at from a thread that runs on it alone."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(1)
        self._cores = sorted(os.sched_getaffinity(0))[:threads]
        self._guards = {}
        for core in self._cores:
            with _on(core):
                self._guards[core] = ContentionGuard()

    def speed(self) -> list[float]:
        """Of each core, how many times slower than undisturbed it is now."""
        found = []
        for core, guard in self._guards.items():
            with _on(core):
                found.append(guard.speed())
        return found


def run_rounds(
    turns: Mapping[str, Turn],
    rounds: int,
    speed: Callable[[], list[float]],
    *,
    patience: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Times:
    """Time every contender once in each of ``rounds`` rounds.

    A round in which a core changed its speed is begun again while there is patience (seconds); without any left it counts.
    A contender that fails is out, its times with it.
    """
    left = dict(turns)
    result = Times({name: [] for name in turns})

    def one_round(reverse: bool, strict: bool) -> tuple[dict[str, float], bool]:
        found: dict[str, float] = {}
        before, steady = speed(), True
        for name in list(left)[:: -1 if reverse else 1]:
            try:
                found[name] = left[name]()
            except ContenderFailed as failure:
                result.failed[name] = str(failure)
                del left[name], result.milliseconds[name]
                continue
            sleep(_PAUSE_S)
            steady = steady and all(map(same_speed, before, speed()))
            if strict and not steady:
                break
        return found, steady

    for number in range(rounds):
        while True:
            start, strict = clock(), patience > 0
            found, steady = one_round(reverse=number % 2 == 1, strict=strict)
            if steady or not strict:
                break
            patience -= clock() - start
        result.disturbed += not steady
        for name in left:
            result.milliseconds[name].append(found[name])
    return result


def steps_per_turn(step_ms: float) -> int:
    """As many as fill some 30 ms: a turn's time is their median, and a short step alone would be mostly noise."""
    return max(1, min(10, round(30 / step_ms)))


def median_ms(nanoseconds: list[int]) -> float:
    return statistics.median(nanoseconds) / 1e6


@contextmanager
def _on(core: int) -> Iterator[None]:
    """This thread runs on ``core`` within the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
