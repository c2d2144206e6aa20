"""Regions of a product or convolution and what libraries apply to its result on the way out: scale, summand, activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raftune.dialects.base import Kernel
from raftune.dialects.calls import conform
from raftune.dialects.chains import PRODUCTS, RESHAPES, SCALES, Chains, Shape, factor_of
from raftune.dialects.convolutions import Convolution
from raftune.pattern import ANY, NUMBER, Op, Pattern, either, op
from raftune.workload import In, Operator, Out, TensorSpec, Workload

if TYPE_CHECKING:
    from torch import Tensor

_CONVOLUTION = "aten.convolution.default"
_CORES = (*PRODUCTS, _CONVOLUTION)
ACTIVATIONS = (
    "aten.relu.default",
    "aten.gelu.default",
    "aten.tanh.default",
    "aten.sigmoid.default",
    "aten.silu.default",
    "aten.leaky_relu.default",
    "aten.hardswish.default",
    "aten.hardtanh.default",
)


def _pattern(core: Op) -> Pattern:
    scale, activation = op(*SCALES), op(*ACTIVATIONS)
    scaled = either(scale(core, NUMBER), core)
    summed = op("aten.add.Tensor", commutative=True)(scaled, either(scale(ANY, NUMBER), ANY))
    return Pattern(either(activation(either(summed, scaled)), summed))


PATTERNS = (_pattern(op(*PRODUCTS)()), _pattern(op(_CONVOLUTION)()))
"""Of a product, and of a convolution: what :meth:`Epilogue.of` may read."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """``activation(alpha * core + beta * addend)`` of one region, or a part of it that a kernel leaves to be done.

    ``core`` is the product or convolution alone, as a workload with all the region's inputs; its result has ``shape`` when the
    input number ``addend`` is added to it. ``result`` is the region's.
    """

    core: Workload
    shape: Shape
    alpha: float
    addend: int | None
    beta: float
    activation: Operator | None
    result: TensorSpec

    @staticmethod
    def of(workload: Workload) -> Epilogue | None:
        """``None`` if the region is anything else, or more of its values are needed than its last. A core alone is one."""
        return _Reader(workload).epilogue()

    def without(self, *parts: str) -> Epilogue:
        """What is left to be done when a kernel has done ``parts`` (``scale``, ``addend``, ``activation``) itself."""
        left = replace(self, alpha=1.0) if "scale" in parts else self
        left = replace(left, addend=None, beta=1.0) if "addend" in parts else left
        return replace(left, activation=None) if "activation" in parts else left

    def after(self, kernel: Kernel) -> Kernel:
        """``kernel``, which returns the core's result in fresh memory, followed by the epilogue in place."""
        steps = self._steps()
        fix, shape = conform(self.result), self.result.shape
        if not steps and self.core.results[0].shape == shape:
            return lambda *inputs: fix(kernel(*inputs))
        viewed = self.shape

        def finished(*inputs: Tensor) -> Tensor:
            out = kernel(*inputs).view(viewed)
            for step in steps:
                step(out, inputs)
            return fix(out.view(shape))

        return finished

    def _steps(self) -> list[Callable[[Tensor, tuple[Tensor, ...]], object]]:
        from raftune.dialects.torch_ops import resolve, to_torch

        steps: list[Callable[[Tensor, tuple[Tensor, ...]], object]] = []
        alpha, beta, addend = self.alpha, self.beta, self.addend
        if alpha != 1:
            steps.append(lambda out, _: out.mul_(alpha))
        if addend is not None:
            steps.append(lambda out, inputs: out.add_(inputs[addend], alpha=beta))
        if self.activation is not None:
            name, _, overload = self.activation.op.removeprefix("aten.").partition(".")
            function = resolve(f"aten.{name}_.{overload}")
            rest = [to_torch(arg) for arg in self.activation.args[1:]]
            words = {key: to_torch(arg) for key, arg in self.activation.kwargs}
            steps.append(lambda out, _: function(out, *rest, **words))
        return steps


