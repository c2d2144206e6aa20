"""Reading a region of one operator: its arguments by position or name, and kernels made from plain calls. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from raftune.dialects.base import BuildError, Kernel
from raftune.workload import Arg, Config, In, Operator, Out, TensorSpec, Workload

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("float32", "float64", "bfloat16", "float16")


@cache
def torch_version() -> str:
    """The installed PyTorch's version, with its build (``2.13.0+cpu``), without importing it."""
    return version("torch")


@dataclass(frozen=True, slots=True)
class Call:
    """The only operator of a workload, with typed access to its arguments."""

    workload: Workload
    operator: Operator

    @staticmethod
    def of(workload: Workload) -> Call | None:
        """``None`` for a region of several operators."""
        return Call(workload, workload.operators[0]) if len(workload.operators) == 1 else None

    @property
    def op(self) -> str:
        return self.operator.op

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """Argument ``name`` of the overload's schema, which stands at ``position`` if it was given by position."""
        if position < len(self.operator.args):
            return self.operator.args[position]
        return dict(self.operator.kwargs).get(name, default)

    def tensor(self, position: int, name: str) -> int | None:
        """The workload's input number of a tensor argument; ``None`` if the argument is absent."""
        value = self.arg(position, name)
        return value.index if isinstance(value, In) else None

    def ints(self, position: int, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self.arg(position, name, default)
        if isinstance(value, int):
            return (value,)
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else default

    def number(self, position: int, name: str, default: float) -> float:
        value = self.arg(position, name, default)
        return value if isinstance(value, int | float) else default

    def flag(self, position: int, name: str, *, default: bool = False) -> bool:
        return bool(self.arg(position, name, default))


def choice(config: Config, key: str, allowed: Mapping[str, Any] | tuple[Any, ...]) -> Any:
    """``config[key]`` if it is one of ``allowed``; raises :class:`BuildError` naming the value otherwise."""
    value = config.get(key)
    if isinstance(value, str | int | None) and value in allowed:
        return value
    raise BuildError(f"config {key}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def check_keys(config: Config, keys: tuple[str, ...]) -> None:
    """Raise :class:`BuildError` if ``config`` says anything beyond ``keys``: an unknown word must not be ignored."""
    for key in config:
        if key not in keys:
            raise BuildError(f"config has unknown key {key!r} (value {config[key]!r}); expected {', '.join(keys)}")


def direct(workload: Workload) -> Kernel:
    """What PyTorch runs for the workload, with arguments bound beforehand and as little Python around it as there can be."""
    call = Call.of(workload)
    if call is None:
        from raftune.dialects.torch_ops import graph_module

        return graph_module(workload).forward
    return _project(_function(workload, call.operator), workload.outputs, _returns(call.op))


def conform(spec: TensorSpec) -> Callable[[Tensor], Tensor]:
    """A function that returns its tensor as it is if it has the strides of ``spec``, else a copy with them."""
    import torch

    from raftune.dialects.torch_ops import dtype_of

    shape, stride, dtype = spec.shape, spec.stride, dtype_of(spec.dtype)

    def to_spec(tensor: Tensor) -> Tensor:
        if tensor.stride() == stride and tensor.dtype is dtype:
            return tensor
        return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)

    return to_spec


def conform_all(workload: Workload, kernel: Kernel) -> Kernel:
    """``kernel`` with every result brought to the strides that the workload promises."""
    fixes = [conform(spec) for spec in workload.results]
    if len(fixes) == 1:
        fix = fixes[0]
        return lambda *inputs: fix(kernel(*inputs))
    return lambda *inputs: tuple(fix(result) for fix, result in zip(fixes, kernel(*inputs), strict=True))


def select_outputs(workload: Workload, results: Kernel) -> Kernel:
    """A kernel for ``workload`` from a function that returns its only operator's results as a tuple."""
    return _pick(results, [out.index for out in workload.outputs])


def _returns(op: str) -> int:
    from raftune.dialects.torch_ops import resolve

    return len(resolve(op)._schema.returns)


def _project(function: Kernel, outputs: tuple[Out, ...], returns: int) -> Kernel:
    wanted = [out.index for out in outputs]
    if wanted == list(range(returns)) and wanted:
        return function
    return _pick(function, wanted)


def _pick(function: Kernel, wanted: list[int]) -> Kernel:
    if len(wanted) == 1:
        only = wanted[0]
        return lambda *inputs: function(*inputs)[only]
    if wanted:
        pick = itemgetter(*wanted)
        return lambda *inputs: pick(function(*inputs))

    def without_results(*inputs: Any) -> tuple[()]:
        function(*inputs)
        return ()

    return without_results


def _function(workload: Workload, operator: Operator) -> Kernel:
    """The operator as a function of the workload's inputs alone."""
    args, kwargs = operator.args, dict(operator.kwargs)
    function = _entry(workload, operator)
    leading = 0
    while leading < len(args) and args[leading] == In(leading):
        leading += 1
    tail = [*args[leading:], *kwargs.values()]
    if leading == len(workload.inputs) and not any(_has_tensor(a) for a in tail):
        from raftune.dialects.torch_ops import to_torch

        rest = tuple(to_torch(a) for a in args[leading:])
        words = {name: to_torch(a) for name, a in kwargs.items()}
        if words:
            return lambda *inputs: function(*inputs, *rest, **words)
        return (lambda *inputs: function(*inputs, *rest)) if rest else function
    places = [_place(a) for a in args]
    named = {name: _place(a) for name, a in kwargs.items()}
    return lambda *inputs: function(*[p(inputs) for p in places], **{name: p(inputs) for name, p in named.items()})


def _has_tensor(arg: Arg) -> bool:
    return any(map(_has_tensor, arg)) if isinstance(arg, tuple) else isinstance(arg, In)


def _place(arg: Arg) -> Callable[[tuple[Any, ...]], Any]:
    """How to obtain an argument's value from the inputs."""
    if isinstance(arg, In):
        return itemgetter(arg.index)
    if isinstance(arg, tuple) and len(arg) > 1 and all(isinstance(a, In) for a in arg):
        return itemgetter(*(a.index for a in arg if isinstance(a, In)))
    if isinstance(arg, tuple) and _has_tensor(arg):
        parts = [_place(a) for a in arg]
        return lambda inputs: [p(inputs) for p in parts]
    from raftune.dialects.torch_ops import to_torch

    value = to_torch(arg)
    return lambda inputs: value


def _entry(workload: Workload, operator: Operator) -> Kernel:
    import torch

    from raftune.dialects.entry import entry
    from raftune.dialects.torch_ops import dtype_of, resolve

    metas = tuple(torch.empty_strided(s.shape, s.stride, dtype=dtype_of(s.dtype), device="meta") for s in workload.inputs)
    args = [_place(a)(metas) for a in operator.args]
    return entry(resolve(operator.op), args, {name: _place(a)(metas) for name, a in operator.kwargs})
