"""Sums, means, extrema, softmax and its kin, and what normalizes: layer norm, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raftune.dialects.tvm.lowering.registry import argument, lowers
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor


def _float_data(workload: Workload, operator: Operator) -> bool:
    first = operator.args[0]
    return not isinstance(first, In) or workload.inputs[first.index].dtype in ("float32", "float64")


def _axes(b: Builder, x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    rank = len(b.broadcast(x))
    if dim is None or dim == ():
        return list(range(rank))
    return sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim)) if rank else []


def _keep(b: Builder, reduced: Tensor, x: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    if not keepdim or not axes:
        return reduced
    shape = b.broadcast(x)
    kept = [a for a in range(len(shape)) if a not in axes]
    return b.compute([1 if a in axes else n for a, n in enumerate(shape)], lambda *i: reduced(*[i[a] for a in kept]))


@lowers("aten.sum.dim_IntList")
def sum_dims(
    b: Builder, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: str | None = None
) -> Tensor:
    axes = _axes(b, x, dim)
    return _keep(b, b.reduce(x, axes, dtype=dtype or b.sum_type(x)), x, axes, keepdim)


@lowers("aten.sum.default")
def sum_all(b: Builder, x: Tensor, *, dtype: str | None = None) -> Tensor:
    return sum_dims(b, x, None, dtype=dtype)


@lowers("aten.mean.dim", check=_float_data)
def mean_dims(
    b: Builder, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: str | None = None
) -> Tensor:
    axes = _axes(b, x, dim)
    count = math.prod(b.broadcast(x)[a] for a in axes)
    total = b.reduce(x, axes, dtype=dtype)
    return _keep(b, b.pointwise(lambda s: s * b.like(1 / count, s), total), x, axes, keepdim)


@lowers("aten.mean.default", check=_float_data)
def mean_all(b: Builder, x: Tensor, *, dtype: str | None = None) -> Tensor:
    return mean_dims(b, x, None, dtype=dtype)


@lowers("aten.amax.default", check=_float_data)
def amax(b: Builder, x: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    axes = _axes(b, x, dim)
    return _keep(b, b.reduce(x, axes, op="amax"), x, axes, keepdim)


@lowers("aten.amin.default", check=_float_data)
def amin(b: Builder, x: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    axes = _axes(b, x, dim)
    return _keep(b, b.reduce(x, axes, op="amin"), x, axes, keepdim)


@lowers("aten.var.correction", check=_float_data)
def var(
    b: Builder, x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    axes = _axes(b, x, dim)
    count = math.prod(b.broadcast(x)[a] for a in axes)
    center = mean_dims(b, x, axes, keepdim=True)
    squares = b.reduce(x, axes, _centered_square(b, x, center))
    divisor = count - (1 if correction is None else correction)
    scale = 1 / divisor if divisor > 0 else math.inf
    return _keep(b, b.pointwise(lambda s: s * b.like(scale, s), squares), x, axes, keepdim)


def _centered_square(b: Builder, x: Tensor, center: Tensor) -> Any:
    def element(*i: Expr) -> Expr:
        delta = x(*i) - b.at(center, i)
        return delta * delta

    return element


def _no_cast(workload: Workload, operator: Operator) -> bool:
    """``half_to_float`` and the backward's ``input_dtype`` only matter for half precision, which is not lowered."""
    rank = _rank(workload, operator)
    return argument(operator, 2, "half_to_float", False) is False and rank != 0 and _float_data(workload, operator)


def _rank(workload: Workload, operator: Operator) -> int | None:
    first = operator.args[0]
    return len(workload.inputs[first.index].shape) if isinstance(first, In) else None


