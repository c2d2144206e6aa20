"""What surrounds the model while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode


@contextmanager
def compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` be true, so that models skip what needs values (as under ``torch.compile``)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def random_nodes() -> int:
    """How many operators that draw random numbers have been traced so far."""
    mode = get_proxy_mode()
    assert mode is not None
    operators = (node.target for node in mode.tracer.graph.nodes)
    return sum(isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags for op in operators)
