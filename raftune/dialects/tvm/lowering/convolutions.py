"""Convolutions and their gradients as contractions: pixels or channels are the rows, channels the columns.

The input gradient is the convolution of the output's gradient, spread by the stride, with the flipped kernel; the weight's sums
over pixels (Dumoulin and Visin, arXiv 1603.07285, chapter 4). Nothing is unfolded: what overlaps is read again from the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import lowers
from raftune.dialects.tvm.schedule.config import default_columns
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor
    from raftune.dialects.tvm.lowering.contraction import Factor

_TRANSPOSED = {"aten.convolution.default": 6, "aten.convolution_backward.default": 7}


def _plain(workload: Workload, operator: Operator) -> bool:
    """Floats with one to three spatial dimensions, and not the transposed convolution, which is another one's gradient."""
    at = _TRANSPOSED[operator.op]
    value = operator.args[at - 6]
    return (
        isinstance(value, In)
        and workload.inputs[value.index].dtype in ("float32", "float64")
        and len(workload.inputs[value.index].shape) in (3, 4, 5)
        and operator.args[at] is False
    )


@lowers("aten.convolution.default", check=_plain)
def convolution(
    b: Builder,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    del transposed, output_padding
    shape, kernel = b.broadcast(x), b.broadcast(weight)
    rank = len(shape) - 2
    stride, padding, dilation = (_sizes(v, rank) for v in (stride, padding, dilation))
    out = _output(shape[2:], kernel[2:], stride, padding, dilation)
    needed = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(out, stride, dilation, kernel[2:], strict=True)]
    source = _framed(b, x, padding, needed)
    columns = kernel[0] // groups

    def left(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        channel = i[1] // columns * kernel[1] + k[0] if groups > 1 else k[0]
        return source(i[0], channel, *(i[2 + a] * stride[a] + k[1 + a] * dilation[a] for a in range(rank)))

    def right(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        return weight(i[1], *k)

    product = _convolve(b, (shape[0], kernel[0], *out), kernel[1:], groups, left, right, b.dtype(x))
    if bias is None:
        return product
    return b.compute((shape[0], kernel[0], *out), lambda *i: product(*i) + bias(i[1]))


@lowers("aten.convolution_backward.default", check=_plain)
def convolution_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    del bias_sizes, transposed, output_padding
    rank = len(b.broadcast(x)) - 2
    stride, padding, dilation = (_sizes(v, rank) for v in (stride, padding, dilation))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_input = _input_gradient(b, grad, b.broadcast(x), weight, stride, padding, dilation, groups)
    if output_mask[1]:
        grad_weight = _weight_gradient(b, grad, x, b.broadcast(weight), stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = b.reduce(grad, [0, *range(2, rank + 2)])
    return grad_input, grad_weight, grad_bias


def _input_gradient(
    b: Builder,
    grad: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    kernel = b.broadcast(weight)
    rank = len(shape) - 2
    # Element h of the input meets element h + padding - dilation * k of the gradient spread by the stride; that index may be
    # negative, so that a frame comes before it, or cut off what no element meets.
    before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel[2:], padding, strict=True)]
    needed = [n + d * (k - 1) for n, d, k in zip(shape[2:], dilation, kernel[2:], strict=True)]
    source = _framed(b, grad, before, needed, stride)
    outputs, inputs = kernel[0] // groups, kernel[1]

    def left(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        channel = i[1] // inputs * outputs + k[0] if groups > 1 else k[0]
        return source(i[0], channel, *(i[2 + a] + k[1 + a] * dilation[a] for a in range(rank)))

    def right(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        channel = i[1] // inputs * outputs + k[0] if groups > 1 else k[0]
        flipped = [kernel[2 + a] - 1 - k[1 + a] for a in range(rank)]
        return weight(channel, i[1] % inputs if groups > 1 else i[1], *flipped)

    return _convolve(b, tuple(shape), (outputs, *kernel[2:]), groups, left, right, b.dtype(grad))


def _convolve(
    b: Builder, shape: tuple[int, ...], depth: tuple[int, ...], groups: int, pixel: Factor, weight: Factor, dtype: str
) -> Tensor:
    """A contraction with the weight whose columns are channels or, so that whole vectors are stored, pixels of a line."""
    from raftune.dialects.tvm.lowering.contraction import Contraction

    line = len(shape) - 1
    columns = b.columns or default_columns(shape[line], math.prod(depth), b.lanes)
    if groups == 1 and columns == "pixels":
        return b.contract(Contraction(shape, depth, 1, line, dtype), weight, pixel)
    return b.contract(Contraction(shape, depth, line, 1, dtype, groups=groups, shared=True), pixel, weight)


def _weight_gradient(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    from raftune.dialects.tvm.lowering.contraction import Contraction

    batch, _, *out = b.broadcast(grad)
    rank = len(out)
    needed = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(out, stride, dilation, kernel[2:], strict=True)]
    source = _framed(b, x, padding, needed)
    outputs = kernel[0] // groups

    def left(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        channel = i[0] // outputs * kernel[1] + i[1] if groups > 1 else i[1]
        return source(k[0], channel, *(k[1 + a] * stride[a] + i[2 + a] * dilation[a] for a in range(rank)))

    def right(i: Sequence[Expr], k: Sequence[Expr]) -> Expr:
        return grad(k[0], i[0], *k[1:])

    if b.lanes and groups > 1 and outputs < b.lanes:  # too few columns for a vector: sums over the pixels of a line
        space = (*kernel, batch, *out)
        terms = b.compute(space, lambda *i: left(i[: rank + 2], i[rank + 2 :]) * right(i[: rank + 2], i[rank + 2 :]))
        return b.reduce(terms, range(rank + 2, len(space)))
    contraction = Contraction(tuple(kernel), (batch, *out), 1, 0, b.dtype(grad), groups=groups, shared=True)
    return b.contract(contraction, left, right)


def _framed(b: Builder, x: Tensor, before: Sequence[int], needed: Sequence[int], spread: Sequence[int] | None = None) -> Tensor:
    """``x`` with ``before`` zeros (cut off, if negative) ahead of each spatial dimension, ``needed`` elements long.

    With ``spread`` there are that many less one zeros between neighbours. ``x`` itself if nothing changes.
    """
    shape = b.broadcast(x)
    steps = spread or [1] * len(needed)
    if not any(before) and tuple(needed) == shape[2:] and all(s == 1 for s in steps):
        return x

    def element(*i: Expr) -> Expr:
        inside: list[Expr] = []
        at: list[Expr] = []
        for index, first, length, size, step in zip(i[2:], before, needed, shape[2:], steps, strict=True):
            place = index - first
            if first > 0:
                inside.append(place >= 0)
            if length - first > (size - 1) * step + 1:
                inside.append(place < (size - 1) * step + 1)
            if step > 1:
                inside.append(b.compare("eq", place % step, b.constant(0, "int32")))
            at.append(place // step if step > 1 else place)
        value = x(*i[:2], *at)
        for condition in inside[1:]:
            inside[0] = b.both(inside[0], condition)
        return b.guarded(inside[0], value, b.like(0, value)) if inside else value

    return b.compute([*shape[:2], *needed], element, "frame")


def _output(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    ]


def _sizes(value: Sequence[int], rank: int) -> list[int]:
    """One number for every spatial dimension stands for all of them."""
    return list(itertools.islice(itertools.cycle(value), rank))
