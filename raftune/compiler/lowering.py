"""From a graph and a selector to a program: every region gets the kernel that the log, the model or the default names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from raftune.compiler.cover import cover
from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.selector import Selector
from raftune.graph import Region, region_of
from raftune.graph.fusion import contract
from raftune.memory import keep_pages


def lower(graph_module: torch.fx.GraphModule, selector: Selector) -> Program:
    """Choose and build for every region. A node whose choice is PyTorch's own operator keeps it, at no extra cost."""
    keep_pages()
    graph_module, fused = _contracted(graph_module, cover(graph_module.graph, selector))
    kernels = []
    for region in [*fused, *_singles(graph_module.graph, fused)]:
        # The default of an in-place update is not the operator in the graph (that is the fused one): it must be built.
        if selector.choose(region.workload).is_default and not region.workload.mutates:
            continue
        choice, kernel = selector.build(region.workload)
        if not choice.is_default or region.workload.mutates:
            kernels.append(BoundKernel(region, kernel, choice.dialect))
    selector.report_misses()
    return Program(graph_module, kernels)


def regions_of(graph: torch.fx.Graph, selector: Selector) -> list[Region]:
    """The regions that lowering the graph asks the selector for."""
    fused = cover(graph, selector)
    return [*fused, *_singles(graph, fused)]


def _singles(graph: torch.fx.Graph, fused: Sequence[Region]) -> list[Region]:
    covered = {node for region in fused for node in region.nodes}
    return [region for node in graph.nodes if node not in covered and (region := region_of(node)) is not None]


def _contracted(module: torch.fx.GraphModule, regions: Sequence[Region]) -> tuple[torch.fx.GraphModule, list[Region]]:
    """A copy of the graph in which each region can run at its first node, and those regions for which that is possible."""
    if not regions:
        return module, []
    graph = torch.fx.Graph()
    copy: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(module.graph, copy)
    graph.output(output)
    for old, new in copy.items():
        new.meta = dict(old.meta)
    moved = [
        Region(
            tuple(copy[node] for node in region.nodes),
            region.workload,
            tuple(copy[node] for node in region.inputs),
            tuple((copy[node], position) for node, position in region.results),
        )
        for region in regions
    ]
    fitting: list[Region] = []
    for region in moved:
        if contract(graph, region, fitting):
            fitting.append(region)
    graph.lint()
    return torch.fx.GraphModule(module, graph), fitting
