"""From graph nodes to workloads and tasks: the one place where a workload's identity is made, for tuner and compiler alike."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from raftune.graph.ranges import UnknownRange, value_range
from raftune.workload import Arg, In, Literal, Operator, Out, TensorSpec, Workload

CONSTANT_META = "raftune_constant"
"""Set to True in a placeholder's ``meta`` by capture: the tensor's values do not change between calls."""

# Operators that move no data, or that only bring a value into being: nothing to choose between.
_NOT_TASKS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::detach",
        "aten::lift_fresh_copy",
        "aten::scalar_tensor",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::full",
        "aten::full_like",
        "aten::zeros",
        "aten::zeros_like",
        "aten::ones",
        "aten::ones_like",
        "aten::new_zeros",
        "aten::new_ones",
        "aten::new_full",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::arange",
        "aten::_local_scalar_dense",
        # Their workspace has a size, and a content, that only they know.
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
    }
)
_EXCLUDED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _NotTunable(Exception):
    """The call has something that a workload cannot say: a symbolic size, a foreign type, an unknown value range."""


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of one model, and how often it runs in a step.

    ``parts``: for a region of several operators the workloads of its members, each as often as it is one.
    """

    workload: Workload
    weight: int
    parts: tuple[Workload, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A connected group of graph nodes lowered as one unit; most often one node.

    A kernel takes the values of ``inputs`` and stands in the place of ``nodes`` (in graph order, without the getitems that
    unpack their results). It returns ``results``: for each the node, and which of that node's results it is.
    """

    nodes: tuple[torch.fx.Node, ...]
    workload: Workload
    inputs: tuple[torch.fx.Node, ...]
    results: tuple[tuple[torch.fx.Node, int], ...]


def region_of(node: torch.fx.Node) -> Region | None:
    """The region of one graph node with its workload, or ``None`` if there is nothing to tune.

    Not tuned: views and other operators that move no data, factories, random operators (a seed must mean what it means in
    eager; attention without dropout is not random), operators with data-dependent shapes, and calls whose specs are not
    static. Nodes must carry ``meta["val"]``.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_tunable(node.target):
        return None
    return _region((node,))


def fused_region(nodes: Sequence[torch.fx.Node]) -> Region | None:
    """The region of several nodes in graph order, or ``None`` if they cannot be one workload.

    Beside tunable operators, views may be members: they are never results; one that is read outside as well has to be made
    there once more (see :func:`raftune.graph.fusion.contract`). No member may write to an argument.
    """
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            return None
        if not (is_tunable(node.target) or is_view(node.target)):
            return None
    return _region(tuple(nodes))


def _region(nodes: tuple[torch.fx.Node, ...]) -> Region | None:
    results = [(node, position) for node in nodes for position in _used_results(node, set(nodes))]
    if not results and not any(node.target._schema.is_mutable for node in nodes):  # type: ignore[union-attr]
        return None
    calls = [_Call(node.target, node.args, node.kwargs, _names_of(node)) for node in nodes]  # type: ignore[arg-type]
    number = {node: index for index, node in enumerate(nodes)}
    try:
        tensors = [((number[node], position), _result(node, position)) for node, position in results]
        workload, inputs = _workload(calls, tensors, _node_tensor)
    except (_NotTunable, UnknownRange):
        return None
    return Region(nodes, workload, inputs, tuple(results))


def workload_of(node: torch.fx.Node) -> Workload | None:
    """The workload of :func:`region_of`, if there is one."""
    region = region_of(node)
    return None if region is None else region.workload


def workload_from_call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    used: Iterable[int] | None = None,
    constant: Iterable[torch.Tensor] = (),
) -> Workload:
    """The workload of calling ``op`` with these tensors; nothing is computed.

    ``used`` lists the results that matter (all, if not given) and ``constant`` the tensors whose values do not change between
    calls. The same tensor passed twice is one input. Raises ``ValueError`` for a call that cannot be a workload.
    """
    kwargs = dict(kwargs or {})
    constants = {id(t) for t in constant}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes: dict[int, torch.Tensor] = {}

        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return fakes.setdefault(id(value), mode.from_tensor(value.detach()))
            return value

        value = op(*pytree.tree_map(fake, tuple(args)), **pytree.tree_map(fake, kwargs))
    results = [value] if isinstance(value, torch.Tensor) else list(value or ())
    kept = tuple(i for i, r in enumerate(results) if isinstance(r, torch.Tensor)) if used is None else tuple(used)
    try:
        workload, _ = _workload(
            [_Call(op, args, kwargs, {})],
            [((0, i), results[i]) for i in kept],
            lambda t: (id(t), t, id(t) in constants) if isinstance(t, torch.Tensor) else None,
        )
    except (_NotTunable, UnknownRange) as error:
        raise ValueError(f"{op} with these arguments is not a workload: {error}") from error
    return workload


