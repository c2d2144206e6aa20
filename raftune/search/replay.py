"""A search in a recorded log instead of on a device: the same tuner, with outcomes looked up and time that only counts."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from raftune.device import Device
from raftune.dialects import registry
from raftune.dialects.base import Dialect
from raftune.dialects.recorded import recorded_dialect
from raftune.graph.workloads import Task
from raftune.log import LogError, TrainingRow, TuningLog
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.search.budget import Budget
from raftune.search.events import Progress
from raftune.search.result import TuneResult
from raftune.search.strategies import Strategy
from raftune.search.tuner import tune
from raftune.workload import Candidate, Workload

# What a dialect takes for proposing some candidates; the log has no row for it.
_PROPOSING_S = 0.3


class Recording:
    """The outcomes of one device in a log, and of one version of each dialect, for workloads with a timed default.

    Of several the one with the most rows is taken. Raises :class:`LogError` if nothing is left.
    """

    def __init__(self, log: TuningLog) -> None:
        rows = list(log.training_rows())
        devices = Counter(row.device_digest for row in rows).most_common(1)
        rows = [row for row in rows if row.device_digest == devices[0][0]]
        found = Counter((row.candidate.dialect, row.candidate.version) for row in rows)
        # Those with more rows come last, and stay.
        versions = {dialect: version for (dialect, version), _ in reversed(found.most_common())}
        rows = [row for row in rows if row.candidate.version == versions[row.candidate.dialect]]
        timed = {row.workload for row in rows if row.is_default and row.outcome.status is Status.OK}
        self.rows: list[TrainingRow] = [row for row in rows if row.workload in timed]
        device = next((row.device for row in self.rows), None)
        if device is None:
            raise LogError(f"{log.path} records no workload with a timed default: there is nothing to simulate")
        self.device: Device = device
        self.weights: Mapping[str, float] = log.weights()
        self.outcomes = {(row.workload.digest, row.candidate.digest): row.outcome for row in self.rows}

    @property
    def workloads(self) -> list[Workload]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def tasks(self) -> list[Task]:
        """Every workload as a task, with the weight it last had."""
        return [Task(workload, max(1, round(self.weights.get(workload.digest, 1.0)))) for workload in self.workloads]

    def dialects(self) -> list[Dialect]:
        """Stand-ins for what was recorded, in the order of the installed dialects."""
        found: dict[str, dict[Workload, list[Candidate]]] = defaultdict(lambda: defaultdict(list))
        for row in sorted(self.rows, key=lambda row: not row.is_default):
            found[row.candidate.dialect][row.workload].append(row.candidate)
        installed = registry.installed()
        names = sorted(found, key=lambda name: (-installed[name].priority if name in installed else 0, name))
        return [recorded_dialect(name, len(names) - i, found[name], installed.get(name)) for i, name in enumerate(names)]


class ReplayMeasurer:
    """A measurer that looks outcomes up; its clock moves by what they once cost."""

    def __init__(self, recording: Recording) -> None:
        self._outcomes = recording.outcomes
        self._now = 0.0

    def clock(self) -> float:
        return self._now

    def measure(
        self,
        workload: Workload,
        candidate: Candidate,
        *,
        default: tuple[Candidate, float] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        del default
        outcome = self._outcomes[workload.digest, candidate.digest]
        if timeout is not None and outcome.cost_s > timeout:
            outcome = Outcome(Status.TIMEOUT, message=f"took longer than {timeout:.1f} s", cost_s=timeout)
        self._now += outcome.cost_s
        return outcome

    def prepare(self, workload: Workload, candidates: Sequence[Candidate]) -> None:
        """Nothing is built."""

    def rematch(self, workload: Workload, candidates: Sequence[Candidate], default: Candidate) -> list[Rematch]:
        """As the measurements were: the recording knows no better."""
        default_us = self._outcomes[workload.digest, default.digest].time_us
        found = []
        for candidate in candidates:
            outcome = self._outcomes[workload.digest, candidate.digest]
            cost_s = max(outcome.cost_s - outcome.build_s, 0.0)
            self._now += cost_s
            if outcome.time_us is None or default_us is None:
                found.append(Rematch(outcome.status, message=outcome.message, cost_s=cost_s))
                continue
            ratio = outcome.time_us / default_us
            found.append(Rematch(Status.OK, outcome.time_us, default_us, ratio, ratio, outcome.repeats, cost_s=cost_s))
        return found

    def sample(
        self,
        workload: Workload,
        dialect_name: str,
        count: int,
        seed: int,
        *,
        parents: Sequence[Candidate] = (),
        timeout: float | None = None,
    ) -> list[Candidate]:
        del timeout
        self._now += _PROPOSING_S
        dialect = registry.get(dialect_name)
        if parents:
            configs = dialect.vary(workload, [parent.config for parent in parents], count, seed)
        else:
            configs = dialect.sample(workload, count, seed)
        return [registry.candidate(dialect, config) for config in configs]


def simulate(
    recording: Recording,
    *,
    tasks: Sequence[Task] | None = None,
    budget: Budget,
    policy: Policy | None = None,
    dialects: Sequence[str] | None = None,
    strategy: Strategy | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    log: TuningLog | None = None,
) -> TuneResult:
    """Tune ``tasks`` (all by default; those not recorded are left out) as if on the recorded device.

    ``log`` is what earlier simulations left, and is added to; by default an empty one that is thrown away: what was simulated
    is not to be taken for measured. Raises :class:`LogError` if no task was recorded.
    """
    known = set(recording.workloads)
    chosen = [dataclasses.replace(task, parts=()) for task in (tasks or recording.tasks()) if task.workload in known]
    if not chosen:
        raise LogError("none of the tasks was recorded: simulate with a log of this model")
    measurer = ReplayMeasurer(recording)
    with ExitStack() as stack:
        stack.enter_context(registry.standing_in(recording.dialects()))
        if log is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log = stack.enter_context(TuningLog(Path(folder) / "simulated.sqlite"))
        return tune(
            chosen,
            log,
            device=recording.device,
            policy=policy or Policy(),
            budget=budget,
            dialects=dialects,
            seed=seed,
            measurer=measurer,
            progress=progress,
            strategy=strategy,
            clock=measurer.clock,
        )
