"""The tuner: measures defaults first, then what promises most for the time it takes, and settles winners by rematch."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from heapq import nlargest

from raftune.cost_model import CostModel, NotEnoughData, train
from raftune.device import Device
from raftune.dialects import registry
from raftune.dialects.base import Dialect
from raftune.graph.workloads import Task
from raftune.log import TuningLog
from raftune.measure import Measurer as ProcessMeasurer
from raftune.measurement import Outcome, Policy, Status
from raftune.search.budget import Budget, Meter, budget_key
from raftune.search.costs import DEADLY, Costs
from raftune.search.events import Measured, Progress, Rematched, Sampled, SearchStarted, TaskStarted
from raftune.search.protocols import Measurer
from raftune.search.relatives import Relatives
from raftune.search.result import Stop, TaskResult, TaskStatus, TuneResult
from raftune.search.sampling import Sampler
from raftune.search.scheduler import Arm, Scheduler
from raftune.search.state import TaskState
from raftune.search.strategies import ModelGuided, Strategy
from raftune.workload import Candidate, Workload

# Rematches may hold back this share of the time budget, for the tasks that make up so much of what can be saved.
_RESERVE_SHARE = 0.4
_RESERVE_SAVING = 0.95
# Some sampled schedules keep a compiler busy for minutes. There are always others: these get less than the policy grants.
_SAMPLED_TIMEOUT_S = 15.0
# So many of what may come next are built ahead.
_AHEAD = 3


def tune(
    tasks: Sequence[Task],
    log: TuningLog,
    *,
    device: Device,
    policy: Policy,
    budget: Budget,
    dialects: Sequence[str] | None = None,
    seed: int = 0,
    measurer: Measurer | None = None,
    progress: Progress | None = None,
    strategy: Strategy | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Search implementations for ``tasks`` until ``budget`` is spent, recording every outcome in ``log`` at once.

    The budget adds up over all runs with the same tasks, device, policy and dialects; nothing that the log holds is measured
    again. ``dialects`` narrows and orders those that are enabled; an unknown name raises
    :class:`~raftune.dialects.registry.UnknownDialect`. Without ``measurer`` a worker process is used. On KeyboardInterrupt
    the results so far are returned, ``stopped`` says so, and only the candidate in flight is lost.
    """
    with ExitStack() as stack:
        if dialects is not None:
            stack.enter_context(registry.with_dialects(dialects))
        if measurer is None:
            measurer = stack.enter_context(ProcessMeasurer(policy, device))
        search = _Search(
            tasks,
            log,
            device=device,
            policy=policy,
            budget=budget,
            seed=seed,
            measurer=measurer,
            progress=progress,
            strategy=strategy,
            clock=clock,
        )
        return search.run()


