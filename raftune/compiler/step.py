"""A whole training step, compiled from a tuning log: forward, loss, backward and update in one program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from raftune.compiler.contest import contest
from raftune.compiler.cover import cover
from raftune.compiler.eager import EagerStep
from raftune.compiler.executor import Program
from raftune.compiler.lowering import lower, regions_of
from raftune.compiler.plan import Plan, plan_key, recommended_plan
from raftune.compiler.proposals import proposed_regions
from raftune.compiler.selector import Selector
from raftune.compiler.single import compiled_alone, single_compilers
from raftune.graph import BatchMismatch, CaptureError, Region, StepMismatch, StepResult, TrainingGraph, capture
from raftune.graph.structure import BatchSpec
from raftune.log import LogError, TuningLog
from raftune.measure.race import EAGER, PLAN, RaceResult

logger = logging.getLogger("raftune")

# How many other kinds of batches are compiled for, as dynamo's limit of recompilations.
_MOST_VARIANTS = 8


class CompiledStep:
    """Call it with a batch: one step of training on the live model and optimizer, or one forward pass.

    ``uses`` names the winner of the race: ``raftune`` for the plan (also where there was no race), ``eager``, or the single
    compiler that beat both. ``race`` is the result. A batch of another shape runs in eager the first time and is compiled for
    the second time, up to a limit; with a model or optimizer setting other than the captured one, eager runs with one warning.
    """

    def __init__(
        self, compiler: _Compiler, graph: TrainingGraph, selector: Selector, program: Program, fused: Sequence[Region]
    ) -> None:
        self.graph = graph
        self.selector = selector
        self.program = program
        self.race: RaceResult | None = None
        self.uses = PLAN
        self.eager = EagerStep(graph.source.model, graph.source.loss, graph.source.optimizer, graph.mode)
        self._compiler, self._fused = compiler, fused
        self._step = graph.bind()
        self._variants: dict[BatchSpec, CompiledStep | None] = {}  # None: seen once, or not to be compiled
        self._refused: set[BatchSpec] = set()
        self._warned: set[type] = set()

    def __call__(self, inputs: Any) -> StepResult:
        return self.eager(inputs) if self.uses == EAGER else self.run_compiled(inputs)

    def run_compiled(self, inputs: Any) -> StepResult:
        """The compiled step, whatever the race said."""
        try:
            return self._step.run(self._flat, inputs)
        except BatchMismatch as mismatch:
            variant = self._variant(inputs, mismatch)
            return self.eager(inputs) if variant is None else variant(inputs)
        except StepMismatch as mismatch:
            self._warn(mismatch)
            return self.eager(inputs)

    def race_singles(self, inputs: Any) -> None:
        """Race once more, with the step by each dialect that takes whole graphs; compiling such a step can take minutes."""
        if self.uses not in (PLAN, EAGER):
            return
        programs = {PLAN: self.program}
        for dialect in single_compilers():
            if (program := compiled_alone(self.graph.graph_module, dialect, self.selector)) is not None:
                programs[dialect.name] = program
        if len(programs) > 1:
            self.settle(inputs, programs)

    def settle(self, inputs: Any, programs: Mapping[str, Program]) -> None:
        """Race ``programs``, of which one is the plan, against eager; use the winner, and let the log remember."""
        result = contest(self.graph, self.eager, programs, inputs)
        if result is None:
            self.uses = EAGER
            return
        if self.selector.log is not None:
            regions = regions_of(self.graph.graph_module.graph, self._fused)
            _remember(self.selector.log.path, self, Plan.of(regions, self.selector, result))
        self.race, self.uses = result, result.winner
        self.program = programs.get(result.winner, programs[PLAN])

    def _variant(self, inputs: Any, mismatch: BatchMismatch) -> CompiledStep | None:
        """The step for another kind of batch, or ``None`` where that runs in eager."""
        try:
            spec = BatchSpec.of(inputs)
        except CaptureError:
            self._warn(mismatch)
            return None
        if spec not in self._variants:
            self._variants[spec] = None
            return None
        found = self._variants[spec]
        if found is None and spec not in self._refused:
            if sum(variant is not None for variant in self._variants.values()) >= _MOST_VARIANTS:
                self._warn(mismatch, f"{_MOST_VARIANTS} other kinds of batches were compiled for: ")
                return None
            try:
                found = self._variants[spec] = self._compiler.compile(inputs)
            except CaptureError as error:
                self._refused.add(spec)
                logger.warning("raftune: a batch of another kind cannot be compiled for and runs in eager: %s", error)
        return found

    def _warn(self, mismatch: StepMismatch, reason: str = "") -> None:
        if type(mismatch) not in self._warned:
            self._warned.add(type(mismatch))
            logger.warning("raftune: %sthe step was compiled for other inputs and runs in eager: %s", reason, mismatch)

    def _flat(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.program(list(tensors))


def compile_step(
    model: torch.nn.Module,
    inputs: Any,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    mode: Literal["train", "infer"] = "train",
    log: TuningLog | str | Path | None = None,
    race: bool = True,
) -> CompiledStep:
    """Compile one step for batches like ``inputs`` from a tuning log, and keep it only if it beats eager.

    ``inputs``, ``loss``, ``optimizer`` and ``mode`` are those of :func:`raftune.graph.capture`. The plan from the log and eager
    are raced, interleaved, and the plan is used if it is faster beyond doubt. It is remembered in the log with its race, and
    repeated from there until the log's winners promise to save another 2% of the step; as is the step by a single compiler that
    won (:meth:`CompiledStep.race_singles`). The race leaves model, optimizer and random state as they were. Raises
    :class:`~raftune.graph.CaptureError` and :class:`~raftune.log.LogError`.
    """
    return _Compiler(model, loss, optimizer, mode, Selector(log), race).compile(inputs)


@dataclass(frozen=True)
class _Compiler:
    """What stays the same for batches of different kinds."""

    model: torch.nn.Module
    loss: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
    mode: Literal["train", "infer"]
    selector: Selector
    race: bool

    def compile(self, inputs: Any) -> CompiledStep:
        graph = capture(self.model, inputs, self.loss, self.optimizer, mode=self.mode).reinplaced()
        module, selector = graph.graph_module, self.selector.fresh()
        proposals = proposed_regions(module.graph)
        fused = cover(proposals, selector)
        plan = recommended_plan(graph, regions_of(module.graph, fused), selector) if self.race else None
        if plan is not None:
            selector.follow(plan.choices)
            fused = cover(proposals, selector)
        alone = None if plan is None else _by_winner(plan.race, graph, selector)
        # The optimizer of the first capture is the live one from then on.
        compiler = replace(self, optimizer=graph.source.optimizer)
        step = CompiledStep(compiler, graph, selector, alone or lower(module, selector, fused), fused)
        if plan is not None:
            step.race = plan.race
            step.uses = plan.race.pair_winner if alone is None else plan.race.winner
        elif self.race:
            step.settle(inputs, {PLAN: step.program})
        return step


def _by_winner(race: RaceResult, graph: TrainingGraph, selector: Selector) -> Program | None:
    """The program of the single compiler that won ``race``, if one did and can be had here."""
    dialect = next((d for d in single_compilers() if d.name == race.winner), None)
    return None if dialect is None else compiled_alone(graph.graph_module, dialect, selector)


def _remember(path: Path, step: CompiledStep, plan: Plan) -> None:
    try:
        with TuningLog(path) as log:
            log.record_race(plan_key(step.graph), step.selector.device, plan.to_json())
    except LogError as error:
        # A log on read-only media still serves; the next process races again.
        logger.info("raftune: the race was not recorded: %s", error)
