"""Rule-based proposals for dialects that generate code: chains of element-wise operators, normalizations and reductions.

A rule only proposes; whether a region is worth lowering as one is measured, like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.fx
from torch._ops import OpOverload

from raftune.graph.fusion.order import Ancestry
from raftune.graph.fusion.views import source_of, with_views
from raftune.graph.workloads import Region, fused_region, is_tunable

# Operators that compute in one or two passes over their argument, which a code generator merges with element-wise neighbours.
_REDUCING = frozenset(
    {
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        "aten::native_batch_norm",
        "aten::native_batch_norm_backward",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_functional",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_log_softmax",
        "aten::_log_softmax_backward_data",
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
        "aten::sum",
        "aten::mean",
        "aten::var",
        "aten::amax",
    }
)
_ELEMENTWISE = frozenset({"aten::gelu_backward", "aten::threshold_backward", "aten::silu_backward", "aten::tanh_backward"})
# More operators than this are not one chain any more, and take a code generator long.
_MOST = 8
# Over fewer elements than this an operator is its dispatch, and nothing is gained that a measurement would see.
_LEAST_EXTENT = 1024


def grouped_regions(graph: torch.fx.Graph, ancestry: Ancestry) -> list[Region]:
    """Regions of two and more operators, which may overlap: maximal groups, and every pair of neighbours in a larger one."""
    found: dict[frozenset[torch.fx.Node], Region] = {}
    for group in _groups(graph, ancestry):
        members = set(group)
        pairs = [[a, b] for b in group for a in _producers(b) if a in members] if len(group) > 2 else []
        for nodes in [group, *pairs]:
            ordered = sorted(with_views(nodes), key=ancestry.position.__getitem__)
            key = frozenset(ordered)
            if key in found or not ancestry.is_convex(ordered):
                continue
            region = fused_region(ordered)
            if region is not None:
                found[key] = region
    return list(found.values())


def _groups(graph: torch.fx.Graph, ancestry: Ancestry) -> Iterator[list[torch.fx.Node]]:
    """Maximal convex groups, grown along the graph's order by merging each operator with the groups that it reads."""
    group_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if not _fusible(node):
            continue
        group = group_of[node] = [node]
        for producer in _producers(node):
            other = group_of.get(producer)
            if other is None or other is group or not _same_space(producer, node):
                continue
            merged = sorted({*other, *group}, key=ancestry.position.__getitem__)
            if len(merged) <= _MOST and ancestry.is_convex(sorted(with_views(merged), key=ancestry.position.__getitem__)):
                group = merged
                group_of.update((member, merged) for member in merged)
    unique = {id(group): group for group in group_of.values()}
    yield from (group for group in unique.values() if len(group) > 1)


def _fusible(node: torch.fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_tunable(node.target):
        return False
    name = node.target._schema.name
    if _extent(node) < _LEAST_EXTENT:
        return False
    return torch.Tag.pointwise in node.target.tags or name in _REDUCING or name in _ELEMENTWISE


def _producers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operators that ``node`` reads, through views and getitems."""
    return list(dict.fromkeys(source_of(used)[0] for used in node.all_input_nodes))


def _same_space(producer: torch.fx.Node, consumer: torch.fx.Node) -> bool:
    """Whether both run over as many elements: what a generated loop nest can share."""
    return _extent(producer) == _extent(consumer)


def _extent(node: torch.fx.Node) -> int:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [t for v in values for t in (v if isinstance(v, list | tuple) else [v]) if isinstance(t, torch.Tensor)]
    return max((math.prod(t.shape) for t in tensors), default=0)
