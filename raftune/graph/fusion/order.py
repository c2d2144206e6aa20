"""What depends on what in a graph, and an order in which a region's nodes can run as one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
import torch.fx
from torch._ops import OpOverload

from raftune.graph.workloads import is_view


class Ancestry:
    """Answers, for a graph that does not change meanwhile, which nodes a node depends on (as bits by position)."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._ancestors: list[int] = []
        for node in graph.nodes:
            bits = 0
            for used in node.all_input_nodes:
                bits |= self._ancestors[self.position[used]] | 1 << self.position[used]
            self._ancestors.append(bits)
        self._descendants = [0] * len(self._ancestors)
        for node in reversed(list(graph.nodes)):
            here = self.position[node]
            for user in node.users:
                self._descendants[here] |= self._descendants[self.position[user]] | 1 << self.position[user]

    def bits(self, nodes: Iterable[torch.fx.Node]) -> int:
        return sum(1 << self.position[node] for node in set(nodes))

    def ancestors(self, node: torch.fx.Node) -> int:
        return self._ancestors[self.position[node]]

    def is_convex(self, nodes: Sequence[torch.fx.Node]) -> bool:
        """Whether no path leaves the set and comes back: only then can its nodes run as one unit.

        What unpacks a member's results belongs to the set.
        """
        unpacked = [user for node in nodes for user in node.users if user.target is operator.getitem]
        own, before, after = self.bits([*nodes, *unpacked]), 0, 0
        for node in nodes:
            before |= self._ancestors[self.position[node]]
            after |= self._descendants[self.position[node]]
        return not before & after & ~own


def contract(graph: torch.fx.Graph, region: Sequence[torch.fx.Node], before: Sequence[Sequence[torch.fx.Node]] = ()) -> bool:
    """Prepare ``graph`` for running all nodes of ``region`` at its first; whether that is possible.

    What it needs is moved before that node, and views in it that others read are made once more for them. It is not possible
    if regions contracted ``before`` make a cycle with it: one of them needs a result of this one, and this one a result of it.
    Nor if something would be moved across a write, or a random operator at all: a seed must mean what it means in eager.
    """
    contracted = {node: other for other in before for node in other}
    members, first = set(region), region[0]
    order = {node: index for index, node in enumerate(graph.nodes)}
    needed: set[torch.fx.Node] = set()
    stack = _read_by(region)
    while stack:
        node = stack.pop()
        if node in members:
            return False
        if node in needed or order[node] < order[first]:
            continue
        unit = contracted.get(node)
        needed.update((node,) if unit is None else unit)
        stack += node.all_input_nodes if unit is None else _read_by(unit)
    moved = sorted((n for n in needed if order[n] > order[first]), key=order.__getitem__)
    last = max(order[node] for node in (*region, *moved))
    if any(_is_random(node) for node in moved) or any(_writes(n) and order[first] < order[n] < last for n in graph.nodes):
        return False
    for node in moved:
        first.prepend(node)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def remade(node: torch.fx.Node) -> torch.fx.Node:
        """``node`` for readers outside: views inside are made again from what the region returns."""
        if node not in members or not is_view(node.target):  # type: ignore[arg-type]
            return node
        if node not in copies:
            with graph.inserting_after(node):
                copies[node] = graph.node_copy(node, remade)
        return copies[node]

    for node in region:
        outside = [user for user in node.users if user not in members and user not in copies.values()]
        if outside and is_view(node.target):  # type: ignore[arg-type]
            copy = remade(node)
            for user in outside:
                user.replace_input_with(node, copy)
    return True


def _read_by(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """What a region reads now: what it read may have become the copy of a view that another region holds."""
    members = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
    return [n for n in read if n not in members and not (n.target is operator.getitem and n.all_input_nodes[0] in members)]


def _is_random(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
