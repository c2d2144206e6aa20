"""All proposals for a graph: by rule and by pattern, each set of nodes once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.fx

from raftune.graph.fusion.order import Ancestry
from raftune.graph.fusion.patterns import matched_regions
from raftune.graph.fusion.rules import grouped_regions
from raftune.graph.workloads import Region
from raftune.pattern import Declared
from raftune.workload import Workload


def propose(
    graph: torch.fx.Graph, declared: Iterable[Declared] = (), accepts: Callable[[Workload], bool] | None = None
) -> list[Region]:
    """Regions of two and more operators, which may overlap: what the rules group, then what the patterns match.

    ``accepts`` says whether anything can compete for a workload that a rule proposes; without it all are proposed. Patterns ask
    who declared them.
    """
    ancestry = Ancestry(graph)
    found: dict[frozenset[torch.fx.Node], Region] = {}
    verdicts: dict[Workload, bool] = {}
    for region in grouped_regions(graph, ancestry):
        if accepts is not None and region.workload not in verdicts:
            verdicts[region.workload] = accepts(region.workload)
        if verdicts.get(region.workload, True):
            found[frozenset(region.nodes)] = region
    for pattern in declared:
        for region in matched_regions(graph, ancestry, pattern):
            found.setdefault(frozenset(region.nodes), region)
    return list(found.values())
