"""Rule-based proposals for dialects that generate code: chains of element-wise operators, normalizations and reductions.

A rule only proposes; whether a region is worth lowering as one is measured, like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
# Element-wise operators without the tag.
_ELEMENTWISE = frozenset(
    f"aten::{name}_backward"
    for name in (
        "elu",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "log_sigmoid",
        "mish",
        "sigmoid",
        "silu",
        "softplus",
        "tanh",
        "threshold",
    )
)
# What only places values: a code generator writes them there at once.
_MOVING = frozenset(
    {
        "aten::_to_copy",
        "aten::cat",
        "aten::clone",
        "aten::constant_pad_nd",
        "aten::select_backward",
        "aten::slice_backward",
        "aten::stack",
    }
)
# More operators than this are not one chain any more; and no section has more than that, as code generators take long for it.
_LONGEST_CHAIN = 8
_LONGEST_SECTION = 48
# Over fewer elements than this an operator is its dispatch, and nothing is gained that a measurement would see.
_LEAST_EXTENT = 1024

_Joins = Callable[[torch.fx.Node, torch.fx.Node], bool]


def grouped_regions(graph: torch.fx.Graph, ancestry: Ancestry) -> list[Region]:
    """Regions of two and more operators, which may overlap: sections, chains, and every pair of neighbours in a longer chain.

    A chain is a maximal group of operators over as many elements, what one loop nest does; a section is all that lies between
    products, convolutions and the like, which a compiler of graphs divides into loop nests itself.
    """
    chains = list(_groups(graph, ancestry, _chained, _same_space, _LONGEST_CHAIN))
    pairs = [[a, b] for chain in chains if len(chain) > 2 for b in chain for a in _producers(b) if a in chain]
    sections = _groups(graph, ancestry, _generated, lambda producer, consumer: True, _LONGEST_SECTION)
    found: dict[frozenset[torch.fx.Node], Region] = {}
    for nodes in [*chains, *pairs, *(s for s in sections if max(map(_extent, s)) >= _LEAST_EXTENT)]:
        ordered = sorted(with_views(nodes), key=ancestry.position.__getitem__)
        key = frozenset(ordered)
        if key in found or not ancestry.is_convex(ordered):
            continue
        region = fused_region(ordered)
        if region is not None:
            found[key] = region
    return list(found.values())


def _groups(
    graph: torch.fx.Graph, ancestry: Ancestry, member: Callable[[torch.fx.Node], bool], joins: _Joins, most: int
) -> Iterator[list[torch.fx.Node]]:
    """Maximal convex groups, grown along the graph's order by merging each operator with the groups that it reads."""
    group_of: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if not member(node):
            continue
        group = group_of[node] = [node]
        for producer in _producers(node):
            other = group_of.get(producer)
            if other is None or other is group or not joins(producer, node):
                continue
            merged = sorted({*other, *group}, key=ancestry.position.__getitem__)
            if len(merged) <= most and ancestry.is_convex(sorted(with_views(merged), key=ancestry.position.__getitem__)):
                group = merged
                group_of.update((node, merged) for node in merged)
    unique = {id(group): group for group in group_of.values()}
    yield from (group for group in unique.values() if len(group) > 1)


def _chained(node: torch.fx.Node) -> bool:
    return _computes(node) and _extent(node) >= _LEAST_EXTENT


def _generated(node: torch.fx.Node) -> bool:
    return _computes(node) or (_is_tunable_call(node) and node.target._schema.name in _MOVING)  # type: ignore[union-attr]


def _computes(node: torch.fx.Node) -> bool:
    """Whether loops over elements are all that the operator is."""
    if not _is_tunable_call(node):
        return False
    name, tags = node.target._schema.name, node.target.tags  # type: ignore[union-attr]
    return torch.Tag.pointwise in tags or name in _REDUCING or name in _ELEMENTWISE


def _is_tunable_call(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload) and is_tunable(node.target)


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
