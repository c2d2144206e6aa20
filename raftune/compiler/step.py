"""A whole training step, compiled from a tuning log: forward, loss, backward and update in one program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from raftune.compiler.eager import EagerStep, kept_state
from raftune.compiler.lowering import lower
from raftune.compiler.plan import Plan, plan_key, recommended_plan
from raftune.compiler.selector import Selector
from raftune.device import Device
from raftune.graph import StepMismatch, StepResult, TrainingGraph, capture
from raftune.log import LogError, TuningLog
from raftune.measure.race import RaceResult, race

logger = logging.getLogger("raftune")

# The captured step reorders sums, so losses differ in the last digits; a wrong plan is far beyond this.
_LOSS_TOLERANCE = 1e-3


class CompiledStep:
    """Call it with a batch: one step of training on the live model and optimizer, or one forward pass.

    ``uses`` is ``raftune`` or ``eager``, whichever won the race (``raftune`` where there was none). ``race`` is the result.
    A batch, model or optimizer setting other than the captured one runs in eager, with one warning.
    """

    def __init__(self, graph: TrainingGraph, selector: Selector) -> None:
        self.graph = graph
        self.selector = selector
        self.race: RaceResult | None = None
        self.uses: Literal["raftune", "eager"] = "raftune"
        self.eager = EagerStep(graph.source.model, graph.source.loss, graph.source.optimizer, graph.mode)
        self._step = graph.bind()
        self.program = lower(graph.graph_module, selector)
        self._warned = False

    def __call__(self, inputs: Any) -> StepResult:
        return self.eager(inputs) if self.uses == "eager" else self.run_compiled(inputs)

    def run_compiled(self, inputs: Any) -> StepResult:
        """The compiled step, whatever the race said."""
        try:
            return self._step.run(self._flat, inputs)
        except StepMismatch as mismatch:
            if not self._warned:
                self._warned = True
                logger.warning("raftune: the step was compiled for other inputs and runs in eager: %s", mismatch)
            return self.eager(inputs)

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

    ``inputs``, ``loss``, ``optimizer`` and ``mode`` are those of :func:`raftune.graph.capture`. The compiled and the eager
    step are raced, interleaved, and the plan is used if it is faster beyond doubt; it is remembered in the log with its result,
    and repeated from there until the log's winners promise to save another 2% of the step.
    The race leaves model, optimizer and random state as they were. Raises :class:`~raftune.graph.CaptureError` and
    :class:`~raftune.log.LogError`.
    """
    graph = capture(model, inputs, loss, optimizer, mode=mode).reinplaced()
    selector = Selector(log)
    plan = recommended_plan(graph, selector) if race else None
    if plan is not None:
        selector.follow(plan.choices)
    step = CompiledStep(graph, selector)
    if plan is not None:
        _use(step, plan.race)
    elif race:
        _settle(step, inputs)
    return step


def _settle(step: CompiledStep, inputs: Any) -> None:
    """Decide between eager and the plan by racing them, and let the log remember."""
    result = _race_now(step, inputs)
    if result is None:
        step.uses = "eager"
        return
    selector = step.selector
    if selector.log is not None:
        _remember(selector.log.path, plan_key(step.graph), selector.device, Plan.of(step.graph, selector, result))
    _use(step, result)


def _use(step: CompiledStep, result: RaceResult) -> None:
    step.race = result
    step.uses = "raftune" if result.winner == "raftune" else "eager"


def _race_now(step: CompiledStep, inputs: Any) -> RaceResult | None:
    """``None`` if the two steps do not compute the same loss: then the plan must not be used, however fast it is."""
    source = step.graph.source
    with kept_state(source.model, source.optimizer, source.loss) as restore:
        losses = []
        for run in (step.eager, step.run_compiled):
            losses.append(run(inputs).loss)
            restore()
        if losses[0] is not None and losses[1] is not None:
            expected, found = (float(loss) for loss in losses if loss is not None)
            if not abs(found - expected) <= _LOSS_TOLERANCE * max(abs(expected), _LOSS_TOLERANCE):
                logger.warning("raftune: the plan's loss is %r, eager's is %r; the plan is not used", found, expected)
                return None
        return race(lambda: step.eager(inputs), lambda: step.run_compiled(inputs))


def _remember(path: Path, key: str, device: Device, plan: Plan) -> None:
    try:
        with TuningLog(path) as log:
            log.record_race(key, device, plan.to_json())
    except LogError as error:
        # A log on read-only media still serves; the next process races again.
        logger.info("raftune: the race was not recorded: %s", error)
