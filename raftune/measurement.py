"""What a measurement says and under which policy it was taken: shared words of ``measure/``, ``log/`` and ``search/``."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from raftune.workload import canonical_json, digest_text


class Status(enum.StrEnum):
    """How a candidate ended; every one of them is recorded."""

    OK = "ok"
    WRONG = "wrong"  # values, shape, strides, an unexpected write, or an output that is not fresh
    CRASH = "crash"  # the process died, or the kernel raised
    TIMEOUT = "timeout"
    OOM = "oom"
    UNSUPPORTED = "unsupported"
    BUILD_ERROR = "build_error"
    NOISY = "noisy"  # the machine would not be quiet: no verdict, measured again by a later run


@dataclass(frozen=True, slots=True)
class Policy:
    """How candidates are measured; part of a measurement's identity. Times in seconds unless the name says otherwise.

    ``quantile`` is the statistic of the default's time: a low one resists the one-sided noise of virtual cores that are taken
    away. Its repeats stop when the 95% confidence interval is within ``precision`` of it, or after ``max_seconds``. Candidates
    are timed in turns with the default, and their times are the median ratio on its scale. ``margin`` is what a candidate must
    win by, in a longer interleaved rematch, before the default is left.
    """

    version: int = 1
    quantile: float = 0.25
    precision: float = 0.02
    min_repeats: int = 10
    max_repeats: int = 2000
    max_seconds: float = 0.5
    rematch_rounds: int = 15
    margin: float = 0.03
    timeout: float = 60.0
    memory_limit_mb: int = 8192
    pinned: bool = True

    @property
    def canonical(self) -> str:
        return canonical_json(dataclasses.asdict(self))

    @property
    def digest(self) -> str:
        return digest_text(self.canonical)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of measuring one candidate. ``time_us``, ``low_us``, ``high_us``: statistic and its 95% interval, for ``ok``.

    ``max_error`` is the largest error against the float64 reference in units of the tolerance (at most 1 passes).
    ``cost_s`` is the wall time that obtaining this outcome took, building included: what the budget is charged.
    """

    status: Status
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    repeats: int = 0
    max_error: float | None = None
    message: str = ""
    build_s: float = 0.0
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rematch:
    """One candidate against the default, interleaved in one process.

    ``ratio`` is candidate time over default time (median over rounds of the pairwise ratio), ``ratio_high`` its upper 95%
    bound; a candidate wins when ``ratio_high <= 1 - margin``. ``status`` other than ``ok`` means that it did not finish.
    """

    status: Status
    time_us: float | None = None
    default_us: float | None = None
    ratio: float | None = None
    ratio_high: float | None = None
    rounds: int = 0
    message: str = ""
    cost_s: float = 0.0
