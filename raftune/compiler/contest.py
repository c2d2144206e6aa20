"""The race of the ways to run one step: eager, the plan from the log, and single compilers; and whether they agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raftune.compiler.eager import EagerStep, kept_state
from raftune.compiler.executor import Program
from raftune.graph import StepResult, TrainingGraph
from raftune.measure.race import EAGER, PLAN, RaceResult, race

logger = logging.getLogger("raftune")

# The captured step reorders sums, so losses differ in the last digits; a wrong plan is far beyond this.
_TOLERANCE = 1e-3
# The loss of the second step has the first update in it.
_STEPS = 2


def contest(graph: TrainingGraph, eager: EagerStep, programs: Mapping[str, Program], inputs: Any) -> RaceResult | None:
    """Race ``programs``, of which one is the plan, and eager; everything is put back afterwards.

    A program that does not compute eager's losses (at inference: outputs) takes no part, however fast it is. ``None`` if that
    is the plan.
    """
    source = graph.source
    step = graph.bind()

    def runner(program: Program) -> Callable[[Any], StepResult]:
        return lambda batch: step.run(lambda *tensors: program(list(tensors)), batch)

    runners: dict[str, Callable[[Any], StepResult]] = {EAGER: eager}
    runners |= {name: runner(program) for name, program in programs.items()}
    with kept_state(source.model, source.optimizer, source.loss) as restore:
        expected = _computed(eager, inputs, restore)
        for name in programs:
            found = _computed(runners[name], inputs, restore)
            wrong = next(((a, b) for a, b in zip(expected, found, strict=True) if not _agree(a, b)), None)
            if wrong is not None:
                logger.warning(
                    "raftune: the loss of %s is %s, eager's is %s: it is not used", name, _short(wrong[1]), _short(wrong[0])
                )
                if name == PLAN:
                    return None
                del runners[name]
        return race({name: lambda run=run: run(inputs) for name, run in runners.items()})  # type: ignore[misc]


def _computed(run: Callable[[Any], StepResult], inputs: Any, restore: Callable[[], None]) -> list[torch.Tensor]:
    """The losses of some steps, or what one inference returns; as float64."""
    results = [run(inputs) for _ in range(_STEPS)]
    losses = [r.loss for r in results if r.loss is not None] or pytree.tree_leaves(results[0].outputs)
    values = [value.detach().double().clone() for value in losses if isinstance(value, torch.Tensor)]
    restore()
    return values


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return expected.shape == found.shape and bool(((found - expected).abs() <= _TOLERANCE * max(scale, _TOLERANCE)).all())


def _short(value: torch.Tensor) -> str:
    return repr(float(value)) if value.numel() == 1 else f"a tensor of norm {float(value.norm())!r}"
