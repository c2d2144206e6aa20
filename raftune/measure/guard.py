"""Contention guard: fixed work says whether the processor runs now at the speed it is known to have.

The timer sees cores that are taken away by the operating system; the guard sees what leaves no trace in CPU time: a neighbour
on the same physical core, a lower clock, a hypervisor that took the core. On a shared host such a core alternates between two
speeds, a factor of almost two apart, for fractions of a second or for many seconds at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from raftune.measure.timer import SYSTEM_CLOCK, Clock

# A product of some 0.1 ms within the second-level cache, and the best of a dozen. It has to be a product, and for a millisecond
# and more: processors lower their clock for wide vector units for milliseconds, so other work would look disturbed after a
# kernel that uses them; and they run wide instructions at a fraction of their speed until that clock is reached.
_SIZE = 160
_TRIES = 12
_FIRST_PROBES = 100
# Slower than this times the reference is a disturbance; clocks of virtual machines wander by 10-20% on their own.
SLOWDOWN = 1.3
# Disturbed for this long without a break, the machine has become slower for good: that is its speed now.
_ADAPT_NS = 30_000_000_000
_PAUSE_S = 0.02


def same_speed(before: float, after: float) -> bool:
    """Whether two looks at :meth:`ContentionGuard.speed` saw the processor in one state: what ran between can be compared."""
    return max(before, after) <= SLOWDOWN * min(before, after)


class ContentionGuard:
    """Tells quiet times from disturbed ones. ``reference_ns`` is what the calibration work takes on a quiet processor."""

    def __init__(
        self,
        clock: Clock = SYSTEM_CLOCK,
        work: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._work = work or _product()
        self._sleep = sleep
        self._disturbed_since: int | None = None
        self._least_since = 0
        self.slowdown = 1.0
        self.reference_ns = min(self._probe() for _ in range(_FIRST_PROBES))

    def believe(self, reference_ns: int) -> None:
        """Take over what an earlier process knows: this one may have started in a disturbed moment."""
        self.reference_ns = min(self.reference_ns, reference_ns)

    def quiet(self) -> bool:
        """Whether the processor runs at its known speed now; ``slowdown`` then says how it was."""
        probe = self._probe()
        now = self._clock.wall()
        if probe <= SLOWDOWN * self.reference_ns:
            self.reference_ns = min(self.reference_ns, probe)
            self._disturbed_since = None
        elif self._disturbed_since is None:
            self._disturbed_since, self._least_since = now, probe
        else:
            self._least_since = min(self._least_since, probe)
            if now - self._disturbed_since > _ADAPT_NS:
                self.reference_ns, self._disturbed_since = self._least_since, None
        self.slowdown = probe / self.reference_ns
        return self._disturbed_since is None and self.slowdown <= SLOWDOWN

    def speed(self) -> float:
        """How many times slower than undisturbed the processor runs now."""
        self.quiet()
        return self.slowdown

    def wait(self, deadline_ns: int) -> bool:
        """Wait for a quiet moment until ``deadline_ns`` on the wall clock; whether one came."""
        while not self.quiet():
            if self._clock.wall() >= deadline_ns:
                return False
            self._sleep(_PAUSE_S)
        return True

    def _probe(self) -> int:
        return min(self._time_once() for _ in range(_TRIES))

    def _time_once(self) -> int:
        start = self._clock.wall()
        self._work()
        return self._clock.wall() - start


def _product() -> Callable[[], None]:
    a, b = torch.ones(_SIZE, _SIZE), torch.ones(_SIZE, _SIZE)
    out = torch.empty(_SIZE, _SIZE)

    def work() -> None:
        torch.mm(a, b, out=out)

    return work
