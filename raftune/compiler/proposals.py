"""The proposed regions of a graph, for tuner and compiler alike: what is tuned is what will be asked for."""

from __future__ import annotations

from collections import Counter

import torch.fx

from raftune.dialects import registry
from raftune.graph import Region, Task, region_of
from raftune.graph.fusion import propose
from raftune.workload import Workload


def proposed_regions(graph: torch.fx.Graph) -> list[Region]:
    """Regions of several operators for which an enabled dialect offers more than the default; they may overlap."""
    return propose(graph, registry.patterns(), registry.has_alternative)


def proposed_tasks(*graph_modules: torch.fx.GraphModule) -> list[Task]:
    """The proposals of the graphs that make up one step as tasks, in order of first appearance."""
    regions = [region for module in graph_modules for region in proposed_regions(module.graph)]
    counts = Counter(region.workload for region in regions)
    first = {region.workload: region for region in reversed(regions)}
    return [Task(workload, weight, _parts(first[workload])) for workload, weight in counts.items()]


def _parts(region: Region) -> tuple[Workload, ...]:
    singles = (region_of(node) for node in region.nodes)
    return tuple(single.workload for single in singles if single is not None)