class _Reader:
    """Follows a region from its core to its only result."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.chains = Chains(workload)
        self.alpha = self.beta = 1.0
        self.addend: int | None = None
        self.shape: Shape | None = None
        self.activation: Operator | None = None

    def epilogue(self) -> Epilogue | None:
        operators, result = self.workload.operators, self.workload.results
        if len(result) != 1 or any(spec.dtype != result[0].dtype for spec in self.workload.inputs):
            return None
        cores = [i for i, o in enumerate(operators) if o.op in _CORES]
        last = len(operators) - 1
        if len(cores) != 1 or self.workload.outputs != (Out(last, 0),) or self.workload.mutates:
            return None
        core = operators[cores[0]]
        if any(isinstance(arg, Out) for arg in core.args):
            return None
        value, used = Out(cores[0], 0), {cores[0]}
        while value.node != last:
            readers = [i for i, o in enumerate(operators) if value in o.args]
            if len(readers) != 1 or not self._step(operators[readers[0]], value, used):
                return None
            used.add(readers[0])
            value = Out(readers[0], 0)
        alone = self._core_alone(core)
        if len(used) != len(operators) or alone is None or alone.results[0].numel != result[0].numel:
            return None
        shape = self.shape or alone.results[0].shape
        return Epilogue(alone, shape, self.alpha, self.addend, self.beta, self.activation, result[0])

    def _step(self, call: Operator, value: Out, used: set[int]) -> bool:
        """Take in one operator that reads the chain's ``value``; whether it is part of an epilogue."""
        if self.activation is not None:
            return False
        if call.op in RESHAPES:
            return True
        if call.op in ACTIVATIONS:
            self.activation = call
            return call.args[0] == value
        if call.op in SCALES:
            factor = factor_of(call)
            if factor is None or call.args[0] != value or self.addend is not None:
                return False
            self.alpha *= factor
            return True
        return call.op == "aten.add.Tensor" and self._add(call, value, used)

    def _add(self, call: Operator, value: Out, used: set[int]) -> bool:
        first, second = call.args[0], call.args[1]
        if self.addend is not None or first == second:
            return False
        weight = dict(call.kwargs).get("alpha", 1)
        if not isinstance(weight, int | float):
            return False
        other, self.beta = (second, float(weight)) if first == value else (first, 1.0)
        if second == value:
            self.alpha *= weight
        scaling = self.chains.operator(other)
        if scaling is not None and isinstance(other, Out):
            factor = factor_of(scaling)
            if factor is None:
                return False
            self.beta *= factor
            used.add(other.node)
            other = scaling.args[0]
        shape = self._shape(value)
        if not isinstance(other, In) or shape is None or not _broadcasts(self.workload.inputs[other.index].shape, shape):
            return False
        self.addend, self.shape = other.index, shape
        return True

    def _shape(self, value: Out) -> Shape | None:
        shape = self.chains.shape(value)
        if shape is not None:
            return shape
        core = next(o for o in self.workload.operators if o.op in _CORES)
        convolution = Convolution.of(replace(self.workload, operators=(core,), outputs=(Out(0, 0),)))
        if convolution is None or convolution.transposed:
            return None
        return (convolution.x.shape[0], convolution.w.shape[0], *convolution.output_spatial)

    def _core_alone(self, core: Operator) -> Workload | None:
        if len(self.workload.operators) == 1:
            return self.workload
        result, viewed = self.workload.results[0], any(o.op in RESHAPES for o in self.workload.operators)
        if core.op in PRODUCTS:
            at = PRODUCTS[core.op]
            left, right = self.chains.shape(core.args[at]), self.chains.shape(core.args[at + 1])
            if left is None or right is None:
                return None
            result = _contiguous(result.dtype, (*left[:-1], right[-1]))
        elif viewed:
            return None
        return replace(self.workload, operators=(core,), outputs=(Out(0, 0),), results=(result,))


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether adding a tensor of ``shape`` leaves ``to`` as it is."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))


def _contiguous(dtype: str, shape: Shape) -> TensorSpec:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return TensorSpec(dtype, shape, tuple(reversed(strides)))
