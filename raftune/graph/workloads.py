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
    }
)
_EXCLUDED_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _NotTunable(Exception):
    """The call has something that a workload cannot say: a symbolic size, a foreign type, an unknown value range."""


@dataclass(frozen=True, slots=True)
class Task:
    """A workload of one model, and how often it runs in a step."""

    workload: Workload
    weight: int


@dataclass(frozen=True, slots=True)
class Region:
    """A connected group of graph nodes lowered as one unit (one node, for now).

    A kernel takes the values of ``inputs`` and stands in the place of ``node``: it returns the results at ``positions``.
    """

    node: torch.fx.Node
    workload: Workload
    inputs: tuple[torch.fx.Node, ...]
    positions: tuple[int, ...]


def region_of(node: torch.fx.Node) -> Region | None:
    """The region of one graph node with its workload, or ``None`` if there is nothing to tune.

    Not tuned: views and other operators that move no data, factories, random operators (a seed must mean what it means in
    eager; attention without dropout is not random), operators with data-dependent shapes, and calls whose specs are not
    static. Nodes must carry ``meta["val"]``.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_tunable(node.target):
        return None
    value = node.meta.get("val")
    used = _used_results(node, value)
    if not used and not node.target._schema.is_mutable:
        return None
    results = [value] if isinstance(value, torch.Tensor) else list(value or ())
    try:
        workload, inputs = _workload(node.target, node.args, node.kwargs, {i: results[i] for i in used}, _node_tensor)
    except (_NotTunable, UnknownRange):
        return None
    return Region(node, workload, inputs, used)


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
            op,
            args,
            kwargs,
            {i: results[i] for i in kept},
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
    weights: dict[Workload, int] = {}
    for task in (task for way in ways for task in way):
        weights[task.workload] = max(weights.get(task.workload, 0), task.weight)
    return [Task(workload, weight) for workload, weight in weights.items()]


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


def _used_results(node: torch.fx.Node, value: Any) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return (0,)
    used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    return tuple(sorted(i for i in used if isinstance(i, int)))


_Tensor = tuple[Any, torch.Tensor, bool]  # identity, (fake) tensor, constant


def _node_tensor(value: Any) -> _Tensor | None:
    if not isinstance(value, torch.fx.Node):
        return None
    tensor = value.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        raise _NotTunable(f"argument {value} is not a tensor")
    return value, tensor, bool(value.meta.get(CONSTANT_META, False))


def _workload(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Mapping[int, torch.Tensor],
    as_tensor: Callable[[Any], _Tensor | None],
) -> tuple[Workload, tuple[Any, ...]]:
    by_name, positional = _bind(op, args, kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags and _argument(op, by_name, "dropout_p") != 0.0:
        raise _NotTunable("it draws random numbers")
    values = {name: _map(value, lambda v: found[1] if (found := as_tensor(v)) else v) for name, value in by_name.items()}
    inputs: dict[Any, int] = {}
    specs: list[TensorSpec] = []
    mutated: set[int] = set()
    written = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def encode(name: str, value: Any) -> Arg:
        found = as_tensor(value)
        if found is not None:
            key, tensor, constant = found
            if key not in inputs:
                inputs[key] = len(specs)
                low, high = value_range(op, name, tensor.dtype, values)
                specs.append(_spec(tensor, low, high, constant))
            if name in written:
                mutated.add(inputs[key])
            return In(inputs[key])
        if isinstance(value, list | tuple):
            return tuple(encode(name, v) for v in value)
        return _constant(value)

    encoded = {name: encode(name, value) for name, value in by_name.items()}
    workload = Workload(
        operators=(
            Operator(
                str(op),
                tuple(encoded[name] for name in positional),
                tuple(sorted((name, arg) for name, arg in encoded.items() if name not in positional)),
            ),
        ),
        inputs=tuple(specs),
        outputs=tuple(Out(0, i) for i in results),
        results=tuple(_spec(r, None, None, constant=False) for r in results.values()),
        mutates=tuple(sorted(mutated)),
    )
    return workload, tuple(inputs)


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
