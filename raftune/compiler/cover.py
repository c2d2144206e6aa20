"""Which proposed regions to lower as one unit: the choice that saves most by the log's measurements, and overlaps nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from raftune.compiler.selector import Selector
from raftune.graph import Region, region_of

# Seconds for the exact solution; what it has found by then is used.
_TIME_LIMIT_S = 5.0


def cover(proposals: Sequence[Region], selector: Selector) -> list[Region]:
    """Those of the proposed regions to lower as one; every other operator is a region of its own.

    The saving of a region is relative: its default is its members' defaults one after the other, so its winner's ratio applies
    to the sum of their times as each member's ratio to its own. The members must have been measured.
    """
    worth = [(region, saving) for region in proposals if (saving := saving_us(region, selector)) > 0.0]
    if not worth:
        return []
    chosen = _best_disjoint([set(region.nodes) for region, _ in worth], [saving for _, saving in worth])
    return [worth[index][0] for index in chosen]


def saving_us(region: Region, selector: Selector) -> float:
    """Microseconds that one run saves as one unit, over its members apart; 0 where too little is known.

    A region that was not measured counts by the upper 95% bound of what the cost model is confident of, and is never taken on
    a guess. A plan that is followed knows which regions it has.
    """
    if selector.followed:
        return float(len(region.nodes)) if region.workload.digest in selector.followed else 0.0
    ratio = _ratio(region, selector)
    if ratio is None:
        return 0.0
    apart = default = 0.0
    for node in region.nodes:
        single = region_of(node)
        if single is None:
            continue
        winner = selector.winner(single.workload)
        if winner is None:
            return 0.0
        apart += winner.ratio * winner.default_us
        default += winner.default_us
    return apart - ratio * default


def _ratio(region: Region, selector: Selector) -> float | None:
    """The region's time over its default's, measured or at most; ``None`` for the default and where nothing is known."""
    winner = selector.winner(region.workload)
    if winner is not None:
        return None if winner.is_default else winner.ratio
    named = selector.prediction(region.workload)
    return None if named is None else named[1].ratio_high


def _best_disjoint(sets: Sequence[set[torch.fx.Node]], savings: Sequence[float]) -> list[int]:
    """Indices of disjoint sets with the largest sum of savings (an integer program, solved by HiGHS)."""
    if sum(map(len, sets)) == len(set().union(*sets)):
        return list(range(len(sets)))
    # Here, because a plan that is followed has nothing to choose, and SciPy takes time and memory to load.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

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
