"""The captured step: a flat ATen graph and what each of its inputs and outputs is."""

from __future__ import annotations

import operator
import types
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from raftune.graph.structure import BatchSpec, Loss, ResultSpec
from raftune.workload import canonical_json, digest_text

if TYPE_CHECKING:
    from raftune.graph.optimizer import GroupPlan
    from raftune.graph.settings import ModuleSettings
    from raftune.graph.step import Step


class Kind(StrEnum):
    """What a placeholder holds, or what an output is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"
    LEARNING_RATE = "learning_rate"
    INPUT = "input"
    CONSTANT = "constant"
    LOSS = "loss"
    GRADIENT = "gradient"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Slot:
    """One placeholder or output. As an output, a parameter, buffer or state slot is the new value of that input.

    ``name`` is the parameter's or buffer's qualified name in the model (its first, if tied); ``key`` the key in the
    parameter's optimizer state. ``index`` counts learning rates by parameter group, inputs and outputs by flat position.
    """

    kind: Kind
    name: str = ""
    key: str = ""
    index: int = 0


@dataclass(frozen=True)
class Source:
    """Where the graph came from: what a call needs to find its inputs again and to give its outputs their structure."""

    model: torch.nn.Module
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    groups: tuple[GroupPlan, ...]
    batch: BatchSpec
    result: ResultSpec
    constants: tuple[torch.Tensor, ...]
    settings: ModuleSettings


@dataclass(frozen=True)
class TrainingGraph:
    """One step as one graph of ATen operators with static shapes.

    ``graph_module`` takes a tensor per entry of ``inputs`` and returns a tuple with one per entry of ``outputs``. Every
    node's ``meta["val"]`` is a fake tensor. A functional graph changes none of its inputs; its :meth:`reinplaced` form
    updates parameters, optimizer state and buffers itself and has no outputs for them.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    mode: str
    source: Source

    @cached_property
    def digest(self) -> str:
        """Stable identity of structure, constants and tensor specs: equal across processes and for renamed modules."""
        return graph_digest(self.graph_module, self.inputs, self.outputs)

    def reinplaced(self) -> TrainingGraph:
        """The form that is lowered: see :func:`raftune.graph.reinplace.reinplace`."""
        from raftune.graph.reinplace import reinplace

        return reinplace(self)

    def bind(self) -> Step:
        """The step over the live model and optimizer that this graph was captured from."""
        from raftune.graph.step import Step

        return Step(self)


def graph_digest(graph_module: fx.GraphModule, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]) -> str:
    """SHA-256 (first 32 digits) over the nodes in order, their arguments by position, and the kinds of inputs and outputs."""
    position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    nodes = []
    for node in graph_module.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else _target_name(node.target)
        kwargs = {key: _describe(value, position) for key, value in node.kwargs.items()}
        args = [] if node.op == "placeholder" else _describe(node.args, position)
        nodes.append([node.op, target, args, kwargs, _describe_value(node.meta.get("val"))])
    kinds = [[slot.kind.value for slot in inputs], [slot.kind.value for slot in outputs]]
    return digest_text(canonical_json([kinds, nodes]))


def _target_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, types.FunctionType) else str(target)


def _describe(value: Any, position: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": position[value]}
    if isinstance(value, list | tuple):
        return [_describe(item, position) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    return {type(value).__name__: str(value)}


def _describe_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride()), value.device.type]
    if isinstance(value, list | tuple):
        return [_describe_value(item) for item in value]
    return None
