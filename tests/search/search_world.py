"""A simulated world: dialects with known times, a measurer that advances a clock instead of running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raftune.device import Device
from raftune.dialects import registry
from raftune.dialects.base import Dialect, Kernel
from raftune.graph.workloads import Task
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.search import Budget, Strategy, TuneResult, tune
from raftune.search.strategies import ModelGuided
from raftune.workload import Candidate, Config, In, Operator, Out, TensorSpec, Workload, canonical_json

DEVICE = Device("cpu", "simulated", 2, ("avx2",), 1)
POLICY = Policy()


def workload(size: int, op: str = "aten.relu.default") -> Workload:
    spec = TensorSpec("float32", (size,), (1,))
    return Workload((Operator(op, (In(0),)),), (spec,), (Out(0),), (spec,))


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is true of one candidate: ``rematch_us`` if the rematch finds another time than the measurement did."""

    time_us: float = 100.0
    status: Status = Status.OK
    cost_s: float = 1.0
    build_s: float = 0.0
    rematch_us: float | None = None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """Dialects ``aten`` (the default, then one variant) and any number of others, with a truth for each candidate."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.clock = Clock()
        self.truths: dict[tuple[int, str, str], Truth] = {}
        self.dialects: dict[str, Dialect] = {}
        self.spaces: dict[str, Callable[[int, int], Sequence[Config]]] = {}
        self.variations: dict[str, Callable[[Sequence[Config], int], Sequence[Config]]] = {}
        self.measurer = SimulatedMeasurer(self)
        self.add_dialect("aten", 100, lambda size: [{"formulation": "default"}])
        monkeypatch.setattr(registry, "installed", lambda: self.dialects)

    def add_dialect(
        self,
        name: str,
        priority: int,
        configs: Callable[[int], list[Config]],
        space: Callable[[int, int], Sequence[Config]] | None = None,
    ) -> None:
        """``configs(size)`` are listed; ``space(count, seed)`` are sampled."""

        class Fake(Dialect):
            def version(self) -> str:
                return "1.0"

            def supports(self, workload: Workload) -> bool:
                return True

            def candidates(self, workload: Workload) -> Sequence[Config]:
                return configs(workload.inputs[0].numel)

            def build(self, workload: Workload, config: Config) -> Kernel:
                raise AssertionError("nothing is built in a simulation")

            def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
                return {k: float(v) for k, v in config.items() if isinstance(v, int)}

        Fake.name, Fake.priority = name, priority
        if space is not None:
            self.spaces[name] = space
            Fake.sample = lambda self, workload, count, seed: space(count, seed)
        self.dialects[name] = Fake()

    def set(self, size: int, dialect: str, config: Config, **truth: Any) -> Candidate:
        self.truths[size, dialect, canonical_json(config)] = Truth(**truth)
        return Candidate(dialect, "1.0", config)

    def truth(self, workload: Workload, candidate: Candidate) -> Truth:
        return self.truths.get((workload.inputs[0].numel, candidate.dialect, candidate.canonical_config), Truth())

    def log(self) -> TuningLog:
        return TuningLog(self.path)

    def tune(
        self,
        tasks: Mapping[int, int],
        budget: Budget | None = None,
        strategy: Strategy | None = None,
        learn: bool = False,
        parts: Mapping[int, tuple[int, ...]] | None = None,
        **options: Any,
    ) -> TuneResult:
        """``tasks`` maps size to weight, ``parts`` a region's size to its members'.

        ``learn`` uses the cost model, else only the dialects' records guide the search.
        """
        members = {size: tuple(map(workload, sizes)) for size, sizes in (parts or {}).items()}
        with self.log() as log:
            return tune(
                [Task(workload(size), weight, members.get(size, ())) for size, weight in tasks.items()],
                log,
                device=DEVICE,
                policy=options.pop("policy", POLICY),
                budget=budget or Budget(),
                measurer=self.measurer,
                strategy=strategy if strategy is not None or learn else ModelGuided(None, tuple),
                clock=self.clock,
                **options,
            )


class SimulatedMeasurer:
    """Looks times up; remembers what it was asked. ``die_after`` measurements it raises, as if the process were killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.measured: list[tuple[int, Candidate]] = []
        self.rematched: list[tuple[int, Candidate]] = []
        self.sampled: list[tuple[str, int]] = []
        self.prepared: list[tuple[int, Candidate]] = []
        self.varied: list[tuple[Candidate, ...]] = []
        self.timeouts: list[float | None] = []
        self.die_after: int | None = None
        self.error: BaseException = RuntimeError("killed")

    def measure(
        self,
        workload: Workload,
        candidate: Candidate,
        *,
        default: tuple[Candidate, float] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        if self.die_after is not None and len(self.measured) >= self.die_after:
            raise self.error
        truth = self.world.truth(workload, candidate)
        self.measured.append((workload.inputs[0].numel, candidate))
        self.timeouts.append(timeout)
        if timeout is not None and truth.cost_s > timeout:
            self.world.clock.now += timeout
            return Outcome(Status.TIMEOUT, cost_s=timeout)
        self.world.clock.now += truth.cost_s
        if truth.status is not Status.OK:
            return Outcome(truth.status, message=f"simulated {truth.status}", cost_s=truth.cost_s)
        us = truth.time_us
        return Outcome(
            Status.OK,
            us,
            us * 0.99,
            us * 1.01,
            repeats=10,
            max_error=0.0,
            build_s=max(0.0, truth.cost_s - 1.0),
            cost_s=truth.cost_s,
        )

    def prepare(self, workload: Workload, candidates: Sequence[Candidate]) -> None:
        self.prepared.extend((workload.inputs[0].numel, candidate) for candidate in candidates)

    def rematch(self, workload: Workload, candidates: Sequence[Candidate], default: Candidate) -> list[Rematch]:
        base = self.world.truth(workload, default).time_us
        found = []
        for candidate in candidates:
            truth = self.world.truth(workload, candidate)
            us = truth.rematch_us or truth.time_us
            self.rematched.append((workload.inputs[0].numel, candidate))
            cost_s = truth.cost_s - truth.build_s  # the worker keeps what it built
            self.world.clock.now += cost_s
            found.append(Rematch(Status.OK, us, base, us / base, us / base * 1.01, 15, cost_s=cost_s))
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
        if parents:
            self.varied.append(tuple(parents))
            vary = self.world.variations.get(dialect_name)
            return [Candidate(dialect_name, "1.0", c) for c in (vary([p.config for p in parents], count) if vary else ())]
        self.sampled.append((dialect_name, workload.inputs[0].numel))
        return [Candidate(dialect_name, "1.0", c) for c in self.world.spaces[dialect_name](count, seed)]