def tasks_of(*graph_modules: torch.fx.GraphModule) -> list[Task]:
    """The tasks of the graphs that make up one step, in order of first appearance.

    Equal workloads collapse; how often one is used in the step is its weight.
    """
    counts = Counter(w for module in graph_modules for w in map(workload_of, module.graph.nodes) if w is not None)
    return [Task(workload, weight) for workload, weight in counts.items()]


def merge_tasks(*ways: Sequence[Task]) -> list[Task]:
    """The union of the tasks of several ways to run one step; a workload of more than one way keeps its largest weight."""
    found: dict[Workload, Task] = {}
    for task in (task for way in ways for task in way):
        known = found.get(task.workload, task)
        found[task.workload] = Task(task.workload, max(known.weight, task.weight), known.parts or task.parts)
    return list(found.values())


def is_tunable(op: OpOverload) -> bool:
    """Whether calls of ``op`` can be tasks at all, whatever the specs."""
    schema = op._schema
    if schema.name in _NOT_TASKS or any(tag in op.tags for tag in _EXCLUDED_TAGS):
        return False
    if schema.is_mutable:
        return not schema.returns and schema.name.startswith("aten::_fused_")
    if any(r.alias_info is not None for r in schema.returns):
        return False
    return bool(schema.returns) and all(str(r.type) == "Tensor" for r in schema.returns)


def is_view(op: OpOverload) -> bool:
    """Whether ``op`` gives one tensor that lies in its first argument's memory, and does nothing else."""
    schema = op._schema
    if schema.name == "aten::_unsafe_view":
        return True
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor" else None
    return returned is not None and not schema.is_mutable


def _used_results(node: torch.fx.Node, members: set[torch.fx.Node]) -> tuple[int, ...]:
    """Which results of ``node`` are read by others than ``members``; of one that stands alone its only one always is."""
    if is_view(node.target):  # type: ignore[arg-type]
        return ()
    if isinstance(node.meta.get("val"), torch.Tensor):
        return (0,) if len(members) == 1 or _read_outside(node, members) else ()
    items = [user for user in node.users if user.target is operator.getitem]
    used = {item.args[1] for item in items if _read_outside(item, members)}
    return tuple(sorted(i for i in used if isinstance(i, int)))


def _read_outside(value: torch.fx.Node, members: set[torch.fx.Node]) -> bool:
    """A view inside that is read outside as well stands for what it views: it will be made once more there."""
    return any(
        user not in members or (is_view(user.target) and _read_outside(user, members))  # type: ignore[arg-type]
        for user in value.users
    )


def _names_of(node: torch.fx.Node) -> dict[torch.fx.Node, int]:
    """The nodes that stand for a result of ``node``, and which one."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return {node: 0}
    return {user: user.args[1] for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def _result(node: torch.fx.Node, position: int) -> torch.Tensor:
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else value[position]


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator call; ``names`` are the identities under which later calls refer to its results."""

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    names: Mapping[Any, int]


_Tensor = tuple[Any, torch.Tensor, bool]  # identity, (fake) tensor, constant


def _node_tensor(value: Any) -> _Tensor | None:
    if not isinstance(value, torch.fx.Node):
        return None
    tensor = value.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        raise _NotTunable(f"argument {value} is not a tensor")
    return value, tensor, bool(value.meta.get(CONSTANT_META, False))


def _workload(
    calls: Sequence[_Call],
    results: Sequence[tuple[tuple[int, int], torch.Tensor]],
    as_tensor: Callable[[Any], _Tensor | None],
) -> tuple[Workload, tuple[Any, ...]]:
    """The workload of calls in order, whose ``results`` (call and position, tensor) are wanted; and its inputs' identities."""
    encoder = _Encoder(as_tensor)
    operators = tuple(encoder.operator(call) for call in calls)
    workload = Workload(
        operators=operators,
        inputs=tuple(encoder.specs),
        outputs=tuple(Out(call, position) for (call, position), _ in results),
        results=tuple(_spec(tensor, None, None, constant=False) for _, tensor in results),
        mutates=tuple(sorted(encoder.mutated)),
    )
    return workload, tuple(encoder.inputs)


