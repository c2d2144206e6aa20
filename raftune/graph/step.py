"""Running a captured step on the live model: gathers the flat inputs, writes back, and restores the outputs' structure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raftune.graph.errors import StepMismatch
from raftune.graph.members import Member, buffers_of, has_gradient_hooks, parameters_of
from raftune.graph.optimizer import new_state
from raftune.graph.training_graph import Kind, Slot, TrainingGraph

FlatFunction = Callable[..., Sequence[Tensor]]
_LIVE = (Kind.PARAMETER, Kind.BUFFER, Kind.STATE)  # read from model and optimizer, where anyone may have changed them


@dataclass(frozen=True)
class StepResult:
    """What a step returns: the loss (``None`` at inference) and the model's output, without autograd history."""

    loss: Tensor | None
    outputs: Any


@dataclass
class _Known:
    """A tensor that was found to have the captured layout, by identity and address."""

    tensor: Tensor | None = None
    address: int = 0


class Step:
    """A training graph bound to the model and optimizer that it was captured from.

    Each call reads parameters, buffers and ``optimizer.state`` anew (creating state as ``torch.optim`` would), so compiled
    and eager steps, ``load_state_dict`` and learning rate schedulers may be mixed freely. ``.grad`` is neither read nor
    written, except by a graph captured without an optimizer, whose gradients are accumulated there as ``backward()`` does.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        source = graph.source
        self._optimizer = source.optimizer
        self._members = {m.name: m for m in (*parameters_of(source.model), *buffers_of(source.model))}
        trained = {s.name for s in (*graph.inputs, *graph.outputs) if s.kind in (Kind.STATE, Kind.GRADIENT)}
        trained |= {name for group in source.groups for name in group.names if not group.moments}
        self._trained = [m for m in self._members.values() if m.name in trained]
        grouped = {name for group in source.groups for name in group.names}
        self._parameters = [
            (m, m.tensor.requires_grad)
            for m in (parameters_of(source.model) if graph.mode == "train" else ())
            if self._optimizer is None or m.name in grouped or m.tensor.requires_grad
        ]
        self._groups = [[self._members[name].tensor for name in group.names] for group in source.groups]
        self._learning_rates = [torch.zeros((), dtype=group.lr_dtype) for group in source.groups]
        self._readers = [self._reader(slot) for slot in graph.inputs]
        self._wanted = [_layout(node.meta["val"]) for node in _placeholders(graph)]
        self._checked = [(index, _Known()) for index, slot in enumerate(graph.inputs) if slot.kind in _LIVE]
        position = {slot: index for index, slot in enumerate(graph.inputs)}
        self._write_back = [(i, position[s]) for i, s in enumerate(graph.outputs) if s in position]
        self._gradients = [(i, self._members[s.name]) for i, s in enumerate(graph.outputs) if s.kind is Kind.GRADIENT]
        self._losses = [i for i, s in enumerate(graph.outputs) if s.kind is Kind.LOSS]
        self._outputs = [i for i, s in enumerate(graph.outputs) if s.kind is Kind.OUTPUT]

    def gather(self, inputs: Any) -> list[Tensor]:
        """One tensor per ``graph.inputs``; :class:`StepMismatch` if batch, model or optimizer are not as captured."""
        batch = self.graph.source.batch.leaves_of(inputs)
        self._check_settings()
        tensors = [read(batch) for read in self._readers]
        for index, known in self._checked:
            tensor = tensors[index]
            if tensor is not known.tensor or tensor.data_ptr() != known.address:
                self._check_layout(index, tensor)
                known.tensor, known.address = tensor, tensor.data_ptr()
        return tensors

    def run(self, function: FlatFunction, inputs: Any) -> StepResult:
        """One step with ``function`` in the place of ``graph.graph_module``."""
        with torch.no_grad():
            tensors = self.gather(inputs)
            values = function(*tensors)
            for output, destination in self._write_back:
                tensors[destination].copy_(values[output])
            for output, member in self._gradients:
                parameter = member.live
                parameter.grad = values[output] if parameter.grad is None else parameter.grad + values[output]
        if self._optimizer is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # Schedulers ask whether a step was made.
        loss = values[self._losses[0]] if self._losses else None
        return StepResult(loss, self.graph.source.result.restore([values[i] for i in self._outputs]))

    def _reader(self, slot: Slot) -> Callable[[list[Any]], Tensor]:
        match slot.kind:
            case Kind.INPUT:
                return lambda batch, index=slot.index: batch[index]  # type: ignore[misc]
            case Kind.CONSTANT:
                return lambda _, value=self.graph.source.constants[slot.index]: value  # type: ignore[misc]
            case Kind.LEARNING_RATE:
                return lambda _, index=slot.index: self._learning_rate(index)  # type: ignore[misc]
            case Kind.STATE:
                return lambda _, member=self._members[slot.name], key=slot.key: self._state(member, key)  # type: ignore[misc]
        return lambda _, member=self._members[slot.name]: member.live  # type: ignore[misc]

    def _learning_rate(self, index: int) -> Tensor:
        assert self._optimizer is not None
        return self._learning_rates[index].fill_(self._optimizer.param_groups[index]["lr"])

    def _state(self, member: Member, key: str) -> Tensor:
        assert self._optimizer is not None
        parameter = member.live
        state = self._optimizer.state[parameter]
        value = state.get(key)
        if value is None:
            value = state[key] = new_state(parameter, key)
        return value  # type: ignore[no-any-return]

    def _check_settings(self) -> None:
        changed = self.graph.source.settings.changed()
        if changed is not None:
            raise StepMismatch(changed)
        for member in self._trained:
            if member.live is not member.tensor:
                raise StepMismatch(f"parameter {member.name!r} was replaced by another; capture again")
        for member, flag in self._parameters:
            parameter = member.live
            if not isinstance(parameter, Tensor) or parameter.requires_grad is not flag:
                have = "is gone" if parameter is None else f"has requires_grad={not flag}"
                raise StepMismatch(f"parameter {member.name!r} {have} now, captured as {flag}")
            if has_gradient_hooks(parameter):
                raise StepMismatch(f"parameter {member.name!r} has gradient hooks now, which a captured step would not call")
        if self._optimizer is None:
            return
        groups, plans = self._optimizer.param_groups, self.graph.source.groups
        if len(groups) != len(plans):
            raise StepMismatch(f"the optimizer has {len(groups)} parameter groups now, captured with {len(plans)}")
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            raise StepMismatch("the optimizer has step hooks now, which a captured step would not call")
        for group, plan, parameters in zip(groups, plans, self._groups, strict=True):
            if len(group["params"]) != len(parameters) or not all(map(operator.is_, group["params"], parameters)):
                raise StepMismatch(f"parameter group {plan.index} has other parameters now than when it was captured")
            changed = plan.changed_setting(group)
            if changed is not None:
                raise StepMismatch(changed)

    def _check_layout(self, index: int, tensor: Tensor) -> None:
        slot, wanted = self.graph.inputs[index], self._wanted[index]
        if not isinstance(tensor, Tensor) or _layout(tensor) != wanted:
            have = _layout(tensor) if isinstance(tensor, Tensor) else tensor
            raise StepMismatch(f"{slot.kind} {slot.name or slot.index} {slot.key} is now {have}, captured as {wanted}")


def _placeholders(graph: TrainingGraph) -> list[torch.fx.Node]:
    return [node for node in graph.graph_module.graph.nodes if node.op == "placeholder"]


def _layout(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
    return tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device
