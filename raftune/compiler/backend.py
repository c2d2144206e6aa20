"""The ``torch.compile`` backend: ``torch.compile(model, backend="raftune", options={"log": "model.sqlite"})``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from raftune.compiler.executor import Program
from raftune.compiler.lowering import lower
from raftune.compiler.proposals import proposed_tasks
from raftune.compiler.selector import Selector
from raftune.graph.workloads import Task, merge_tasks, tasks_of

LOG_VARIABLE = "RAFTUNE_LOG"

_selectors: dict[tuple[str | None, int], Selector] = {}


def raftune_backend(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one dynamo graph, forward and backward, from the log in ``options["log"]``, else in ``$RAFTUNE_LOG``.

    Without a log everything runs PyTorch's operators. Raises ``ValueError`` for an unknown option and
    :class:`~raftune.log.LogError` for a log that cannot be read.
    """
    unknown = sorted(set(options or {}) - {"log"})
    if unknown:
        raise ValueError(f"backend 'raftune' has no option {unknown[0]!r}; it knows: log")
    path = (options or {}).get("log") or os.environ.get(LOG_VARIABLE)
    selector = selector_for(path)

    def compile_graph(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        return _boxed(lower(module, selector))

    return _aot(compile_graph)(graph_module, example_inputs)  # type: ignore[no-any-return]


def selector_for(path: str | Path | None) -> Selector:
    """The process's selector for a log and the current thread setting: its counts tell hits from misses."""
    key = (None if path is None else str(Path(path).resolve()), torch.get_num_threads())
    if key not in _selectors:
        _selectors[key] = Selector(path)
    return _selectors[key]


def asked_tasks(run: Callable[[Callable[..., Any]], None]) -> list[Task]:
    """The tasks that ``torch.compile`` asks for: ``run`` is called with a backend to compile and run its model with.

    The graphs are executed with PyTorch's operators, so ``run`` behaves as in eager.
    """
    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module)
        return _boxed(Program(module))

    run(_aot(compile_graph))
    return merge_tasks(tasks_of(*graphs), proposed_tasks(*graphs))


def _aot(compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]) -> Any:
    # The default partition keeps what eager keeps: recomputation would ask for workloads that the step does not have.
    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=default_partition)


def _boxed(program: Program) -> Callable[[list[Any]], Sequence[Any]]:
    def call(args: list[Any]) -> Sequence[Any]:
        return program(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
