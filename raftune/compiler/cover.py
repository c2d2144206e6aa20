"""Which proposed regions to lower as one unit: the choice that saves most by the log's measurements, and overlaps nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.fx
from scipy.optimize import Bounds, LinearConstraint, milp

from raftune.compiler.proposals import proposed_regions
from raftune.compiler.selector import Selector
from raftune.graph import Region, region_of

# Seconds for the exact solution; what it has found by then is used.
_TIME_LIMIT_S = 5.0


def cover(graph: torch.fx.Graph, selector: Selector) -> list[Region]:
    """The regions of several operators to lower as one; every other operator is a region of its own.

    The saving of a region is relative: its default is its members' defaults one after the other, so its winner's ratio applies
    to the sum of their times as each member's ratio to its own. Only what was measured counts, winner and members.
    """
    worth = [(region, saving) for region in proposed_regions(graph) if (saving := _saving_us(region, selector)) > 0.0]
    if not worth:
        return []
    chosen = _best_disjoint([set(region.nodes) for region, _ in worth], [saving for _, saving in worth])
    return [worth[index][0] for index in chosen]


def _saving_us(region: Region, selector: Selector) -> float:
    """Microseconds of one run; 0 where the log knows too little. A plan that is followed knows which regions it has."""
    if selector.followed:
        return float(len(region.nodes)) if region.workload.digest in selector.followed else 0.0
    fused = selector.winner(region.workload)
    if fused is None or fused.is_default:
        return 0.0
    apart = together = 0.0
    for node in region.nodes:
        single = region_of(node)
        if single is None:
            continue
        winner = selector.winner(single.workload)
        if winner is None:
            return 0.0
        apart += winner.ratio * winner.default_us
        together += fused.ratio * winner.default_us
    return apart - together


def _best_disjoint(sets: Sequence[set[torch.fx.Node]], savings: Sequence[float]) -> list[int]:
    """Indices of disjoint sets with the largest sum of savings (an integer program, solved by HiGHS)."""
    elements = {node: row for row, node in enumerate(dict.fromkeys(node for nodes in sets for node in nodes))}
    covers = np.zeros((len(elements), len(sets)))
    for column, nodes in enumerate(sets):
        covers[[elements[node] for node in nodes], column] = 1.0
    found = milp(
        -np.asarray(savings),
        integrality=np.ones(len(sets)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(covers, ub=1.0),
        options={"time_limit": _TIME_LIMIT_S},
    )
    return [] if found.x is None else [index for index, value in enumerate(found.x) if value > 0.5]
