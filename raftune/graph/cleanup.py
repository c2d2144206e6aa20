"""Small rewrites of a freshly traced graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from raftune.graph.training_graph import Slot

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


def drop_unused_inputs(graph: fx.Graph, slots: Sequence[Slot]) -> list[Slot]:
    """Erase placeholders that nothing reads; returns the slots of those that stay."""
    kept = []
    for node, slot in zip(placeholders_of(graph), slots, strict=True):
        if node.users:
            kept.append(slot)
        else:
            graph.erase_node(node)
    return kept
