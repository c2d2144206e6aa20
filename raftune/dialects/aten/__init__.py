"""PyTorch's own operators: the default of every workload, and the other ways in which they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from raftune.dialects.aten import (
    attention,
    convolution,
    epilogue,
    loss_head,
    matmul,
    memory,
    optimizer,
    reduction,
    written_attention,
)
from raftune.dialects.base import BuildError, Dialect, Kernel
from raftune.dialects.calls import check_keys, direct, torch_version
from raftune.dialects.convolutions import Convolution
from raftune.dialects.epilogue import PATTERNS
from raftune.dialects.products import Product
from raftune.pattern import Pattern
from raftune.workload import Config, Workload

_DEFAULT: Config = {"formulation": "default"}
# Formulations of several operators as one.
_REGIONS: dict[str, Callable[[Workload, Config], Kernel]] = {
    "accumulate": epilogue.build,
    "in_place": epilogue.build,
    "sdpa": written_attention.build,
    "row_blocks": loss_head.build,
}


class AtenDialect(Dialect):
    """What eager PyTorch runs (``{"formulation": "default"}``) and its alternatives."""

    name: ClassVar[str] = "aten"
    priority: ClassVar[int] = 100
    device_kinds: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})

    def version(self) -> str:
        return torch_version()

    def supports(self, workload: Workload) -> bool:
        """Everything: the default is what PyTorch runs."""
        del workload
        return True

    def patterns(self) -> Sequence[Pattern]:
        return (*PATTERNS, *written_attention.PATTERNS, *loss_head.PATTERNS)

    def candidates(self, workload: Workload) -> Sequence[Config]:
        found = [_DEFAULT]
        if optimizer.is_update(workload):
            return [*found, *optimizer.configs(workload)]
        if len(workload.operators) > 1:
            return [
                *found,
                *epilogue.configs(workload),
                *written_attention.configs(workload),
                *loss_head.configs(workload),
            ]
        for family in (matmul, convolution, attention, reduction, memory):
            found.extend(family.configs(workload))
        return found

    def build(self, workload: Workload, config: Config) -> Kernel:
        formulation = config.get("formulation")
        if not isinstance(formulation, str):
            raise BuildError(f"config formulation={formulation!r}: expected a name")
        if optimizer.is_update(workload):
            return optimizer.build(workload, config)
        if formulation == "default":
            check_keys(config, ("formulation",))
            return direct(workload)
        if formulation in _REGIONS:
            return _REGIONS[formulation](workload, config)
        if len(workload.operators) > 1:
            raise BuildError(f"config formulation={formulation!r}: {workload.op} with these specs has only 'default'")
        if formulation == "contiguous":
            return memory.build_contiguous(workload, config)
        if formulation == "memory":
            return memory.build_memory(workload, config)
        if Product.of(workload):
            return matmul.build(workload, config)
        if Convolution.of(workload):
            return convolution.build(workload, config)
        if attention.applies(workload):
            return attention.build(workload, config)
        if not reduction.configs(workload):
            raise BuildError(f"config formulation={formulation!r}: {workload.op} with these specs has only 'default'")
        return reduction.build(workload, config)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """Copies that a product's formulation makes, and whether memory formats are changed."""
        found = {"default": float(config.get("formulation") == "default"), "changes_layout": float("layout" in config)}
        return {**found, **matmul.features(workload, config)} if Product.of(workload) else found