class _Search:
    """One run of :func:`tune`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        log: TuningLog,
        *,
        device: Device,
        policy: Policy,
        budget: Budget,
        seed: int,
        measurer: Measurer,
        progress: Progress | None,
        strategy: Strategy | None,
        clock: Callable[[], float],
    ) -> None:
        self._log, self._device, self._policy = log, device, policy
        self._measurer = measurer
        self._notify = progress or (lambda event: None)
        enabled = registry.enabled()
        self._versions = {(d.name, d.version()) for d in enabled}
        self._prepared = {d.name for d in enabled if type(d).prepare is not Dialect.prepare}
        weights: dict[Workload, int] = {}
        parts: dict[Workload, Sequence[Workload]] = {}
        for task in tasks:
            weights[task.workload] = weights.get(task.workload, 0) + task.weight
            parts[task.workload] = task.parts
        self._key = budget_key(weights, device, policy, self._versions)
        spent = log.spent(self._key)
        self._meter = Meter(budget, spent.seconds, spent.trials, clock)
        settings = {"seconds": budget.seconds, "trials": budget.trials, "seed": seed, "dialects": [d.name for d in enabled]}
        self._run_id = log.start_run(self._key, settings)
        log.record_tasks(self._run_id, list(weights.items()))
        self._states = [self._load(workload, weight) for workload, weight in weights.items()]
        known = {state.workload: state for state in self._states}
        for state in self._states:
            if all(part in known for part in parts[state.workload]):
                state.parts = [known[part] for part in parts[state.workload]]
        self._hits = sum(len(state.results) for state in self._states)
        self._seed = seed
        self._learns = strategy is None
        self._strategy = strategy or self._model_guided()
        self._costs = Costs()
        self._sampler = Sampler(enabled, self._strategy, Relatives(partial(log.training_rows, None)), seed, clock)
        self._scheduler = Scheduler(self._states, self._strategy, self._sampler, self._costs)
        self._measured = self._rematched = 0
        self._recall()

    def run(self) -> TuneResult:
        self._notify(
            SearchStarted(
                tasks=len(self._states),
                candidates=sum(len(s.pool) for s in self._states),
                hits=self._hits,
                seconds_left=self._meter.seconds_left,
                trials_left=self._meter.trials_left,
            )
        )
        try:
            self._measure_defaults()
            while self._step():
                pass
            stopped = Stop.FINISHED if self._finished() else Stop.BUDGET
            self._store_model()
        except KeyboardInterrupt:
            stopped = Stop.INTERRUPTED
        return TuneResult(
            tasks=tuple(self._result(state) for state in self._states),
            measured=self._measured,
            rematches=self._rematched,
            hits=self._hits,
            seconds=self._meter.elapsed,
            stopped=stopped,
            key=self._key,
        )

    def _load(self, workload: Workload, weight: int) -> TaskState:
        listed = registry.candidates(workload)
        known = self._log.outcomes(workload, self._device, self._policy)
        return TaskState(
            workload,
            weight,
            listed,
            margin=self._policy.margin,
            outcomes={digest: pair for digest, pair in known.items() if self._usable(pair[0])},
            rematches=self._log.rematches(workload, self._device, self._policy, listed[0]),
        )

    def _usable(self, candidate: Candidate) -> bool:
        """Whether the candidate is of an enabled dialect, at the version installed here."""
        return (candidate.dialect, candidate.version) in self._versions

    def _model_guided(self) -> ModelGuided:
        """The log's rows of other devices are learned from too: the model knows which device a row is of."""
        return ModelGuided(CostModel(seed=self._seed, device=self._device), self._log.training_rows)

    def _recall(self) -> None:
        """Teach strategy and costs what the log holds of these tasks, defaults first."""
        known = [(state, c, o) for state in self._states for c, o in state.results.values()]
        for state, candidate, outcome in sorted(known, key=lambda row: row[1] != row[0].default):
            self._strategy.learn(state, candidate, outcome)
            self._costs.observe(state, candidate, outcome)
        for state in self._states:
            for candidate, rematch in state.rematches.values():
                self._costs.observe_rematch(state, candidate, rematch)

    def _store_model(self) -> None:
        """Leave a model trained on all that is now known beside the log, for the next run and for the compiler."""
        if not (self._learns and self._measured):
            return
        try:
            train(self._log, device=self._device, seed=self._seed)
        except NotEnoughData:  # a first, small log
            return
        except OSError as error:
            warnings.warn(f"the cost model could not be stored beside {self._log.path}: {error}", stacklevel=3)

    def _measure_defaults(self) -> None:
        """The default of each task, heaviest by weight and size first; the noisy ones once more at the end.

        Regions wait: whether one is worth opening is known when its members' times are.
        """
        missing = [state for state in self._states if state.default_outcome is None and not state.parts]
        missing.sort(key=lambda state: -state.weight * state.size)
        for index, state in enumerate(missing, 1):
            if not self._may_measure():
                return
            self._notify(TaskStarted(state.workload, state.weight, index, len(missing)))
            self._measure(state, state.default)
        for state in missing:
            if state.default_outcome is None and self._may_measure():
                self._measure(state, state.default)

    def _step(self) -> bool:
        """Do the most useful thing that still fits, by what it may save for the time it takes; ``False`` if there is none.

        Time for the rematches that are due is held back: what was found but not compared with the default is worth nothing.
        """
        pending = sorted((s for s in self._states if self._affordable(s)), key=lambda s: -s.saving_us())
        reserve = self._reserve(pending)
        room = self._meter.room(reserve) if self._may_measure() else -1.0
        affordable = [arm for arm in self._scheduler.arms() if arm.cost_s <= room] if room >= 0 else []
        best = max(affordable, key=lambda arm: arm.value, default=None)
        if best is None:
            return bool(pending) and self._rematch(pending[0])
        for state in pending:
            if state.saving_us() >= best.value * self._costs.rematch(state, self._affordable(state)):
                return self._rematch(state)
        self._prepare(best, affordable)
        self._try(best, reserve)
        return True

    def _prepare(self, best: Arm, others: Sequence[Arm]) -> None:
        """Have those built that are likely to come after ``best``."""
        likely = (a for a in others if a is not best and a.candidate is not None and a.dialect in self._prepared)
        for arm in nlargest(_AHEAD, likely, key=lambda a: a.value):
            if arm.candidate is not None:
                self._measurer.prepare(arm.task.workload, [arm.candidate])

    def _reserve(self, pending: Sequence[TaskState]) -> float:
        """Seconds to hold back for the rematches of the tasks that matter, given heaviest first; 0 without a time limit."""
        limit = self._meter.budget.seconds
        if limit is None:
            return 0.0
        total = sum(state.saving_us() for state in pending)
        reserve = covered = 0.0
        for state in pending:
            if covered >= _RESERVE_SAVING * total:
                break
            reserve += self._costs.rematch(state, self._affordable(state))
            covered += state.saving_us()
        return min(reserve, _RESERVE_SHARE * limit)

    def _affordable(self, state: TaskState) -> list[Candidate]:
        """Those of the task's candidates for a rematch that fit into what is left, the fastest having the first call on it."""
        group: list[Candidate] = []
        for candidate in state.to_rematch():
            if self._costs.rematch(state, [*group, candidate]) <= self._meter.room():
                group.append(candidate)
        return group

    def _may_measure(self) -> bool:
        return self._meter.open and self._meter.trials_left >= 1

    def _try(self, arm: Arm, reserve: float) -> None:
        if arm.candidate is not None:
            self._measure(arm.task, arm.candidate, reserve)
        else:
            timeout = min(self._policy.timeout, self._meter.stop_after(reserve))
            drawn = self._sampler.draw(self._measurer, arm.task, arm.dialect, limit=self._meter.trials_left, timeout=timeout)
            self._notify(Sampled(arm.task.workload, arm.dialect, len(drawn)))

    def _measure(self, state: TaskState, candidate: Candidate, reserve: float = 0.0) -> None:
        stop_after = self._meter.stop_after(reserve)
        sampled = candidate.digest not in state.enumerated
        limit = min(self._policy.timeout, _SAMPLED_TIMEOUT_S) if sampled else self._policy.timeout
        capped = stop_after < limit
        against = None if candidate == state.default or state.default_us is None else (state.default, state.default_us)
        timeout = min(stop_after, limit) if capped or sampled else None
        outcome = self._measurer.measure(state.workload, candidate, default=against, timeout=timeout)
        if capped and outcome.status is Status.TIMEOUT:
            # Within the policy's own timeout it might have finished: that is no verdict on the candidate.
            message = f"stopped after {stop_after:.1f} s to keep to the budget"
            outcome = dataclasses.replace(outcome, status=Status.NOISY, message=message)
        outcome = dataclasses.replace(outcome, cost_s=self._meter.charge(outcome.cost_s, trials=1))
        is_default = candidate == state.default
        self._log.record(state.workload, candidate, self._device, self._policy, outcome, self._run_id, is_default=is_default)
        self._measured += 1
        state.add(candidate, outcome)
        if sampled and outcome.status in DEADLY:
            state.drop_samples(candidate.dialect)
        if outcome.status is not Status.NOISY:
            self._strategy.learn(state, candidate, outcome)
            self._costs.observe(state, candidate, outcome)
        self._notify(self._measured_event(state, candidate, outcome))

    def _measured_event(self, state: TaskState, candidate: Candidate, outcome: Outcome) -> Measured:
        return Measured(
            workload=state.workload,
            weight=state.weight,
            candidate=candidate,
            outcome=outcome,
            is_default=candidate == state.default,
            ratio=outcome.time_us / state.default_us if outcome.time_us and state.default_us else None,
            measured=self._measured,
            seconds_left=self._meter.seconds_left,
        )

    def _rematch(self, state: TaskState) -> bool:
        """Compare the task's best with its default; ``False`` if the time for it has run out meanwhile."""
        group = self._affordable(state)
        if not group:
            return False
        rematches = self._measurer.rematch(state.workload, group, state.default)
        share = self._meter.charge(sum(r.cost_s for r in rematches)) / len(group)
        for candidate, measured in zip(group, rematches, strict=True):
            rematch = dataclasses.replace(measured, cost_s=share)
            self._log.record_rematch(
                state.workload, candidate, state.default, self._device, self._policy, rematch, self._run_id
            )
            self._rematched += 1
            state.add_rematch(candidate, rematch)
            self._costs.observe_rematch(state, candidate, rematch)
            self._notify(Rematched(state.workload, candidate, rematch, state.won(candidate)))
        return True

    def _finished(self) -> bool:
        # A region whose members could not be timed is never opened, and nothing waits for it.
        waiting = any(s.default_outcome is None and s.default in s.pool and not s.parts for s in self._states)
        return not waiting and self._scheduler.exhausted() and not any(s.to_rematch() for s in self._states)

    def _result(self, state: TaskState) -> TaskResult:
        winner = self._log.winner(state.workload, self._device, self._usable)
        if winner is not None:
            status = TaskStatus.DEFAULT if winner.is_default else TaskStatus.WON
            return TaskResult(state.workload, state.weight, status, winner.default_us, winner.candidate, winner.time_us)
        outcome = state.default_outcome
        if state.default_us is not None:
            return TaskResult(
                state.workload, state.weight, TaskStatus.DEFAULT, state.default_us, state.default, state.default_us
            )
        if outcome is not None:
            return TaskResult(state.workload, state.weight, TaskStatus.FAILED, reason=f"{outcome.status}: {outcome.message}")
        if state.is_retry(state.default):
            return TaskResult(state.workload, state.weight, TaskStatus.UNMEASURED, reason="unmeasured: too noisy, next run")
        return TaskResult(state.workload, state.weight, TaskStatus.UNMEASURED)
