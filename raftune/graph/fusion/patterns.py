"""Proposals by pattern: the places of a graph where a library says that it has a kernel for several operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.fx

from raftune.graph.fusion.order import Ancestry
from raftune.graph.fusion.views import readers_of, source_of, with_views
from raftune.graph.workloads import Region, fused_region
from raftune.pattern import Declared, Either, Op, Operand, Pattern, Wildcard

_Bound = Mapping[Op, torch.fx.Node]


def matched_regions(graph: torch.fx.Graph, ancestry: Ancestry, declared: Declared) -> list[Region]:
    """The regions of one pattern: for each last operator the first match that can run as one unit and is accepted.

    A region inside another one is left out: whoever has a kernel for the whole has no use for the part.
    """
    found: dict[frozenset[torch.fx.Node], Region] = {}
    for node in graph.nodes:
        region = _first_accepted(node, ancestry, declared)
        if region is not None:
            found[frozenset(region.nodes)] = region
    return [region for nodes, region in found.items() if not any(nodes < others for others in found)]


def matches(pattern: Pattern, node: torch.fx.Node) -> Iterator[list[torch.fx.Node]]:
    """The members, in no order, of every match of ``pattern`` whose last operator is ``node``."""
    if source_of(node)[0] is not node:
        return
    for bound in _match(pattern.last, node, {}):
        joined = bound
        for extra in pattern.beside:
            joined = _joined(extra, joined)
        yield list(joined.values())


def _first_accepted(node: torch.fx.Node, ancestry: Ancestry, declared: Declared) -> Region | None:
    for members in matches(declared.pattern, node):
        ordered = sorted(with_views(members), key=ancestry.position.__getitem__)
        if len(members) > 1 and ancestry.is_convex(ordered):
            region = fused_region(ordered)
            if region is not None and declared.accepts(region.workload):
                return region
    return None


def _joined(extra: Op, bound: _Bound) -> _Bound:
    """``bound`` with one reader of its members that matches ``extra``, if there is one."""
    for member in bound.values():
        for reader in readers_of(member):
            for found in _match(extra, reader, bound):
                return found
    return bound


def _match(operand: Operand, value: Any, bound: _Bound) -> Iterator[_Bound]:
    match operand:
        case Wildcard(number=number):
            if not number or isinstance(value, int | float):
                yield bound
        case Either(alternatives=alternatives):
            for alternative in alternatives:
                yield from _match(alternative, value, bound)
        case Op():
            if isinstance(value, torch.fx.Node):
                yield from _match_member(operand, source_of(value)[0], bound)


def _match_member(member: Op, node: torch.fx.Node, bound: _Bound) -> Iterator[_Bound]:
    if member in bound or node in bound.values():
        if bound.get(member) is node:
            yield bound
        return
    if node.op != "call_function" or str(node.target) not in member.names:
        return
    orders = [member.operands]
    if member.commutative:
        orders.append((member.operands[1], member.operands[0], *member.operands[2:]))
    for operands in orders:
        yield from _match_all(operands, node.args, {**bound, member: node})


def _match_all(operands: Sequence[Operand], values: Sequence[Any], bound: _Bound) -> Iterator[_Bound]:
    if not operands:
        yield bound
        return
    for found in _match(operands[0], values[0] if values else None, bound):
        yield from _match_all(operands[1:], values[1:], found)
