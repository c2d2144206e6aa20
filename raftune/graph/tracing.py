"""What surrounds the model while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class PlainRecurrence(TorchFunctionMode):
    """Trace recurrent layers through PyTorch's C++ code rather than its Python decompositions.

    The decompositions (seen in 2.13) leave out the dropout between layers, and take an oneDNN operator without a backward
    when the input needs no gradient. oneDNN's own recurrent operator is avoided as well: its workspace has a size that only
    real tensors tell. What is left are the matrix products and activations of every time step.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch._C._DisablePythonDispatcher(), _without_onednn():
            return func(*args, **(kwargs or {}))


@contextmanager
def _without_onednn() -> Iterator[None]:
    # torch.backends.mkldnn.flags would touch, and warn about, settings for other devices too.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


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