class _Encoder:
    """Turns calls into operators; what is not a result of an earlier call becomes an input of the region."""

    def __init__(self, as_tensor: Callable[[Any], _Tensor | None]) -> None:
        self._as_tensor = as_tensor
        self.inputs: dict[Any, int] = {}
        self.specs: list[TensorSpec] = []
        self.mutated: set[int] = set()
        self._inner: dict[Any, Out] = {}
        self._count = 0

    def operator(self, call: _Call) -> Operator:
        op = call.op
        by_name, positional = _bind(op, call.args, call.kwargs)
        if torch.Tag.nondeterministic_seeded in op.tags and _argument(op, by_name, "dropout_p") != 0.0:
            raise _NotTunable("it draws random numbers")
        values = {n: _map(v, lambda x: found[1] if (found := self._as_tensor(x)) else x) for n, v in by_name.items()}
        encoded = {name: self._encode(op, name, value, values) for name, value in by_name.items()}
        for name, position in call.names.items():
            self._inner[name] = Out(self._count, position)
        self._count += 1
        return Operator(
            str(op),
            tuple(encoded[name] for name in positional),
            tuple(sorted((name, arg) for name, arg in encoded.items() if name not in positional)),
        )

    def _encode(self, op: OpOverload, name: str, value: Any, values: Mapping[str, Any]) -> Arg:
        found = self._as_tensor(value)
        if found is not None:
            return self._tensor(op, name, found, values)
        if isinstance(value, list | tuple):
            return tuple(self._encode(op, name, v, values) for v in value)
        return _constant(value)

    def _tensor(self, op: OpOverload, name: str, found: _Tensor, values: Mapping[str, Any]) -> Arg:
        key, tensor, constant = found
        if key in self._inner:
            return self._inner[key]
        if key not in self.inputs:
            self.inputs[key] = len(self.specs)
            low, high = value_range(op, name, tensor.dtype, values)
            self.specs.append(_spec(tensor, low, high, constant))
        if any(a.name == name and a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
            self.mutated.add(self.inputs[key])
        return In(self.inputs[key])


def _bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments by name in the schema's order, and the names passed by position.

    Two tracers may pass one argument by position or by keyword, or spell out a default; the identity must not depend on it, so
    everything positional goes by position, and what equals the default is dropped where nothing follows it.
    """
    schema = op._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)

    def is_default(argument: Any) -> bool:
        if argument.name not in given:
            return True
        value = given[argument.name]
        return argument.has_default_value() and not _has_tensor(value) and _plain(value) == _plain(argument.default_value)

    positional = [a for a in schema if not a.kwarg_only]
    while positional and is_default(positional[-1]):
        positional.pop()
    keyword = [a for a in schema if a.kwarg_only and not is_default(a)]
    by_name = {a.name: given.get(a.name, a.default_value) for a in [*positional, *keyword]}
    return by_name, [a.name for a in positional]


def _argument(op: OpOverload, by_name: Mapping[str, Any], name: str) -> Any:
    """The value of a named argument, given or default; ``None`` if the operator has no such argument."""
    default = next((a.default_value for a in op._schema.arguments if a.name == name), None)
    return by_name.get(name, default)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor | torch.fx.Node) for leaf in pytree.tree_leaves(value))


def _plain(value: Any) -> Any:
    return tuple(_plain(v) for v in value) if isinstance(value, list | tuple) else value


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    return [_map(v, function) for v in value] if isinstance(value, list | tuple) else function(value)


def _spec(tensor: torch.Tensor, low: float | None, high: float | None, constant: bool) -> TensorSpec:
    if tensor.layout != torch.strided or not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
        raise _NotTunable(f"tensor {tuple(tensor.shape)} is not strided with static sizes")
    if tensor.dtype.is_complex or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise _NotTunable(f"tensor of {tensor.dtype}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, tuple(tensor.shape), tuple(tensor.stride()), low, high, constant)


def _constant(value: Any) -> Arg:
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            return value
        case torch.dtype():
            return Literal("dtype", str(value).removeprefix("torch."))
        case torch.layout():
            return Literal("layout", str(value).removeprefix("torch."))
        case torch.memory_format():
            return Literal("memory_format", str(value).removeprefix("torch."))
        case torch.device():
            return Literal("device", value.type)
        case _:
            raise _NotTunable(f"argument {value!r}")
