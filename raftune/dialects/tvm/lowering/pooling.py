"""Pooling of windows small enough to be written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import argument, lowers
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor

# Elements of a window: each is a term of the expression for one result.
_LARGEST_WINDOW = 16
# Behind any place in a plane.
_BEYOND = 2**31 - 1
_KERNEL_AT = {
    "aten.max_pool2d_with_indices.default": (0, 1),
    "aten.max_pool2d_with_indices_backward.default": (1, 2),
    "aten.avg_pool2d.default": (0, 1),
    "aten.avg_pool2d_backward.default": (1, 2),
}


def _small_windows(workload: Workload, operator: Operator) -> bool:
    data_at, kernel_at = _KERNEL_AT[operator.op]
    data, kernel = operator.args[data_at], operator.args[kernel_at]
    return (
        isinstance(data, In)
        and workload.inputs[data.index].dtype in ("float32", "float64")
        and len(workload.inputs[data.index].shape) == 4
        and isinstance(kernel, tuple)
        and math.prod(_pair([n for n in kernel if isinstance(n, int)])) <= _LARGEST_WINDOW
    )


def _even(workload: Workload, operator: Operator) -> bool:
    """All windows of one size: no padding, no rounding up, and no divisor of its own."""
    _, at = _KERNEL_AT[operator.op]
    padding = argument(operator, at + 2, "padding", (0,))
    return (
        _small_windows(workload, operator)
        and isinstance(padding, tuple)
        and not any(padding)
        and argument(operator, at + 3, "ceil_mode", False) is False
        and argument(operator, at + 5, "divisor_override") is None
    )


@lowers("aten.max_pool2d_with_indices.default", check=_small_windows)
def max_pool(
    b: Builder,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Values, and where in their plane they were found: the first of equal ones, the last NaN if there is any."""
    shape = b.broadcast(x)
    kernel, step, pad, spread = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding), _pair(dilation)
    out = [_length(shape[2 + a], kernel[a], step[a], pad[a], spread[a], ceil_mode) for a in (0, 1)]

    result = (*shape[:2], *out)

    def element(i: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, Expr, Expr]:
        """An element of the window, minus infinity outside of the plane; where it lies, and whether within."""
        at = [i[2 + a] * step[a] + k[a] * spread[a] - pad[a] for a in (0, 1)]
        inside = b.constant(True, "bool")
        for a in (0, 1):
            if pad[a]:
                inside = b.both(inside, at[a] >= 0)
            if (out[a] - 1) * step[a] + (kernel[a] - 1) * spread[a] - pad[a] >= shape[2 + a]:
                inside = b.both(inside, at[a] < shape[2 + a])
        value = x(i[0], i[1], *at)
        return b.guarded(inside, value, b.like(-math.inf, value)), at[0] * shape[3] + at[1], inside

    values = b.over(result, kernel, lambda i, k: element(i, k)[0], op="amax")

    def equal(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        found, here, inside = element(i, k)
        return b.select(b.both(inside, b.compare("eq", found, values(*i))), here, b.constant(_BEYOND, "int32"))

    def not_a_number(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        found, here, _ = element(i, k)
        return b.select(b.is_nan(found), here, b.constant(-1, "int32"))

    first, last = b.over(result, kernel, equal, op="min"), b.over(result, kernel, not_a_number, op="max")
    places = b.compute(result, lambda *i: b.cast(b.select(last(*i) >= 0, last(*i), first(*i)), "int64"))
    return values, places


@lowers("aten.max_pool2d_with_indices_backward.default", check=_small_windows)
def max_pool_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each element collects from the windows that it lies in and was the largest of."""
    del ceil_mode
    shape, out = b.broadcast(x), b.broadcast(grad)[2:]
    kernel, step, pad, spread = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding), _pair(dilation)

    def element(*i: Expr) -> Expr:
        own = i[2] * shape[3] + i[3]
        total = None
        for oh, ow, conditions in _windows(b, i, kernel, step, pad, spread, out):
            value = grad(i[0], i[1], oh, ow)
            chosen = b.compare("eq", b.index(indices(i[0], i[1], oh, ow)), own)
            term = b.select(chosen, value, b.like(0, value))
            for condition in conditions:
                term = b.guarded(condition, term, b.like(0, value))
            total = term if total is None else total + term
        return total

    return b.compute(shape, element)


@lowers("aten.avg_pool2d.default", check=_even)
def average_pool(
    b: Builder,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: None = None,
) -> Tensor:
    del padding, ceil_mode, count_include_pad, divisor_override
    shape = b.broadcast(x)
    kernel, step = _pair(kernel_size), _pair(stride or kernel_size)
    out = [_length(shape[2 + a], kernel[a], step[a], 0, 1, False) for a in (0, 1)]

    def element(*i: Expr) -> Expr:
        total = None
        for kh, kw in itertools.product(range(kernel[0]), range(kernel[1])):
            value = x(i[0], i[1], i[2] * step[0] + kh, i[3] * step[1] + kw)
            total = value if total is None else total + value
        return total * b.like(1 / math.prod(kernel), total)

    return b.compute((*shape[:2], *out), element)


@lowers("aten.avg_pool2d_backward.default", check=_even)
def average_pool_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: None,
) -> Tensor:
    del padding, ceil_mode, count_include_pad, divisor_override
    shape, out = b.broadcast(x), b.broadcast(grad)[2:]
    kernel, step = _pair(kernel_size), _pair(stride or kernel_size)

    def element(*i: Expr) -> Expr:
        total = None
        for oh, ow, conditions in _windows(b, i, kernel, step, (0, 0), (1, 1), out):
            term = grad(i[0], i[1], oh, ow)
            for condition in conditions:
                term = b.guarded(condition, term, b.like(0, term))
            total = term if total is None else total + term
        return total * b.like(1 / math.prod(kernel), total)

    return b.compute(shape, element)


def _windows(
    b: Builder,
    i: Sequence[Expr],
    kernel: Sequence[int],
    step: Sequence[int],
    pad: Sequence[int],
    spread: Sequence[int],
    out: Sequence[int],
) -> Iterator[tuple[Expr, Expr, list[Expr]]]:
    """The windows in which an element takes each place, with the conditions under which there is such a window."""
    for places in itertools.product(range(kernel[0]), range(kernel[1])):
        at: list[Expr] = []
        conditions: list[Expr] = []
        for a, place in enumerate(places):
            start = i[2 + a] + pad[a] - place * spread[a]
            index = start // step[a] if step[a] > 1 else start
            if step[a] > 1:
                conditions.append(b.compare("eq", start % step[a], b.constant(0, "int32")))
            conditions += [start >= 0, index < out[a]]
            at.append(index)
        yield at[0], at[1], conditions


def _length(size: int, kernel: int, step: int, pad: int, spread: int, ceil_mode: bool) -> int:
    """Windows along one dimension; with ``ceil_mode`` one more may begin within the frame, but not beyond the data."""
    span = size + 2 * pad - spread * (kernel - 1) - 1
    if not ceil_mode:
        return span // step + 1
    count = -(-span // step) + 1
    return count - 1 if (count - 1) * step >= size + pad else count


def _pair(value: Sequence[int]) -> tuple[int, int]:
    """One number stands for both dimensions."""
    return (value[0], value[-1])
