"""Operators that only say where an element lies, within a region: views, and what puts tensors together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import lowers

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor


@lowers("aten.view.default", "aten._unsafe_view.default")
def view(b: Builder, x: Tensor, size: Sequence[int]) -> Tensor:
    shape = b.broadcast(x)
    known = math.prod(n for n in size if n != -1)
    target = [math.prod(shape) // known if n == -1 else n for n in size]
    return b.compute(target, lambda *i: x(*_reindexed(shape, target, i)))


def _reindexed(source: Sequence[int], target: Sequence[int], indices: Sequence[Expr]) -> list[Expr]:
    """Indices into ``source`` of the element that ``indices`` name in ``target``, which has as many elements.

    Dimensions are matched in the smallest groups with equal products, so that most indices stay what they are.
    """
    found: list[Expr] = [0] * len(source)
    from_, to = ([d for d, n in enumerate(shape) if n > 1] for shape in (source, target))
    while from_:
        rows, columns = 1, 1
        theirs: list[int] = []
        ours: list[int] = []
        while not theirs or rows != columns:
            if rows <= columns:
                theirs.append(from_.pop(0))
                rows *= source[theirs[-1]]
            else:
                ours.append(to.pop(0))
                columns *= target[ours[-1]]
        flat: Expr = 0
        for d in ours:
            flat = flat * target[d] + indices[d]
        for d in theirs:
            rows //= source[d]
            found[d] = flat // rows if d == theirs[0] else flat // rows % source[d]
    return found


@lowers("aten.permute.default")
def permute(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    shape = b.broadcast(x)
    order = [d % len(shape) for d in dims]
    return b.compute([shape[d] for d in order], lambda *i: x(*(i[order.index(d)] for d in range(len(shape)))))


@lowers("aten.transpose.int")
def transpose(b: Builder, x: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(len(b.broadcast(x))))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(b, x, order)


@lowers("aten.t.default")
def transpose_matrix(b: Builder, x: Tensor) -> Tensor:
    return permute(b, x, list(range(len(b.broadcast(x))))[::-1])


@lowers("aten.expand.default")
def expand(b: Builder, x: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    del implicit
    shape = b.broadcast(x)
    missing = len(size) - len(shape)
    target = [shape[d - missing] if n == -1 else n for d, n in enumerate(size)]
    return b.compute(target, lambda *i: b.at(x, i))


@lowers("aten.unsqueeze.default")
def unsqueeze(b: Builder, x: Tensor, dim: int) -> Tensor:
    shape = list(b.broadcast(x))
    at = dim % (len(shape) + 1)
    return b.compute([*shape[:at], 1, *shape[at:]], lambda *i: x(*i[:at], *i[at + 1 :]))


@lowers("aten.squeeze.dim")
def squeeze(b: Builder, x: Tensor, dim: int) -> Tensor:
    shape = b.broadcast(x)
    at = dim % len(shape)
    if shape[at] != 1:
        return b.compute(shape, x)
    return select(b, x, at, 0)


@lowers("aten.select.int")
def select(b: Builder, x: Tensor, dim: int, index: int) -> Tensor:
    shape = b.broadcast(x)
    at = dim % len(shape)
    return b.compute([*shape[:at], *shape[at + 1 :]], lambda *i: x(*i[:at], index % shape[at], *i[at:]))


@lowers("aten.slice.Tensor")
def slice_(b: Builder, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    shape = list(b.broadcast(x))
    at = dim % len(shape)
    first, last, _ = slice(start, end, step).indices(shape[at])
    shape[at] = len(range(first, last, step))
    return b.compute(shape, lambda *i: x(*i[:at], first + i[at] * step, *i[at + 1 :]))


@lowers("aten.slice_backward.default")
def slice_backward(b: Builder, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    at = dim % len(sizes)
    first, last, _ = slice(start, end, step).indices(sizes[at])
    count = len(range(first, last, step))

    def element(*i: Expr) -> Expr:
        offset = i[at] - first
        inside = b.both(i[at] >= first, offset < count * step)
        if step > 1:
            inside = b.both(inside, b.compare("eq", offset % step, b.constant(0, "int32")))
        value = grad(*i[:at], offset // step if step > 1 else offset, *i[at + 1 :])
        return b.guarded(inside, value, b.like(0, value))

    return b.compute(sizes, element)


@lowers("aten.select_backward.default")
def select_backward(b: Builder, grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    at = dim % len(sizes)
    chosen = index % sizes[at]

    def element(*i: Expr) -> Expr:
        value = grad(*i[:at], *i[at + 1 :])
        return b.select(b.compare("eq", i[at], b.constant(chosen, "int32")), value, b.like(0, value))

    return b.compute(sizes, element)


@lowers("aten.cat.default")
def cat(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shapes = [b.broadcast(t) for t in tensors]
    at = dim % len(shapes[0])
    starts = [sum(shape[at] for shape in shapes[:n]) for n in range(len(shapes) + 1)]
    dtype = b.result_type(*tensors)

    def part(n: int, i: Sequence[Expr]) -> Expr:
        return b.cast(tensors[n](*i[:at], i[at] - starts[n], *i[at + 1 :]), dtype)

    return b.compute([*shapes[0][:at], starts[-1], *shapes[0][at + 1 :]], lambda *i: _piecewise(b, i[at], starts, part, i))


@lowers("aten.stack.default")
def stack(b: Builder, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(b.broadcast(tensors[0]))
    at = dim % (len(shape) + 1)
    dtype = b.result_type(*tensors)

    def part(n: int, i: Sequence[Expr]) -> Expr:
        return b.cast(tensors[n](*i[:at], *i[at + 1 :]), dtype)

    starts = list(range(len(tensors) + 1))
    return b.compute([*shape[:at], len(tensors), *shape[at:]], lambda *i: _piecewise(b, i[at], starts, part, i))


def _piecewise(
    b: Builder, position: Expr, starts: Sequence[int], part: Callable[[int, Sequence[Expr]], Expr], i: Sequence[Expr]
) -> Expr:
    """Part ``n`` where ``position`` is below ``starts[n + 1]``; of all but the last only what is asked for is evaluated."""
    value = part(len(starts) - 2, i)
    for n in reversed(range(len(starts) - 2)):
        value = b.guarded(position < starts[n + 1], part(n, i), value)
    return value
