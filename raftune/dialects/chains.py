"""Reading a region of several operators: shapes of its inner values, and what is behind views. Imports no torch."""

from __future__ import annotations

import math

from raftune.workload import Arg, In, Operator, Out, Workload

Shape = tuple[int, ...]

# They leave every element in its place in row-major order.
RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default", "aten.expand.default", "aten.detach.default"})
# Operator -> position of the first matrix.
PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}

# Operator -> position of the argument whose shape its result has.
_LIKE = {
    "aten.mul.Tensor": 0,
    "aten.div.Tensor": 0,
    "aten.clone.default": 0,
    "aten._softmax.default": 0,
    "aten._log_softmax.default": 0,
    "aten._log_softmax_backward_data.default": 1,
    "aten.nll_loss_backward.default": 1,
}
SCALES = ("aten.mul.Tensor", "aten.div.Tensor")


def factor_of(call: Operator) -> float | None:
    """The plain number that a call of :data:`SCALES` multiplies its first argument with; ``None`` for any other call."""
    number = call.args[1] if call.op in SCALES else None
    if not isinstance(number, int | float) or isinstance(number, bool) or number == 0:
        return None
    return float(number) if call.op == SCALES[0] else 1 / number


class Chains:
    """The operators of a workload as chains of values; a value is an :class:`In` or an :class:`Out`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def operator(self, value: Arg) -> Operator | None:
        """The operator whose first result ``value`` is; ``None`` for an input or another result."""
        return self._workload.operators[value.node] if isinstance(value, Out) and value.index == 0 else None

    def shape(self, value: Arg) -> Shape | None:
        """``None`` for what has no shape here: a number, or a result of an operator that is not known to this module."""
        if isinstance(value, In):
            return self._workload.inputs[value.index].shape
        call = self.operator(value)
        if call is None:
            return None
        if call.op in PRODUCTS:
            left, right = self.shape(call.args[PRODUCTS[call.op]]), self.shape(call.args[PRODUCTS[call.op] + 1])
            return None if left is None or right is None else (*left[:-1], right[-1])
        if call.op == "aten.add.Tensor":
            return _broadcast(self.shape(call.args[0]), self.shape(call.args[1]))
        if call.op in _LIKE:
            return self.shape(call.args[_LIKE[call.op]])
        if call.op == "aten.t.default":
            matrix = self.shape(call.args[0])
            return None if matrix is None else matrix[::-1]
        before = self.shape(call.args[0]) if call.op in RESHAPES else None
        sizes = call.args[1] if len(call.args) > 1 else before
        if before is None or not isinstance(sizes, tuple):
            return None
        return _resolved(tuple(n for n in sizes if isinstance(n, int)), before, expands="expand" in call.op)

    def behind(self, value: Arg) -> Arg:
        """``value`` before the views that keep the row-major order of its elements."""
        while (call := self.operator(value)) is not None and call.op in RESHAPES:
            before, after = self.shape(call.args[0]), self.shape(value)
            if before is None or after is None or math.prod(before) != math.prod(after):
                break
            value = call.args[0]
        return value


def _broadcast(one: Shape | None, other: Shape | None) -> Shape | None:
    if one is None or other is None:
        return None
    rank = max(len(one), len(other))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (one, other))
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


def _resolved(sizes: Shape, before: Shape, *, expands: bool) -> Shape:
    """``sizes`` with -1 replaced: by what is there already in an expansion, by what is left over otherwise."""
    if expands:
        kept = (1,) * (len(sizes) - len(before)) + before
        return tuple(old if new == -1 else new for new, old in zip(sizes, kept, strict=True))
    known = math.prod(n for n in sizes if n != -1)
    return tuple(math.prod(before) // max(known, 1) if n == -1 else n for n in sizes)
