"""Runs a lowered graph: straight-line Python over bound kernels, with every value freed after its last use."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from raftune.dialects.base import Kernel
from raftune.graph.workloads import Region
from raftune.workload import TensorSpec, Workload

logger = logging.getLogger("raftune")


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel in the place of a region, and the dialect that it is of."""

    region: Region
    kernel: Kernel
    dialect: str = ""

    @property
    def workload(self) -> Workload:
        return self.region.workload

    @property
    def inputs(self) -> tuple[torch.fx.Node, ...]:
        return self.region.inputs

    @property
    def positions(self) -> tuple[int, ...]:
        return self.region.positions


class Program:
    """A graph with some nodes replaced by kernels. Call it with a list of flat inputs; the list is emptied (boxed convention).

    The first call checks every kernel's real inputs against the specs that it was built for, because fake tensors can be wrong
    about strides: a kernel that does not fit, or raises, gives its place back to PyTorch's operator. Later calls run compiled
    straight-line code.
    """

    def __init__(self, graph_module: torch.fx.GraphModule, kernels: Mapping[torch.fx.Node, BoundKernel]) -> None:
        self._module = graph_module
        self._kernels = dict(kernels)
        self._code: Callable[[list[Any]], Sequence[Any]] | None = None

    @property
    def kernels(self) -> int:
        """How many nodes run something else than PyTorch's operator."""
        return len(self._kernels)

    @property
    def dialects(self) -> dict[torch.fx.Node, str]:
        """The dialect of each node that does not run PyTorch's operator."""
        return {node: bound.dialect for node, bound in self._kernels.items()}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        with torch._C._AutoDispatchBelowAutograd():
            if self._code is not None:
                return self._code(args)
            results = self._first_call(args)
            self._code = _generate(self._module, self._kernels)
            return results

    def traced(self, tick: Callable[[torch.fx.Node | None], None]) -> Callable[[list[Any]], Sequence[Any]]:
        """The same program, ``tick`` called at the start with ``None`` and after each node with it; this one must have run."""

        def run(args: list[Any]) -> Sequence[Any]:
            with torch._C._AutoDispatchBelowAutograd():
                return code(args)

        code = _generate(self._module, self._kernels, tick)
        return run

    def _first_call(self, args: list[Any]) -> Sequence[Any]:
        runner = _CheckingInterpreter(self._module, self._kernels)
        results: Sequence[Any] = runner.run(*args)
        args.clear()
        return results


class _CheckingInterpreter(torch.fx.Interpreter):
    """Runs kernels node by node, removing from ``kernels`` those that do not fit the values they meet."""

    def __init__(self, module: torch.fx.GraphModule, kernels: dict[torch.fx.Node, BoundKernel]) -> None:
        super().__init__(module)
        self._kernels = kernels

    def run_node(self, n: torch.fx.Node) -> Any:
        bound = self._kernels.get(n)
        if bound is None:
            return super().run_node(n)
        values = [self.env[node] for node in bound.inputs]
        wrong = next(((v, s) for v, s in zip(values, bound.workload.inputs, strict=True) if not _fits(v, s)), None)
        if wrong is not None:
            value, spec = wrong
            logger.warning(
                "raftune: %s was tuned for stride %s but meets %s: PyTorch's operator runs instead",
                bound.workload.op,
                spec.stride,
                tuple(value.stride()),
            )
            del self._kernels[n]
            return super().run_node(n)
        try:
            result = bound.kernel(*values)
        except Exception as error:  # a kernel that only fails on real tensors costs its own place, unless it may have written
            if bound.workload.mutates:
                raise
            logger.warning("raftune: a kernel for %s failed, PyTorch's operator runs instead: %s", bound.workload.op, error)
            del self._kernels[n]
            return super().run_node(n)
        return _as_node_value(n, bound, result)


