"""Looking through views: which operator is behind a value, and which views lie between operators."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch.fx
from torch._ops import OpOverload

from raftune.graph.workloads import is_view


def source_of(value: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """The operator behind ``value``, and the views on the way to it; the unpacking of several results is looked through."""
    views = []
    while value.op == "call_function" and (value.target is operator.getitem or _is_view(value)):
        if value.target is not operator.getitem:
            views.append(value)
        value = value.all_input_nodes[0]
    return value, views


def with_views(nodes: Collection[torch.fx.Node]) -> set[torch.fx.Node]:
    """``nodes`` and the views between them."""
    found = set(nodes)
    for node in nodes:
        for used in node.all_input_nodes:
            source, views = source_of(used)
            if source in nodes:
                found.update(views)
    return found


def readers_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operators that read a result of ``node``, directly or through views."""
    found: dict[torch.fx.Node, None] = {}
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and (user.target is operator.getitem or _is_view(user)):
            stack += user.users
        else:
            found[user] = None
    return list(found)


def _is_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and is_view(node.target)
