from collections.abc import Callable

import pytest

from raftune.device import Device
from raftune.dialects import default_candidate
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.workload import Candidate, Workload

POLICY = Policy()


@pytest.fixture
def record_win() -> Callable[..., None]:
    """Writes what a search writes for a task: the default's time, a candidate's time, and their rematch."""

    def record(log: TuningLog, workload: Workload, device: Device, winner: Candidate | None = None, ratio: float = 0.5) -> None:
        default = default_candidate(workload)
        log.record(workload, default, device, POLICY, Outcome(Status.OK, 100.0, 99.0, 101.0, 10), is_default=True)
        if winner is not None:
            time = 100.0 * ratio
            log.record(workload, winner, device, POLICY, Outcome(Status.OK, time, time, time, 10))
            log.record_rematch(
                workload, winner, default, device, POLICY, Rematch(Status.OK, time, 100.0, ratio, ratio + 0.01, 15)
            )

    return record