def _fits(value: Any, spec: TensorSpec) -> bool:
    if tuple(value.shape) != spec.shape or str(value.dtype) != f"torch.{spec.dtype}":
        return False
    # The stride of a dimension of size one, or of an empty tensor, addresses nothing.
    return spec.numel == 0 or all(
        a == b for a, b, size in zip(value.stride(), spec.stride, spec.shape, strict=True) if size != 1
    )


def _as_node_value(node: torch.fx.Node, bound: BoundKernel, result: Any) -> Any:
    """The kernel's results where the original operator would have put them."""
    if isinstance(node.meta.get("val"), torch.Tensor) or not bound.positions:
        return result
    results = (result,) if len(bound.positions) == 1 else result
    value: list[Any] = [None] * (max(bound.positions) + 1)
    for position, tensor in zip(bound.positions, results, strict=True):
        value[position] = tensor
    return tuple(value)


def _generate(
    module: torch.fx.GraphModule,
    kernels: Mapping[torch.fx.Node, BoundKernel],
    tick: Callable[[torch.fx.Node | None], None] | None = None,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Python source of numbered names only; every callable and constant is bound by name, so no text of theirs is compiled."""
    bindings: dict[str, Any] = {}
    names: dict[torch.fx.Node, str] = {}
    lines: list[str] = []
    nodes = list(module.graph.nodes)
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    # A kernel that returns one of several results is bare: the getitem that would unpack it is an alias of it.
    bare = {n for n, bound in kernels.items() if len(bound.positions) == 1 and not isinstance(n.meta.get("val"), torch.Tensor)}

    def bind(prefix: str, value: Any) -> str:
        name = f"{prefix}{len(bindings)}"
        bindings[name] = value
        return name

    def text(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return names[value]
        if isinstance(value, list | tuple) and any(isinstance(v, torch.fx.Node) for v in _leaves(value)):
            return "[" + ", ".join(text(v) for v in value) + "]"
        return bind("c", value)

    for index, node in enumerate(placeholders):
        names[node] = f"v{index}"
    if placeholders:
        lines += [", ".join(names[n] for n in placeholders) + ", = args", "args.clear()"]
    if tick is not None:
        bindings["tick"] = tick
        lines.append("tick(None)")
    for number, node in enumerate(nodes, start=len(placeholders)):
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {text(node.args[0])}")
            break
        names[node] = f"v{number}"
        bound = kernels.get(node)
        if bound is not None:
            call = f"{bind('f', bound.kernel)}({', '.join(names[n] for n in bound.inputs)})"
        elif node.op == "get_attr":
            call = bind("c", _attribute(module, str(node.target)))
        elif node.target is operator.getitem:
            source, index = node.args
            call = _item(source, index, names, kernels, bare)
        else:
            target = node.target._op if isinstance(node.target, OpOverload) else node.target
            keywords = [f"{k}={text(v)}" for k, v in node.kwargs.items()]
            call = f"{bind('f', target)}({', '.join([*(text(a) for a in node.args), *keywords])})"
        lines.append(f"{names[node]} = {call}")
        dead = [n for n in dict.fromkeys([node, *node.all_input_nodes]) if last_use.get(n, node) is node]
        if dead:
            lines.append(" = ".join(names[n] for n in dead) + " = None")
        if tick is not None:
            lines.append(f"tick({bind('n', node)})")
    source = "def run(args):\n" + "\n".join("    " + line for line in lines) + "\n"
    exec(compile(source, "<raftune program>", "exec"), bindings)
    run: Callable[[list[Any]], Sequence[Any]] = bindings["run"]
    return run


def _item(
    source: Any,
    index: Any,
    names: Mapping[torch.fx.Node, str],
    kernels: Mapping[torch.fx.Node, BoundKernel],
    bare: set[torch.fx.Node],
) -> str:
    if source in bare:
        return names[source] if index == kernels[source].positions[0] else "None"
    if source in kernels and index in kernels[source].positions:
        index = kernels[source].positions.index(index)
    elif source in kernels:
        return "None"
    return f"{names[source]}[{int(index)}]"


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in (_leaves(v) if isinstance(v, list | tuple) else [v])]


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
