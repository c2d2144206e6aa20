"""Element-wise operators: arithmetic, comparisons, activations and their backward forms, copies and fills."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from raftune.dialects.tvm.lowering.registry import argument, lowers
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Operand, Scalar, Tensor

_FLOATS = ("float32", "float64")
_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_GELU_CUBIC = 0.044715


def _inputs_are_float(workload: Workload, operator: Operator) -> bool:
    return all(workload.inputs[a.index].dtype in _FLOATS for a in operator.args if isinstance(a, In))


def _not_bool(workload: Workload, operator: Operator) -> bool:
    del operator
    return all(spec.dtype != "bool" for spec in workload.results)


@lowers("aten.add.Tensor", "aten.add.Scalar", check=_not_bool)
def add(b: Builder, x: Tensor, y: Operand, alpha: Scalar = 1) -> Tensor:
    return b.pointwise(lambda p, q: p + (q if alpha == 1 else q * b.like(alpha, q)), x, y)


@lowers("aten.sub.Tensor", "aten.sub.Scalar", check=_not_bool)
def sub(b: Builder, x: Tensor, y: Operand, alpha: Scalar = 1) -> Tensor:
    return b.pointwise(lambda p, q: p - (q if alpha == 1 else q * b.like(alpha, q)), x, y)


@lowers("aten.rsub.Scalar", "aten.rsub.Tensor", check=_not_bool)
def rsub(b: Builder, x: Tensor, y: Operand, alpha: Scalar = 1) -> Tensor:
    return b.pointwise(lambda p, q: q - (p if alpha == 1 else p * b.like(alpha, p)), x, y)


@lowers("aten.mul.Tensor", "aten.mul.Scalar", check=_not_bool)
def mul(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return b.pointwise(lambda p, q: p * q, x, y)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def div(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return b.pointwise(lambda p, q: p / q, x, y, floating=True)


@lowers("aten.bitwise_not.default")
def bitwise_not(b: Builder, x: Tensor) -> Tensor:
    # In two's complement the inverse of an integer is one below its negative.
    return logical_not(b, x) if b.dtype(x) == "bool" else b.pointwise(lambda p: b.like(-1, p) - p, x)


@lowers("aten.logical_not.default")
def logical_not(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: b.compare("eq", p, b.like(0, p)), x)


@lowers("aten.maximum.default")
def maximum(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    return b.pointwise(b.maximum, x, y)


@lowers("aten.minimum.default")
def minimum(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    return b.pointwise(b.minimum, x, y)


@lowers("aten.neg.default")
def neg(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: -p, x)


@lowers("aten.reciprocal.default")
def reciprocal(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: b.like(1, p) / p, x, floating=True)


@lowers("aten.exp.default")
def exp(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.exp, x, floating=True)


@lowers("aten.log.default")
def log(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.log, x, floating=True)


@lowers("aten.sqrt.default")
def sqrt(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.sqrt, x, floating=True)


@lowers("aten.rsqrt.default")
def rsqrt(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: b.like(1, p) / b.sqrt(p), x, floating=True)


@lowers("aten.tanh.default")
def tanh(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.tanh, x, floating=True)


@lowers("aten.erf.default")
def erf(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.erf, x, floating=True)


@lowers("aten.sigmoid.default")
def sigmoid(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(b.sigmoid, x, floating=True)


@lowers("aten.abs.default", check=_not_bool)
def absolute(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: b.select(p < b.like(0, p), -p, p), x)


def _is_small_power(workload: Workload, operator: Operator) -> bool:
    return argument(operator, 1, "exponent") in (2, 3, 0.5, -0.5, -1) and _inputs_are_float(workload, operator)


@lowers("aten.pow.Tensor_Scalar", check=_is_small_power)
def power(b: Builder, x: Tensor, exponent: Scalar) -> Tensor:
    def element(p: Expr) -> Expr:
        if exponent in (2, 3):
            return p * p if exponent == 2 else p * p * p
        if exponent == -1:
            return b.like(1, p) / p
        return b.sqrt(p) if exponent > 0 else b.like(1, p) / b.sqrt(p)

    return b.pointwise(element, x)


@lowers("aten.relu.default")
def relu(b: Builder, x: Tensor) -> Tensor:
    # Written so that NaN passes, as PyTorch's does.
    return b.pointwise(lambda p: b.select(p < b.like(0, p), b.like(0, p), p), x)


@lowers("aten.threshold_backward.default")
def threshold_backward(b: Builder, grad_output: Tensor, x: Tensor, threshold: Scalar) -> Tensor:
    return b.pointwise(lambda g, p: b.select(p <= b.like(threshold, p), b.like(0, g), g), grad_output, x)


@lowers("aten.silu.default", check=_inputs_are_float)
def silu(b: Builder, x: Tensor) -> Tensor:
    return b.pointwise(lambda p: p * b.sigmoid(p), x)


@lowers("aten.silu_backward.default", check=_inputs_are_float)
def silu_backward(b: Builder, grad_output: Tensor, x: Tensor) -> Tensor:
    def element(g: Expr, p: Expr) -> Expr:
        one = b.like(1, p)
        return b.let(b.sigmoid(p), lambda s: g * s * (one + p * (one - s)))

    return b.pointwise(element, grad_output, x)


@lowers("aten.tanh_backward.default", check=_inputs_are_float)
def tanh_backward(b: Builder, grad_output: Tensor, output: Tensor) -> Tensor:
    return b.pointwise(lambda g, y: g * (b.like(1, y) - y * y), grad_output, output)


@lowers("aten.sigmoid_backward.default", check=_inputs_are_float)
def sigmoid_backward(b: Builder, grad_output: Tensor, output: Tensor) -> Tensor:
    return b.pointwise(lambda g, y: g * y * (b.like(1, y) - y), grad_output, output)


@lowers("aten.gelu.default", check=_inputs_are_float)
def gelu(b: Builder, x: Tensor, *, approximate: str = "none") -> Tensor:
    def element(p: Expr) -> Expr:
        half, one = b.like(0.5, p), b.like(1, p)
        if approximate == "tanh":
            return half * p * (one + b.tanh(b.like(_SQRT_2_OVER_PI, p) * (p + b.like(_GELU_CUBIC, p) * p * p * p)))
        return half * p * (one + b.erf(p * b.like(_SQRT_HALF, p)))

    return b.pointwise(element, x)


@lowers("aten.gelu_backward.default", check=_inputs_are_float)
def gelu_backward(b: Builder, grad_output: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    def element(g: Expr, p: Expr) -> Expr:
        half, one = b.like(0.5, p), b.like(1, p)
        if approximate == "tanh":
            inner = b.like(_SQRT_2_OVER_PI, p) * (p + b.like(_GELU_CUBIC, p) * p * p * p)
            slope = b.like(_SQRT_2_OVER_PI, p) * (one + b.like(3 * _GELU_CUBIC, p) * p * p)
            return b.let(b.tanh(inner), lambda t: g * (half * (one + t) + half * p * (one - t * t) * slope))
        density = b.like(_INV_SQRT_2PI, p) * b.exp(-half * p * p)
        return g * (half * (one + b.erf(p * b.like(_SQRT_HALF, p))) + p * density)

    return b.pointwise(element, grad_output, x)


@lowers("aten.native_dropout_backward.default")
def native_dropout_backward(b: Builder, grad_output: Tensor, mask: Tensor, scale: Scalar) -> Tensor:
    return b.pointwise(lambda g, keep: g * keep * b.like(scale, g), grad_output, mask)


@lowers("aten.where.self")
def where(b: Builder, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    common = b.result_type(x, y)
    return b.compute(
        b.broadcast(condition, x, y),
        lambda *i: b.select(b.at(condition, i, "bool"), b.at(x, i, common), b.at(y, i, common)),
    )


@lowers("aten.masked_fill.Scalar")
def masked_fill(b: Builder, x: Tensor, mask: Tensor, value: Scalar) -> Tensor:
    return b.compute(b.broadcast(x, mask), lambda *i: b.select(b.at(mask, i, "bool"), b.like(value, b.at(x, i)), b.at(x, i)))


@lowers("aten._to_copy.default", check=lambda workload, operator: _converts_only(operator))
def to_copy(b: Builder, x: Tensor, *, dtype: str | None = None, **unchanged: Any) -> Tensor:
    del unchanged
    return b.compute(b.broadcast(x), lambda *i: b.at(x, i, dtype))


def _converts_only(operator: Operator) -> bool:
    """A copy on the processor: other devices and layouts are none of this dialect's business."""
    kwargs = dict(operator.kwargs)
    device, layout = kwargs.get("device"), kwargs.get("layout")
    return getattr(device, "name", "cpu") == "cpu" and getattr(layout, "name", "strided") == "strided"


@lowers("aten.clone.default")
def clone(b: Builder, x: Tensor, *, memory_format: str | None = None) -> Tensor:
    del memory_format  # the workload's results say which strides it gives
    return b.compute(b.broadcast(x), lambda *i: b.at(x, i))


def _comparison(b: Builder, function: Any, x: Tensor, y: Operand) -> Tensor:
    return b.pointwise(function, x, y, dtype="bool")


@lowers("aten.eq.Tensor", "aten.eq.Scalar")
def equal(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: b.compare("eq", p, q), x, y)


@lowers("aten.ne.Tensor", "aten.ne.Scalar")
def not_equal(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: b.compare("ne", p, q), x, y)


@lowers("aten.lt.Tensor", "aten.lt.Scalar")
def less(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: p < q, x, y)


@lowers("aten.le.Tensor", "aten.le.Scalar")
def less_equal(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: p <= q, x, y)


@lowers("aten.gt.Tensor", "aten.gt.Scalar")
def greater(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: p > q, x, y)


@lowers("aten.ge.Tensor", "aten.ge.Scalar")
def greater_equal(b: Builder, x: Tensor, y: Operand) -> Tensor:
    return _comparison(b, lambda p, q: p >= q, x, y)
