"""The library API for a compiler: given a workload, which dialect and config to use, how sure we are, and the kernel itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from raftune.cost_model import CostModel, Prediction
from raftune.device import Device, current_device
from raftune.dialects import registry
from raftune.dialects.base import BuildError, Kernel
from raftune.log import TuningLog, Winner
from raftune.workload import Candidate, Workload

Provenance = Literal["measured", "predicted", "default"]

logger = logging.getLogger("raftune")


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run for a workload. ``time_us`` is the expected time, unknown for ``default``.

    ``provenance``: ``measured`` (the log's winner on this device), ``predicted`` (the cost model is confident on a log miss;
    then ``confidence`` is its probability of beating the default), or ``default`` (what PyTorch runs; nothing is known).
    """

    workload: Workload
    candidate: Candidate
    time_us: float | None
    provenance: Provenance
    is_default: bool
    confidence: float | None = None

    @property
    def dialect(self) -> str:
        return self.candidate.dialect

    @property
    def config(self) -> dict[str, object]:
        return dict(self.candidate.config)

    def build(self) -> Kernel:
        """The kernel: call it with the workload's inputs. Raises :class:`~raftune.dialects.BuildError`."""
        return registry.load(self.workload, self.candidate)


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """A choice without its workload, as a plan keeps it; the fields are those of :class:`Choice`."""

    candidate: Candidate
    time_us: float | None
    provenance: Provenance
    confidence: float | None = None

    @staticmethod
    def of(choice: Choice) -> PlannedChoice:
        return PlannedChoice(choice.candidate, choice.time_us, choice.provenance, choice.confidence)

    def choice(self, workload: Workload) -> Choice:
        is_default = self.candidate == registry.default_candidate(workload)
        return Choice(workload, self.candidate, self.time_us, self.provenance, is_default, self.confidence)


@dataclass(slots=True)
class Counts:
    """What a selector was asked: log hits, misses answered by the cost model or the default, winners that did not build."""

    hits: int = 0
    predicted: int = 0
    misses: int = 0
    failed_builds: int = 0
    missed_ops: list[str] = field(default_factory=list)


class Selector:
    """Chooses from a tuning log; never measures and never fails for what the log says.

    ``log`` is a path, an open :class:`TuningLog`, or ``None`` (every choice is the default). ``device`` is this machine with
    the current thread setting unless given. ``on_miss`` is called with a workload that the log does not know, before the log is
    asked once more: this is where a caller who wants it may tune. Raises :class:`~raftune.log.LogError` for an unusable log.
    """

    def __init__(
        self,
        log: TuningLog | str | Path | None,
        *,
        device: Device | None = None,
        on_miss: Callable[[Workload], None] | None = None,
    ) -> None:
        self.log = TuningLog(log, read_only=True) if isinstance(log, str | Path) else log
        self.device = device or current_device(torch.get_num_threads())
        self.counts = Counts()
        self._on_miss = on_miss
        self._choices: dict[tuple[str, tuple[str, ...]], Choice] = {}
        self._reported = False
        self.followed: Mapping[str, PlannedChoice] = {}

    @cached_property
    def _model(self) -> CostModel | None:
        """Loaded when something was not measured: XGBoost takes time and memory to load."""
        return None if self.log is None else CostModel.load_beside(self.log.path)

    def choose(self, workload: Workload) -> Choice:
        """The choice for one workload; equal workloads get the same choice for the life of the selector."""
        key = (workload.digest, tuple(d.name for d in registry.enabled()))
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._choose(workload)
        return choice

    def fresh(self) -> Selector:
        """A selector for the same log and device that has chosen nothing yet and follows nothing."""
        other = copy.copy(self)
        other.counts, other.followed, other._choices = Counts(), {}, {}
        return other

    def follow(self, choices: Mapping[str, PlannedChoice]) -> None:
        """Repeat these choices, by workload digest, instead of asking the log, where they can be built here."""
        self.followed = dict(choices)
        self._choices.clear()
        self.counts = Counts()

    def usable(self, workload: Workload, candidate: Candidate) -> bool:
        """Whether a recorded candidate can still be built here: dialect enabled, same version, specs supported."""
        dialect = next((d for d in registry.enabled() if d.name == candidate.dialect), None)
        return dialect is not None and dialect.version() == candidate.version and dialect.supports(workload)

    def build(self, workload: Workload) -> tuple[Choice, Kernel]:
        """Choose and build; a winner that no longer builds is a warned miss, and the default is built instead."""
        choice = self.choose(workload)
        try:
            return choice, choice.build()
        except BuildError as error:
            if choice.is_default:
                raise
            logger.warning(
                "raftune: the winner %s for %s does not build, using the default: %s", choice.dialect, workload.op, error
            )
            self.counts.failed_builds += 1
            choice = self._default(workload)
            self._choices[workload.digest, tuple(d.name for d in registry.enabled())] = choice
            return choice, choice.build()

    def report_misses(self) -> None:
        """Say once, in one line, how many workloads the log did not know."""
        missed = self.counts.misses + self.counts.predicted
        if not missed or self._reported:
            return
        self._reported = True
        if self.log is None:
            logger.warning("raftune: no tuning log was given: all %d workloads run PyTorch's default", missed)
            return
        logger.warning(
            "raftune: %d of %d workloads are not in %s for this device (%s), %s for one: %d run PyTorch's default, %d what the "
            "cost model predicts",
            missed,
            missed + self.counts.hits,
            self.log.path,
            self.device,
            self.counts.missed_ops[0],
            self.counts.misses,
            self.counts.predicted,
        )

    def _choose(self, workload: Workload) -> Choice:
        followed = self.followed.get(workload.digest)
        if followed is not None and self.usable(workload, followed.candidate):
            return self._counted(followed.choice(workload))
        found = self._measured(workload)
        if found is None and self._on_miss is not None and self.log is not None:
            self._on_miss(workload)
            found = self._measured(workload)
        return self._counted(found or self._predicted(workload) or self._default(workload))

    def _counted(self, choice: Choice) -> Choice:
        if choice.provenance == "measured":
            self.counts.hits += 1
            return choice
        self.counts.missed_ops.append(choice.workload.op)
        if choice.provenance == "predicted":
            self.counts.predicted += 1
        else:
            self.counts.misses += 1
        return choice

    def winner(self, workload: Workload) -> Winner | None:
        """What the log says of a workload, without choosing it: nothing is counted."""
        if self.log is None:
            return None
        return self.log.winner(workload, self.device, accept=lambda c: self.usable(workload, c))

    def _measured(self, workload: Workload) -> Choice | None:
        winner = self.winner(workload)
        if winner is None:
            return None
        return Choice(workload, winner.candidate, winner.time_us, "measured", winner.is_default)

    def prediction(self, workload: Workload) -> tuple[Candidate, Prediction] | None:
        """The candidate that the cost model is confident of for a workload that was not measured; nothing is counted."""
        if self._model is None:
            return None
        return self._model.choose(workload, registry.candidates(workload), device=self.device)

    def predictions(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Prediction] | None:
        """What the cost model says of each candidate; ``None`` without a model."""
        return None if self._model is None else self._model.predict(workload, candidates, device=self.device)

    def _predicted(self, workload: Workload) -> Choice | None:
        named = self.prediction(workload)
        if named is None:
            return None
        candidate, prediction = named
        return Choice(workload, candidate, None, "predicted", is_default=False, confidence=prediction.faster)

    def _default(self, workload: Workload) -> Choice:
        return Choice(workload, registry.default_candidate(workload), None, "default", is_default=True)
