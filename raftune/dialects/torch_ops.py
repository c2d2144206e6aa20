"""A workload as PyTorch runs it: names back to overloads, arguments back to torch values, regions back to fx graphs."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload

from raftune.dialects.base import Unsupported
from raftune.workload import Arg, In, Literal, Out, Workload

_OP_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.\w+")
_LITERAL_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def resolve(op: str) -> OpOverload:
    """The overload called ``op`` (``aten.addmm.default``); raises :class:`Unsupported` if this PyTorch has none."""
    if _OP_NAME.fullmatch(op):
        namespace, packet, overload = op.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if isinstance(found, OpOverload):
            return found
    raise Unsupported(f"PyTorch {torch.__version__} has no operator {op!r}")


def dtype_of(name: str) -> torch.dtype:
    """``float32`` to ``torch.float32``; raises :class:`Unsupported` for anything that is not a dtype."""
    return _constant("dtype", name)  # type: ignore[no-any-return]


def to_torch(arg: Arg) -> Any:
    """An argument without tensors as the torch value it stands for (tuples become lists)."""
    if isinstance(arg, tuple):
        return [to_torch(a) for a in arg]
    if isinstance(arg, Literal):
        return torch.device(arg.name) if arg.kind == "device" else _constant(arg.kind, arg.name)
    if isinstance(arg, In | Out):
        raise TypeError(f"{arg} is a tensor, not a constant")
    return arg


def graph_module(workload: Workload) -> torch.fx.GraphModule:
    """The region as an fx graph over PyTorch's own overloads: what PyTorch would run.

    Placeholders are ``workload.inputs`` in order; the output is ``workload.outputs``, bare if there is exactly one. Nodes carry
    no ``val`` meta. In-place operators write to their arguments.
    """
    graph = torch.fx.Graph()
    placeholders = [graph.placeholder(f"in_{i}") for i in range(len(workload.inputs))]
    calls: list[torch.fx.Node] = []
    returns_tuple: list[bool] = []

    def value(arg: Arg) -> Any:
        match arg:
            case In(index):
                return placeholders[index]
            case Out(node, index):
                return graph.call_function(operator.getitem, (calls[node], index)) if returns_tuple[node] else calls[node]
            case tuple():
                return [value(a) for a in arg]
            case _:
                return to_torch(arg)

    for call in workload.operators:
        overload = resolve(call.op)
        args = tuple(value(a) for a in call.args)
        kwargs = {name: value(a) for name, a in call.kwargs}
        calls.append(graph.call_function(overload, args, kwargs))
        returns_tuple.append(len(overload._schema.returns) > 1)
    results = tuple(value(out) for out in workload.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _constant(kind: str, name: str) -> Any:
    value = getattr(torch, name, None) if kind in _LITERAL_TYPES else None
    if value is None or not isinstance(value, _LITERAL_TYPES[kind]):
        raise Unsupported(f"PyTorch {torch.__version__} has no {kind} {name!r}")
    return value
