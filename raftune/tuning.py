"""Tuning a whole model, as the command line does it: capture, collect tasks both ways in, search, race, remember."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from raftune.compiler.backend import asked_tasks
from raftune.compiler.cover import cover
from raftune.compiler.eager import EagerStep
from raftune.compiler.lowering import regions_of
from raftune.compiler.plan import recommended_plan
from raftune.compiler.profile import Profile, profile_step
from raftune.compiler.proposals import proposed_regions, proposed_tasks
from raftune.compiler.selector import Selector
from raftune.compiler.step import compile_step
from raftune.device import Device, cuda_architecture, current_device, targeting
from raftune.dialects import registry
from raftune.graph import CaptureError, Task, TrainingGraph, capture, merge_tasks, tasks_of
from raftune.log import LogError, TuningLog
from raftune.measure import Measurer
from raftune.measure.race import RaceResult
from raftune.measurement import Policy
from raftune.models import Target
from raftune.racing import race_in_child
from raftune.search import Budget, Progress, Racing, Recording, Stop, TuneResult, simulate, tune
from raftune.targets import TargetError, load_target, with_optimizer
from raftune.workload import Workload

Mode = Literal["train", "infer"]

# The share of a budget that the race gets, most of which is waiting for single compilers; and seconds where it knows no time.
_RACE_SHARE = 0.25
_RACE_S = 120.0


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What to tune: a target by name (see :func:`raftune.targets.load_target`) and how it is trained.

    ``device`` names another device than this machine's CPU, to be built for here (:func:`raftune.packing.build_pack`).
    """

    target: str
    mode: Mode = "train"
    optimizer: str | None = None
    threads: int | None = None
    dialects: tuple[str, ...] | None = None
    seed: int = 0
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A captured target: its step as one graph, and the tasks of every way to run it."""

    request: ModelRequest
    graph: TrainingGraph
    tasks: tuple[Task, ...]
    device: Device


@dataclass(frozen=True, slots=True)
class ModelOutcome:
    """What tuning a model gave. ``race`` is ``None`` when the step could not be raced; ``race_failure`` says why."""

    result: TuneResult
    race: RaceResult | None
    race_failure: str = ""

    def to_json(self) -> dict[str, Any]:
        tasks = [
            {
                "digest": task.workload.digest,
                "op": task.workload.op,
                "weight": task.weight,
                "status": task.status.value,
                "default_us": task.default_us,
                "winner": None if task.winner is None else dict(task.winner.config),
                "dialect": None if task.winner is None else task.winner.dialect,
                "best_us": task.best_us,
            }
            for task in self.result.tasks
        ]
        return {
            "tasks": tasks,
            "measured": self.result.measured,
            "rematches": self.result.rematches,
            "hits": self.result.hits,
            "seconds": self.result.seconds,
            "stopped": self.result.stopped.value,
            "race": None if self.race is None else self.race.to_json(),
        }


def check_request(request: ModelRequest, log_path: Path) -> None:
    """Refuse what can be refused before the target is captured, which takes seconds.

    Raises :class:`~raftune.dialects.UnknownDialect` and :class:`~raftune.log.LogError`; creates nothing.
    """
    for name in request.dialects or ():
        registry.get(name)
    if log_path.exists() and (log_path.is_dir() or log_path.stat().st_size):
        TuningLog(log_path, read_only=True).close()
    elif not os.access(log_path.parent, os.W_OK | os.X_OK):
        raise LogError(f"cannot create tuning log {log_path}: folder {log_path.parent} does not exist or cannot be written to")


def prepare(request: ModelRequest) -> Prepared:
    """Load and capture the target.

    Raises :class:`TargetError`, :class:`~raftune.graph.CaptureError` or :class:`~raftune.device.UnknownDevice`.
    """
    for name in request.dialects or ():
        registry.get(name)
    torch.manual_seed(request.seed)
    target = with_optimizer(load_target(request.target), request.optimizer)
    try:
        _run(target, request.mode, copy.deepcopy(target.model))  # in eager first, whose errors are the clearest
        with _dialects(request):
            asked = asked_tasks(lambda backend: _run_compiled(target, request.mode, backend))
    except CaptureError:
        raise
    except Exception as error:  # the user's model: whatever it raises on its own inputs is reported as theirs
        text = " ".join(str(error).split())[:300]
        raise TargetError(f"{request.target} does not run on its example inputs: {type(error).__name__}: {text}") from error
    graph = capture(target.model, target.inputs, target.loss, target.optimizer, mode=request.mode).reinplaced()
    threads = request.threads or torch.get_num_threads()
    with _dialects(request):
        tasks = merge_tasks(tasks_of(graph.graph_module), proposed_tasks(graph.graph_module), asked)
    device = current_device(threads) if request.device is None else cuda_architecture(request.device)
    return Prepared(request, graph, tuple(tasks), device)


def dry_run_counts(request: ModelRequest) -> list[tuple[Workload, int, dict[str, int]]]:
    """Every task with its weight and its number of enumerable candidates by dialect."""
    prepared = prepare(request)
    rows = []
    with _dialects(request):
        for task in prepared.tasks:
            counts: dict[str, int] = {}
            for candidate in registry.candidates(task.workload):
                counts[candidate.dialect] = counts.get(candidate.dialect, 0) + 1
            rows.append((task.workload, task.weight, counts))
    return rows


def tune_model(
    prepared: Prepared, log_path: Path, budget: Budget, *, policy: Policy | None = None, progress: Progress | None = None
) -> ModelOutcome:
    """Search within three quarters of ``budget``, then race the whole step in a fresh process; the log records everything.

    The step by single compilers is waited for until the budget is spent.

    A plan that the log recommends is not raced again, and after an interrupted search nothing is raced. Raises
    :class:`~raftune.log.LogError`.
    """
    policy = policy or Policy()
    request = prepared.request
    with TuningLog(log_path) as log:
        with Measurer(policy, prepared.device) as measurer:
            result = tune(
                prepared.tasks,
                log,
                device=prepared.device,
                policy=policy,
                budget=replace(budget, seconds=None if budget.seconds is None else (1 - _RACE_SHARE) * budget.seconds),
                dialects=request.dialects,
                seed=request.seed,
                measurer=measurer,
                progress=progress,
            )
        if result.stopped is Stop.INTERRUPTED:
            return ModelOutcome(result, None)
        with _dialects(request):
            selector = Selector(log, device=prepared.device)
            graph = prepared.graph.graph_module.graph
            regions = regions_of(graph, cover(proposed_regions(graph), selector))
            plan = recommended_plan(prepared.graph, regions, selector)
    if plan is not None:
        return ModelOutcome(result, plan.race)
    task = {name: getattr(request, name) for name in ("target", "mode", "optimizer", "seed", "dialects")}
    patience_s = _RACE_S if budget.seconds is None else _RACE_SHARE * budget.seconds
    if progress is not None:
        progress(Racing(patience_s))
    raced = race_in_child(task, log_path, prepared.device.threads, patience_s)
    return ModelOutcome(result, raced.race, raced.failure)


def simulate_model(request: ModelRequest, recorded: Path, budget: Budget) -> TuneResult:
    """Search in the log ``recorded`` for those of the target's tasks that it has; nothing is measured, raced or kept.

    Raises as :func:`prepare` does, and :class:`~raftune.log.LogError`.
    """
    with TuningLog(recorded, read_only=True) as log:
        recording = Recording(log)
    tasks = prepare(replace(request, dialects=None)).tasks
    return simulate(recording, tasks=tasks, budget=budget, dialects=request.dialects, seed=request.seed)


def loaded(request: ModelRequest) -> Target:
    """The target, with its threads set and seeded. Raises :class:`TargetError`."""
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    torch.manual_seed(request.seed)
    return with_optimizer(load_target(request.target), request.optimizer)


def profile_model(request: ModelRequest, log_path: Path | None, rounds: int) -> Profile:
    """Where the time of the target's compiled step goes. Raises as :func:`prepare` does, and :class:`~raftune.log.LogError`."""
    target = loaded(request)
    step = compile_step(
        target.model,
        target.inputs,
        loss=target.loss,
        optimizer=target.optimizer,
        mode=request.mode,
        log=log_path,
        race=False,
    )
    return profile_step(step, target.inputs, rounds=rounds)


@contextmanager
def _dialects(request: ModelRequest) -> Iterator[None]:
    """The dialects that were asked for, for the device that was asked for."""
    with ExitStack() as stack:
        if request.device is not None:
            stack.enter_context(targeting(cuda_architecture(request.device)))
        stack.enter_context(registry.with_dialects(request.dialects or tuple(registry.installed())))
        yield


def _run_compiled(target: Target, mode: Mode, backend: Callable[..., Any]) -> None:
    """One step as a user of ``torch.compile`` writes it, on a copy of the model."""
    _run(target, mode, torch.compile(copy.deepcopy(target.model), backend=backend))


def _run(target: Target, mode: Mode, model: Callable[..., Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        EagerStep(model, target.loss, None, mode)(target.inputs)
