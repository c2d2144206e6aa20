"""All of a graph as few regions, for a compiler that takes whole graphs."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
import torch.fx
from torch._ops import OpOverload

from raftune.graph.workloads import Region, fused_region, is_view, region_of


def whole_regions(graph: torch.fx.Graph) -> list[Region]:
    """The largest regions that can each run as one unit; together they hold every operator that a region may hold.

    Random operators and writes stay outside, so what comes before and what comes after one of them are different regions.
    """
    # How many times the longest path to a node has left a region. Operators of one level are convex: a path that leaves them
    # comes back on a higher level.
    level: dict[torch.fx.Node, int] = {}
    inside: set[torch.fx.Node] = set()
    members: defaultdict[int, list[torch.fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is operator.getitem:
            source = node.all_input_nodes[0]
            level[node] = level[source]
            if source in inside:
                inside.add(node)
        elif _may_be_inside(node):
            level[node] = max((level[used] for used in node.all_input_nodes), default=0)
            inside.add(node)
            members[level[node]].append(node)
        else:
            level[node] = max((level[used] + (used in inside) for used in node.all_input_nodes), default=0)
    regions = [fused_region(nodes) for _, nodes in sorted(members.items())]
    return [region for region in regions if region is not None and len(region.workload.operators) > 1]


def _may_be_inside(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    if not is_view(node.target):
        return region_of(node) is not None
    # The values that an integer input may have are known from the operator that reads it, which a view must not stand before.
    return isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_floating_point()
