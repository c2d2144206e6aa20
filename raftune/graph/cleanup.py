"""Small rewrites of a freshly traced graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from raftune.graph.training_graph import Kind, Slot

_aten = torch.ops.aten
# In a functional graph nothing is written in place, so these return what they are given.
_IDENTITIES = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default)


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


def free_ones(graph: fx.Graph) -> None:
    """Make ``ones_like`` of a number from nothing: the backward's start then does not wait for the loss."""
    for node in graph.find_nodes(op="call_function", target=_aten.ones_like.default):
        value = node.meta["val"]
        if value.dim() == 0:
            with graph.inserting_before(node):
                ones = graph.call_function(_aten.ones.default, ([],), {"dtype": value.dtype, "device": value.device})
            ones.meta["val"] = value
            node.replace_all_uses_with(ones)
            graph.erase_node(node)


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
