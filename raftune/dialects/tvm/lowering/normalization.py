"""Batch and group normalization, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import Check, lowers
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor


def _float_inputs(first: int) -> Check:
    """A check for calls of which argument ``first`` has channels and something beside them."""

    def check(workload: Workload, operator: Operator) -> bool:
        value = operator.args[first]
        return not isinstance(value, In) or (
            workload.inputs[value.index].dtype in ("float32", "float64") and len(workload.inputs[value.index].shape) >= 2
        )

    return check


def _in_training(workload: Workload, operator: Operator) -> bool:
    """Without training there are no statistics of the batch, and their places are empty tensors."""
    return operator.args[5] is True and _float_inputs(0)(workload, operator)


@lowers("aten._native_batch_norm_legit_functional.default", check=_in_training)
def batch_norm(
    b: Builder,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """The result, the batch's mean and inverse deviation, and the new running statistics."""
    shape = b.broadcast(x)
    count = math.prod(shape) // shape[1]
    del training
    axes = [0, *range(2, len(shape))]
    mean = b.pointwise(lambda s: s * b.like(1 / count, s), b.reduce(x, axes), kind="keep")
    squares = b.reduce(x, axes, lambda *i: _square(x(*i) - mean(i[1])))
    rstd = b.pointwise(lambda s: b.like(1, s) / b.sqrt(s * b.like(1 / count, s) + b.like(eps, s)), squares, kind="keep")
    kept, unbiased = 1 - momentum, momentum / (count - 1) if count > 1 else math.inf
    new_mean = b.pointwise(lambda old, m: old * b.like(kept, m) + m * b.like(momentum, m), running_mean, mean)
    new_var = b.pointwise(lambda old, s: old * b.like(kept, s) + s * b.like(unbiased, s), running_var, squares)

    def element(*i: Expr) -> Expr:
        value = (x(*i) - mean(i[1])) * rstd(i[1])
        if weight is not None:
            value = value * weight(i[1])
        return value if bias is None else value + bias(i[1])

    out = b.compute(shape, element)
    return out, mean, rstd, new_mean, new_var


@lowers("aten.native_batch_norm_backward.default", check=_float_inputs(1))
def batch_norm_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    shape = b.broadcast(x)
    axes = [0, *range(2, len(shape))]
    scale = 1 / (math.prod(shape) // shape[1])
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean = running_mean
        rstd = b.pointwise(lambda v: b.like(1, v) / b.sqrt(v + b.like(eps, v)), running_var, kind="keep")
    assert mean is not None
    assert rstd is not None
    # A stage that nothing reads would be missing in the function.
    total = b.reduce(grad, axes) if output_mask[2] or (output_mask[0] and train) else None
    dotted = None
    if output_mask[1] or (output_mask[0] and train):
        dotted = b.reduce(x, axes, lambda *i: grad(*i) * (x(*i) - mean(i[1])))

    def element(*i: Expr) -> Expr:
        c = i[1]
        value = grad(*i)
        if total is not None and dotted is not None and train:
            projected = (x(*i) - mean(c)) * _square(rstd(c)) * dotted(c) * b.like(scale, value)
            value = value - total(c) * b.like(scale, value) - projected
        value = value * rstd(c)
        return value if weight is None else value * weight(c)

    return (
        b.compute(shape, element) if output_mask[0] else None,
        b.pointwise(lambda d, r: d * r, dotted, rstd) if output_mask[1] else None,
        total if output_mask[2] else None,
    )


@lowers("aten.native_group_norm.default", check=_float_inputs(0))
def group_norm(
    b: Builder,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = b.broadcast(x)
    each = channels // groups
    rows = _grouped(b, x, groups)
    scale = 1 / (each * plane)
    mean = b.pointwise(lambda s: s * b.like(scale, s), b.reduce(rows, [2, 3]), kind="keep")
    squares = b.reduce(rows, [2, 3], lambda *i: _square(rows(*i) - mean(*i[:2])))
    rstd = b.pointwise(lambda s: b.like(1, s) / b.sqrt(s * b.like(scale, s) + b.like(eps, s)), squares, kind="keep")
    del batch

    def element(*i: Expr) -> Expr:
        value = (x(*i) - mean(i[0], i[1] // each)) * rstd(i[0], i[1] // each)
        if weight is not None:
            value = value * weight(i[1])
        return value if bias is None else value + bias(i[1])

    return b.compute(shape, element), mean, rstd


@lowers("aten.native_group_norm_backward.default", check=_float_inputs(1))
def group_norm_backward(
    b: Builder,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: int,
    channels: int,
    plane: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    del batch
    shape = b.broadcast(x)
    each = channels // groups
    planes = list(range(2, len(shape)))
    # Sums over a plane are all that the gradients need of it.
    total = b.reduce(grad, planes)
    dotted = b.reduce(grad, planes, lambda *i: grad(*i) * x(*i))
    scale = 1 / (each * plane)

    def weighted(value: Tensor) -> Tensor:
        by_channel = b.compute(
            (shape[0], groups, each),
            lambda n, g, c: value(n, g * each + c) * weight(g * each + c) if weight is not None else value(n, g * each + c),
        )
        return b.reduce(by_channel, [2])

    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        plain, product = weighted(total), weighted(dotted)

        def element(*i: Expr) -> Expr:
            n, g = i[0], i[1] // each
            value = grad(*i) if weight is None else grad(*i) * weight(i[1])
            centred = (x(*i) - mean(n, g)) * rstd(n, g)
            along = (product(n, g) - plain(n, g) * mean(n, g)) * rstd(n, g)
            return (value - (plain(n, g) + centred * along) * b.like(scale, value)) * rstd(n, g)

        grad_input = b.compute(shape, element)
    if output_mask[1]:
        terms = b.compute(shape[:2], lambda n, c: (dotted(n, c) - total(n, c) * mean(n, c // each)) * rstd(n, c // each))
        grad_weight = b.reduce(terms, [0])
    if output_mask[2]:
        grad_bias = b.reduce(total, [0])
    return grad_input, grad_weight, grad_bias


def _grouped(b: Builder, x: Tensor, groups: int) -> Tensor:
    """``[N, groups, C / groups, plane]`` of ``[N, C, ...]``."""
    shape = b.broadcast(x)
    each, sizes = shape[1] // groups, shape[2:]

    def element(n: Expr, g: Expr, c: Expr, p: Expr) -> Expr:
        at: list[Expr] = []
        for size in reversed(sizes):
            at.insert(0, p % size)
            p = p // size
        return x(n, g * each + c, *at)

    return b.compute((shape[0], groups, each, math.prod(sizes)), element)


def _square(x: Expr) -> Expr:
    return x * x
