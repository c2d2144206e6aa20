"""Runs a lowered graph: straight-line Python over bound kernels, with every value freed after its last use."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    def first(self) -> torch.fx.Node:
        """Where the kernel runs."""
        return self.region.nodes[0]


class Program:
    """A graph with some nodes replaced by kernels. Call it with a list of flat inputs; the list is emptied (boxed convention).

    The first call checks every kernel's real inputs against the specs that it was built for, because fake tensors can be wrong
    about strides: a kernel that does not fit, or raises, gives its place back to PyTorch's operator. Later calls run compiled
    straight-line code.
    """

    def __init__(self, graph_module: torch.fx.GraphModule, kernels: Iterable[BoundKernel] = ()) -> None:
        self._module = graph_module
        self._kernels = {bound.first: bound for bound in kernels}
        self._code: Callable[[list[Any]], Sequence[Any]] | None = None

    @property
    def kernels(self) -> int:
        """How many kernels run in the place of PyTorch's operators."""
        return len(self._kernels)

    @property
    def bound(self) -> list[BoundKernel]:
        """The kernels that run."""
        return list(self._kernels.values())

    @property
    def dialects(self) -> dict[torch.fx.Node, str]:
        """The dialect of each node that does not run PyTorch's operator."""
        return {node: bound.dialect for bound in self._kernels.values() for node in bound.region.nodes}

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
    """Runs kernels at their first node, removing from ``kernels`` those that do not fit the values they meet."""

    def __init__(self, module: torch.fx.GraphModule, kernels: dict[torch.fx.Node, BoundKernel]) -> None:
        super().__init__(module)
        self._kernels = kernels
        self._values: dict[torch.fx.Node, Any] = {}  # of nodes that a kernel stands for

    def run_node(self, n: torch.fx.Node) -> Any:
        bound = self._kernels.get(n)
        if bound is not None and not self._run_kernel(bound):
            del self._kernels[n]
        if n in self._values:
            return self._values.pop(n)
        if n.target is operator.getitem and self.env[n.all_input_nodes[0]] is None:
            return None  # of a node inside a region, whose results nobody else reads
        return super().run_node(n)

    def _run_kernel(self, bound: BoundKernel) -> bool:
        """Put the results where the region's nodes find them; whether the kernel fitted."""
        region = bound.region
        values = [self.env[node] for node in region.inputs]
        wrong = next(((v, s) for v, s in zip(values, bound.workload.inputs, strict=True) if not _fits(v, s)), None)
        if wrong is not None:
            value, spec = wrong
            logger.warning(
                "raftune: %s was tuned for stride %s but meets %s: PyTorch's operator runs instead",
                bound.workload.op,
                spec.stride,
                tuple(value.stride()),
            )
            return False
        try:
            returned = bound.kernel(*values)
        except Exception as error:  # a kernel that only fails on real tensors costs its own place, unless it may have written
            if bound.workload.mutates:
                raise
            logger.warning("raftune: a kernel for %s failed, PyTorch's operator runs instead: %s", bound.workload.op, error)
            return False
        results = (returned,) if len(region.results) == 1 else returned or ()
        found: dict[torch.fx.Node, dict[int, Any]] = {node: {} for node in region.nodes}
        for (node, position), result in zip(region.results, results, strict=True):
            found[node][position] = result
        for node, items in found.items():
            if isinstance(node.meta.get("val"), torch.Tensor):
                self._values[node] = items.get(0)
            else:
                self._values[node] = tuple(items.get(i) for i in range(len(node.meta["val"]))) if items else None
        return True


def _fits(value: Any, spec: TensorSpec) -> bool:
    if tuple(value.shape) != spec.shape or str(value.dtype) != f"torch.{spec.dtype}":
        return False
    # The stride of a dimension of size one, or of an empty tensor, addresses nothing.
    return spec.numel == 0 or all(
        a == b for a, b, size in zip(value.stride(), spec.stride, spec.shape, strict=True) if size != 1
    )


def _generate(
    module: torch.fx.GraphModule,
    kernels: Mapping[torch.fx.Node, BoundKernel],
    tick: Callable[[torch.fx.Node | None], None] | None = None,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Python source of numbered names only; every callable and constant is bound by name, so no text of theirs is compiled."""
    bindings: dict[str, Any] = {}
    names: dict[torch.fx.Node, str] = {}
    items: dict[tuple[torch.fx.Node, int], str] = {}  # results of nodes that have several, as kernels return them
    lines: list[str] = []
    nodes = list(module.graph.nodes)
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    placeholders = [n for n in nodes if n.op == "placeholder"]
    covered = {node for bound in kernels.values() for node in bound.region.nodes}

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

    def kernel_line(bound: BoundKernel) -> str:
        targets = []
        for node, position in bound.region.results:
            name = f"v{numbers[node]}"
            if isinstance(node.meta.get("val"), torch.Tensor):
                names[node] = name
            else:
                name = items[node, position] = f"{name}_{position}"
            targets.append(name)
        call = f"{bind('f', bound.kernel)}({', '.join(names[n] for n in bound.region.inputs)})"
        return f"{', '.join(targets)} = {call}" if targets else call

    def statement(node: torch.fx.Node) -> str | None:
        """The statement for a node that no kernel stands for."""
        names[node] = name = f"v{numbers[node]}"
        if node.op == "get_attr":
            return f"{name} = {bind('c', _attribute(module, str(node.target)))}"
        if node.target is operator.getitem:
            source, index = node.args
            if source in covered:
                item = items.get((source, index))  # type: ignore[arg-type]
                if item is None:  # inside the region, or read by nobody
                    names[node] = "None"
                    return None
                return f"{name} = {item}"
            return f"{name} = {names[source]}[{int(index)}]"  # type: ignore[index,arg-type]
        target = node.target._op if isinstance(node.target, OpOverload) else node.target
        keywords = [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        return f"{name} = {bind('f', target)}({', '.join([*(text(a) for a in node.args), *keywords])})"

    def variables(node: torch.fx.Node) -> list[str]:
        own = [names[node]] if names.get(node, "None") != "None" else []
        return own + [item for (source, _), item in items.items() if source is node]

    numbers = {node: number for number, node in enumerate(nodes)}
    for index, node in enumerate(placeholders):
        names[node] = f"v{index}"
    if placeholders:
        lines += [", ".join(names[n] for n in placeholders) + ", = args", "args.clear()"]
    if tick is not None:
        bindings["tick"] = tick
        lines.append("tick(None)")
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {text(node.args[0])}")
            break
        if node in kernels:
            lines.append(kernel_line(kernels[node]))
        elif node not in covered and (found := statement(node)) is not None:
            lines.append(found)
        dead = [n for n in dict.fromkeys([node, *node.all_input_nodes]) if last_use.get(n, node) is node]
        if freed := [name for n in dead for name in variables(n)]:
            lines.append(" = ".join(freed) + " = None")
        if tick is not None:
            lines.append(f"tick({bind('n', node)})")
    source = "def run(args):\n" + "\n".join("    " + line for line in lines) + "\n"
    exec(compile(source, "<raftune program>", "exec"), bindings)
    run: Callable[[list[Any]], Sequence[Any]] = bindings["run"]
    return run


def _leaves(value: Any) -> list[Any]:
    return [leaf for v in value for leaf in (_leaves(v) if isinstance(v, list | tuple) else [v])]


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
