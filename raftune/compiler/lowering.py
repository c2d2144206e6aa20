"""From a graph and a selector to a program: every tunable node gets the kernel that the log, the model or the default names."""

from __future__ import annotations

import torch
import torch.fx

from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.selector import Selector
from raftune.graph.workloads import region_of
from raftune.memory import keep_pages


def lower(graph_module: torch.fx.GraphModule, selector: Selector) -> Program:
    """Choose and build for every tunable node. A node whose choice is PyTorch's own operator keeps it, at no extra cost."""
    keep_pages()
    kernels: dict[torch.fx.Node, BoundKernel] = {}
    for node in graph_module.graph.nodes:
        region = region_of(node)
        if region is None:
            continue
        # The default of an in-place update is not the operator in the graph (that is the fused one): it must be built.
        if selector.choose(region.workload).is_default and not region.workload.mutates:
            continue
        choice, kernel = selector.build(region.workload)
        if not choice.is_default or region.workload.mutates:
            kernels[node] = BoundKernel(region, kernel, choice.dialect)
    selector.report_misses()
    return Program(graph_module, kernels)
