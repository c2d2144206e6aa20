"""What ``raftune plan explain`` shows: the plan that a log makes for a target, and all that could run at some nodes of it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raftune.compiler.cover import cover
from raftune.compiler.explain import Alternative, Unit, alternatives, considered, units
from raftune.compiler.lowering import regions_of
from raftune.compiler.plan import recommended_plan
from raftune.compiler.proposals import proposed_regions
from raftune.compiler.selector import Selector
from raftune.graph import capture, region_of
from raftune.measure.race import RaceResult
from raftune.models import Target
from raftune.targets import TargetError


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node: the regions that it could be part of, and the alternatives of the first two of them: the chosen and its own."""

    name: str
    units: tuple[Unit, ...]
    alternatives: tuple[tuple[Unit, tuple[Alternative, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.name,
            "regions": [unit.to_json() for unit in self.units],
            "alternatives": [
                {"digest": unit.workload.digest, "candidates": [a.to_json() for a in found]}
                for unit, found in self.alternatives
            ],
        }


@dataclass(frozen=True, slots=True)
class PlanReport:
    """``race`` is what the log holds of the step, if it still recommends the plan that was raced."""

    units: tuple[Unit, ...]
    nodes: tuple[NodeReport, ...]
    race: RaceResult | None

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": [unit.to_json() for unit in self.units],
            "nodes": [node.to_json() for node in self.nodes],
            "race": None if self.race is None else self.race.to_json(),
        }


def explain_plan(target: Target, mode: Any, log_path: Path | None, names: Sequence[str] = ()) -> PlanReport:
    """The plan for ``target`` by a log, with a report of each node in ``names``.

    Raises :class:`~raftune.targets.TargetError` for a node that the step does not have,
    :class:`~raftune.graph.CaptureError` and :class:`~raftune.log.LogError`.
    """
    graph = capture(target.model, target.inputs, target.loss, target.optimizer, mode=mode).reinplaced()
    selector = Selector(log_path)
    nodes = {node.name: node for node in graph.graph_module.graph.nodes if region_of(node) is not None}
    for name in names:
        if name not in nodes:
            close = difflib.get_close_matches(name, nodes, n=3, cutoff=0.4)
            hint = f"; similar ones: {', '.join(close)}" if close else ""
            raise TargetError(f"the step has no operator called {name!r}{hint} (all are listed without a name)")
    proposals = proposed_regions(graph.graph_module.graph)
    fused = cover(proposals, selector)
    regions = regions_of(graph.graph_module.graph, fused)
    plan = recommended_plan(graph, regions, selector)
    reports = [_report(nodes[name], regions, proposals, selector) for name in names]
    return PlanReport(tuple(units(regions, selector)), tuple(reports), None if plan is None else plan.race)


def _report(node: torch.fx.Node, regions: Sequence[Any], proposals: Sequence[Any], selector: Selector) -> NodeReport:
    own = region_of(node)
    assert own is not None
    found = considered(node, regions, [own, *proposals], selector)
    shown = dict.fromkeys([found[0].workload, own.workload])
    units_of = {unit.workload: unit for unit in found}
    return NodeReport(
        node.name,
        tuple(found),
        tuple((units_of[workload], tuple(alternatives(workload, selector))) for workload in shown),
    )
