"""The step by a single compiler: as much of its graph as one dialect takes, lowered by that dialect alone."""

from __future__ import annotations

import logging

import torch.fx

from raftune.compiler.executor import BoundKernel, Program
from raftune.compiler.lowering import assemble, chosen_kernel
from raftune.compiler.selector import Selector
from raftune.dialects import registry
from raftune.dialects.base import BuildError, Dialect
from raftune.graph import Region
from raftune.graph.fusion import whole_regions

logger = logging.getLogger("raftune")


def single_compilers() -> list[Dialect]:
    """The enabled dialects that take whole graphs."""
    return [dialect for dialect in registry.enabled() if dialect.takes_graphs]


def compiled_alone(graph_module: torch.fx.GraphModule, dialect: Dialect, selector: Selector) -> Program | None:
    """A program in which ``dialect`` has every operator that a region may hold; ``None`` if it cannot have them.

    What must stay outside (random operators, updates in place) runs as ``selector`` chooses.
    """
    whole = [region for region in whole_regions(graph_module.graph) if dialect.supports(region.workload)]
    wanted = {region.workload for region in whole}

    def build(region: Region) -> BoundKernel | None:
        if region.workload not in wanted:
            return chosen_kernel(region, selector) if region.workload.mutates else None
        config = dialect.candidates(region.workload)[0]
        return BoundKernel(region, dialect.build(region.workload, config), dialect.name)

    try:
        program = assemble(graph_module, whole, build)
    except BuildError as error:
        logger.info("raftune: %s does not compile the whole step: %s", dialect.name, error)
        return None
    return program if any(kernel.dialect == dialect.name for kernel in program.bound) else None
