"""Contention guard: fixed work before and after a timing tells whether the processor ran at the speed it is known to have.

The timer sees cores that are taken away by the operating system; the guard sees what leaves no trace in CPU time: a neighbour
on the same physical core, a lower clock, a hypervisor that took the core.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from raftune.measure.timer import SYSTEM_CLOCK, Clock

T = TypeVar("T")

# About 1 ms of arithmetic in the first-level cache.
_WORK = bytes(range(256)) * 64
_ROUNDS_PER_PROBE = 12
_PROBES = 3
# Slower than this times the reference is a disturbance; clocks of virtual machines wander by 10-20% on their own.
_SLOWDOWN = 1.3
# The reference is the best of the last probes: a machine that became slower for good is believed after some retries.
_MEMORY = 12
_BACKOFF_S = (0.1, 0.4)
# After this many timings in a row that stayed disturbed, waiting is known not to help: one attempt, until one is quiet.
_PATIENCE = 3


@dataclass(frozen=True, slots=True)
class Guarded(Generic[T]):
    """The last attempt's value, and why it must not be believed (``None``: it may)."""

    value: T
    disturbance: str | None


class ContentionGuard:
    """Repeats a timing until the processor was quiet around it, a bounded number of times."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, work: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._work = work or _calibration_work
        self._disturbed_in_a_row = 0
        self._recent: deque[int] = deque(maxlen=_MEMORY)
        self.probe()

    def probe(self) -> int:
        """Nanoseconds that the calibration work takes now: the best of three, since a probe may itself be interrupted."""
        best = min(self._time_once() for _ in range(_PROBES))
        self._recent.append(best)
        return best

    def run(
        self,
        timing: Callable[[], T],
        objection: Callable[[T], str | None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Guarded[T]:
        """Run ``timing``, again after a pause while it was disturbed or ``objection`` names a reason: three times at most.

        On a machine that stays disturbed for several timings, once.
        """
        pauses = iter(_BACKOFF_S if self._disturbed_in_a_row < _PATIENCE else ())
        while True:
            reference = min(self._recent)
            before = self.probe()
            value = timing()
            slowdown = max(before, self.probe()) / reference
            disturbance = objection(value)
            if disturbance is None and slowdown > _SLOWDOWN:
                disturbance = f"the processor ran {slowdown:.1f} times slower than it did before"
            if disturbance is None or (pause := next(pauses, None)) is None:
                self._disturbed_in_a_row = 0 if disturbance is None else self._disturbed_in_a_row + 1
                return Guarded(value, disturbance)
            sleep(pause)

    def _time_once(self) -> int:
        start = self._clock.wall()
        self._work()
        return self._clock.wall() - start


def _calibration_work() -> None:
    for _ in range(_ROUNDS_PER_PROBE):
        hashlib.sha256(_WORK).digest()
