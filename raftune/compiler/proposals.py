"""The proposed regions of a graph, for tuner and compiler alike: what is tuned is what will be asked for."""

from __future__ import annotations

from collections import Counter

import torch.fx

from raftune.dialects import registry
from raftune.graph import Region, Task
from raftune.graph.fusion import propose


def proposed_regions(graph: torch.fx.Graph) -> list[Region]:
    """Regions of several operators for which an enabled dialect offers more than the default; they may overlap."""
    return propose(graph, registry.patterns(), registry.has_alternative)


def proposed_tasks(*graph_modules: torch.fx.GraphModule) -> list[Task]:
    """The proposals of the graphs that make up one step as tasks, in order of first appearance."""
    counts = Counter(region.workload for module in graph_modules for region in proposed_regions(module.graph))
    return [Task(workload, weight) for workload, weight in counts.items()]