@lowers("aten._softmax.default", check=_no_cast)
def softmax(b: Builder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    del half_to_float
    largest = mean_like(b, x, dim, "max")  # a NaN that is lost here comes back with its own exponential
    powers = b.pointwise(lambda p, m: b.exp(p - m), x, largest, kind="keep")
    total = mean_like(b, powers, dim, "sum")
    return b.pointwise(lambda p, s: p * s, powers, b.pointwise(lambda s: b.like(1, s) / s, total))


@lowers("aten._log_softmax.default", check=_no_cast)
def log_softmax(b: Builder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    del half_to_float
    largest = mean_like(b, x, dim, "max")
    axes = _axes(b, x, dim)
    total = b.reduce(x, axes, lambda *i: b.exp(x(*i) - b.at(largest, i)))
    shift = b.pointwise(lambda s, m: b.log(s) + m, _keep(b, total, x, axes, True), largest, kind="keep")
    return b.pointwise(lambda p, s: p - s, x, shift)


def mean_like(b: Builder, x: Tensor, dim: int, op: str) -> Tensor:
    """A reduction over one dimension, which is kept with size one."""
    axes = _axes(b, x, dim)
    return _keep(b, b.reduce(x, axes, op=op), x, axes, True)


@lowers("aten._softmax_backward_data.default", check=_float_data)
def softmax_backward(b: Builder, grad_output: Tensor, output: Tensor, dim: int, input_dtype: str) -> Tensor:
    del input_dtype
    axes = _axes(b, output, dim)
    dot = _keep(b, b.reduce(output, axes, lambda *i: grad_output(*i) * output(*i)), output, axes, True)
    return b.pointwise(lambda g, y, d: (g - d) * y, grad_output, output, dot)


@lowers("aten._log_softmax_backward_data.default", check=_float_data)
def log_softmax_backward(b: Builder, grad_output: Tensor, output: Tensor, dim: int, input_dtype: str) -> Tensor:
    del input_dtype
    total = mean_like(b, grad_output, dim, "sum")
    return b.pointwise(lambda g, y, s: g - b.exp(y) * s, grad_output, output, total)


@lowers("aten.native_layer_norm.default", check=_float_data)
def layer_norm(
    b: Builder, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rank = len(b.broadcast(x))
    axes = list(range(rank - len(normalized_shape), rank))
    scale = 1 / math.prod(normalized_shape)
    mean = _keep(b, b.pointwise(lambda s: s * b.like(scale, s), b.reduce(x, axes)), x, axes, True)
    squares = b.reduce(x, axes, _centered_square(b, x, mean))
    rstd = b.pointwise(
        lambda s: b.like(1, s) / b.sqrt(s * b.like(scale, s) + b.like(eps, s)), _keep(b, squares, x, axes, True), kind="keep"
    )

    def element(p: Expr, m: Expr, r: Expr, *affine: Expr) -> Expr:
        value = (p - m) * r
        scales = iter(affine)
        if weight is not None:
            value = value * next(scales)
        return value if bias is None else value + next(scales)

    return b.pointwise(element, x, mean, rstd, *(t for t in (weight, bias) if t is not None)), mean, rstd


@lowers("aten.native_layer_norm_backward.default", check=_float_data)
def layer_norm_backward(
    b: Builder,
    grad_output: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    del bias
    rank = len(b.broadcast(x))
    outer, axes = list(range(rank - len(normalized_shape))), list(range(rank - len(normalized_shape), rank))
    scale = 1 / math.prod(normalized_shape)

    def weighted(*i: Expr) -> Expr:
        return grad_output(*i) if weight is None else grad_output(*i) * b.at(weight, i)

    def normalized(*i: Expr) -> Expr:
        return (x(*i) - b.at(mean, i)) * b.at(rstd, i)

    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        plain = _keep(b, b.reduce(x, axes, weighted), x, axes, True)
        dotted = _keep(b, b.reduce(x, axes, lambda *i: weighted(*i) * normalized(*i)), x, axes, True)

        def element(*i: Expr) -> Expr:
            centre = (b.at(plain, i) + normalized(*i) * b.at(dotted, i)) * b.like(scale, x(*i))
            return b.at(rstd, i) * (weighted(*i) - centre)

        grad_input = b.compute(b.broadcast(x), element)
    if output_mask[1]:
        grad_weight = b.reduce(x, outer, lambda *i: grad_output(*i) * normalized(*i))
    if output_mask[2]:
        grad_bias = b.reduce(grad_output, outer)
    return grad_input, grad_weight, grad_bias
