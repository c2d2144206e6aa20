"""From the log's rows to what is learned: the logarithm of a candidate's time over the default's, and whether it ran at all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from raftune.cost_model.errors import CostModelWarning
from raftune.cost_model.features import Features, candidate_features, device_features, workload_features
from raftune.device import Device
from raftune.log import TrainingRow
from raftune.measurement import Status
from raftune.workload import Candidate, Workload

Describe = Callable[[Workload, Candidate], Mapping[str, float]]
"""A dialect's own features of a candidate."""

# A ratio beyond 20 is as good or as bad as 20, and would only pull the fit.
_LIMIT = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One candidate of one workload on one device. ``log_ratio`` and ``time_us`` are ``None`` if it failed."""

    workload: Workload
    candidate: Candidate
    device: Device | None
    device_digest: str
    log_ratio: float | None
    time_us: float | None
    default_us: float
    is_default: bool

    @property
    def group(self) -> tuple[str, str]:
        """Samples of one group share a default."""
        return self.device_digest, self.workload.digest


def samples(rows: Iterable[TrainingRow]) -> list[Sample]:
    """Samples in an order that depends on their identity only. Groups without an ok default are left out."""
    kept = [row for row in rows if row.outcome.status is not Status.NOISY]
    defaults: dict[tuple[str, str], float] = {}
    for row in kept:
        # Rows come oldest first: of several versions of the default the newest is what others are compared with.
        if row.is_default and row.outcome.status is Status.OK and row.outcome.time_us:
            defaults[row.device_digest, row.workload.digest] = row.outcome.time_us
    found = []
    for row in kept:
        default_us = defaults.get((row.device_digest, row.workload.digest))
        if default_us is None:
            continue
        time_us = row.outcome.time_us if row.outcome.status is Status.OK else None
        ratio = max(-_LIMIT, min(_LIMIT, math.log(time_us / default_us))) if time_us else None
        found.append(
            Sample(row.workload, row.candidate, row.device, row.device_digest, ratio, time_us, default_us, row.is_default)
        )
    return sorted(found, key=lambda s: (*s.group, s.candidate.digest))


class Describer:
    """Features of a row; what a workload, a device and a candidate add is computed once."""

    def __init__(self, describe: Describe | None = None) -> None:
        self._describe = describe or dialect_features
        self._shared: dict[tuple[str, Device | None], Features] = {}
        self._own: dict[tuple[str, str], Features] = {}

    def __call__(self, workload: Workload, candidate: Candidate, device: Device | None) -> Features:
        key = (workload.digest, device)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = workload_features(workload) | (device_features(device) if device is not None else {})
        own = self._own.get((workload.digest, candidate.digest))
        if own is None:
            own = candidate_features(candidate, self._describe(workload, candidate))
            self._own[workload.digest, candidate.digest] = own
        return shared | own


def dialect_features(workload: Workload, candidate: Candidate) -> Mapping[str, float]:
    """What the installed dialect says about the candidate; nothing if it is not installed here."""
    from raftune.dialects import registry

    dialect = registry.installed().get(candidate.dialect)
    if dialect is None:
        return {}
    try:
        return dialect.features(workload, candidate.config)
    except Exception as error:  # a dialect may be a third party's, and a recorded config a stranger's: the row just says less
        warnings.warn(f"dialect {candidate.dialect} cannot describe a config: {error!r}", CostModelWarning, stacklevel=2)
        return {}
