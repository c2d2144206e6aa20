"""Small rewrites of a freshly traced graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from raftune.graph.training_graph import Kind, Slot

_aten = torch.ops.aten
# In a functional graph nothing is written in place, so these return what they are given.
_IDENTITIES = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default)


# Factories that take the shape of their first argument, and what they fill the result with (or the argument that says so).
_FILLS: dict[Any, Callable[[fx.Node], Any]] = {
    _aten.zeros_like.default: lambda node: 0,
    _aten.ones_like.default: lambda node: 1,
    _aten.full_like.default: lambda node: node.args[1],
    _aten.new_zeros.default: lambda node: 0,
    _aten.new_ones.default: lambda node: 1,
    _aten.new_full.default: lambda node: node.args[2],
}
_PARTS = (_aten.unbind.int, _aten.split.Tensor, _aten.unsafe_split.Tensor, _aten.split_with_sizes.default)


def placeholders_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def replace_outputs(graph: fx.Graph, values: Sequence[fx.Node]) -> None:
    """Make the graph return a tuple of ``values``."""
    graph.output_node().args = (tuple(values),)


def remove_identities(graph: fx.Graph) -> None:
    """Let users of autograd's ``detach`` and the like read its argument."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def free_factories(graph: fx.Graph) -> None:
    """Let ``ones_like`` and its kin not read the tensor whose shape they take: it would tie together what is independent."""
    for node in list(graph.nodes):
        fill = _FILLS.get(node.target) if node.op == "call_function" else None
        if fill is None or not node.meta["val"].is_contiguous():
            continue
        result = node.meta["val"]
        words = {"dtype": result.dtype, "device": result.device, "pin_memory": False}
        with graph.inserting_before(node):
            full = graph.call_function(_aten.full.default, (list(result.shape), fill(node)), words)
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def single_views(graph: fx.Graph) -> None:
    """Take each part of an ``unbind`` or ``split`` by a view of its own, so that it depends on nothing else."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _PARTS:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dim = _argument(node, "dim")
        starts = [0]
        for part in node.meta["val"]:
            starts.append(starts[-1] + (1 if node.target is _aten.unbind.int else part.shape[dim]))
        for item in list(node.users):
            index = item.args[1] % len(node.meta["val"])
            with graph.inserting_before(item):
                if node.target is _aten.unbind.int:
                    view = graph.call_function(_aten.select.int, (source, dim, index))
                else:
                    view = graph.call_function(_aten.slice.Tensor, (source, dim, starts[index], starts[index + 1]))
            view.meta = dict(item.meta)
            item.replace_all_uses_with(view)
            graph.erase_node(item)
        graph.erase_node(node)


def _argument(node: fx.Node, name: str) -> Any:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    index = next(i for i, argument in enumerate(schema) if argument.name == name)
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, schema[index].default_value)


def lift_constants(graph_module: fx.GraphModule) -> list[Tensor]:
    """Turn tensors stored in the module into placeholders after the others; returns their values in that order."""
    graph = graph_module.graph
    last = placeholders_of(graph)[-1]
    lifted: dict[str, fx.Node] = {}
    values: list[Tensor] = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in lifted:
            with graph.inserting_after(last):
                last = lifted[name] = graph.placeholder(name.lstrip("_"))
            last.meta["val"] = node.meta["val"]
            values.append(getattr(graph_module, name))
            delattr(graph_module, name)
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    return values


def own_results(graph: fx.Graph, slots: Sequence[Slot], outputs: Sequence[Slot]) -> None:
    """Copy results that the caller may change, as eager's are: views of constants, and gradients that share memory."""
    kinds = {node: slot.kind for node, slot in zip(placeholders_of(graph), slots, strict=True)}
    returned: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    gradients: set[fx.Node] = set()
    for index, (slot, value) in enumerate(zip(outputs, returned, strict=True)):
        base = _base(value)
        shared = slot.kind is Kind.GRADIENT and (base.op == "placeholder" or base in gradients)
        if shared or kinds.get(base) is Kind.CONSTANT:
            with graph.inserting_before(graph.output_node()):
                returned[index] = graph.call_function(_aten.clone.default, (value,))
            returned[index].meta["val"] = value.meta["val"].clone()
        elif slot.kind is Kind.GRADIENT:
            gradients.add(base)
    replace_outputs(graph, returned)


def _base(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.target is operator.getitem or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view):
        source = node.args[0]
        if not isinstance(source, fx.Node) or (
            node.target is operator.getitem and not getattr(source.target, "is_view", False)
        ):
            break
        node = source
    return node


def drop_unused_inputs(graph: fx.Graph, slots: Sequence[Slot], outputs: Sequence[Slot]) -> list[Slot]:
    """Erase placeholders that nothing reads and no output is written back to; returns the slots of those that stay."""
    kept = []
    written = set(outputs)
    for node, slot in zip(placeholders_of(graph), slots, strict=True):
        if node.users or slot in written:
            kept.append(slot)
        else:
            graph.erase_node(node)
    return kept
