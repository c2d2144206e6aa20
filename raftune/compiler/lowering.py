"""From a graph and a selector to a program: every region gets the kernel that the log, the model or the default names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.fx

from raftune.compiler.cover import cover
from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.proposals import proposed_regions
from raftune.compiler.selector import Selector
from raftune.graph import Region, fused_region, region_of
from raftune.graph.fusion import contract
from raftune.memory import keep_pages
from raftune.workload import Workload


def lower(graph_module: torch.fx.GraphModule, selector: Selector, fused: Sequence[Region] | None = None) -> Program:
    """Choose and build for every region. A node whose choice is PyTorch's own operator keeps it, at no extra cost.

    ``fused`` are the regions of several operators, by default those that the log says are worth it.
    """
    if fused is None:
        fused = cover(proposed_regions(graph_module.graph), selector)
    program = assemble(graph_module, fused, lambda region: chosen_kernel(region, selector))
    selector.report_misses()
    return program


def assemble(
    graph_module: torch.fx.GraphModule, fused: Sequence[Region], build: Callable[[Region], BoundKernel | None]
) -> Program:
    """A program of ``fused`` and of the remaining operators; where ``build`` gives ``None`` PyTorch's operators run."""
    graph_module, fused = _contracted(graph_module, fused)
    built: dict[Workload, BoundKernel | None] = {}
    kernels = []
    for region in regions_of(graph_module.graph, fused):
        if region.workload not in built:
            built[region.workload] = build(region)
        # A kernel has no state: one serves all regions of its workload.
        if (bound := built[region.workload]) is not None:
            kernels.append(replace(bound, region=region))
    keep_pages()
    return Program(graph_module, kernels)


def chosen_kernel(region: Region, selector: Selector) -> BoundKernel | None:
    """What the selector chooses for a region; ``None`` for PyTorch's operators as they stand in the graph."""
    # The default of an in-place update is not the operator in the graph (that is the fused one): it must be built.
    if selector.choose(region.workload).is_default and not region.workload.mutates:
        return None
    choice, kernel = selector.build(region.workload)
    return None if choice.is_default and not region.workload.mutates else BoundKernel(region, kernel, choice.dialect)


def regions_of(graph: torch.fx.Graph, fused: Sequence[Region]) -> list[Region]:
    """``fused`` and every operator outside of them that is a region of its own."""
    covered = {node for region in fused for node in region.nodes}
    return [*fused, *(r for node in graph.nodes if node not in covered and (r := region_of(node)) is not None)]


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
    fitting: list[tuple[torch.fx.Node, ...]] = []
    for nodes in [tuple(copy[node] for node in region.nodes) for region in regions]:
        if contract(graph, nodes, fitting):
            fitting.append(nodes)
    graph.lint()
    # What a region reads may have become the copy of a view that another region holds.
    again = [fused_region(nodes) for nodes in fitting]
    return torch.fx.GraphModule(module, graph), [region for region in again if region is not None]
